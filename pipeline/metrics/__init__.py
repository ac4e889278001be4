"""What programs that watch are told: one table of names (`table`), filled from what the parts of a process know
(`sources`), in Prometheus's text or OpenMetrics (`exposition`)."""
