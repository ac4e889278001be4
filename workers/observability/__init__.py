"""A worker's metrics, progress, traces and watchdog."""
