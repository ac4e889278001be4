"""Which shard is next, and whose: open jobs are found, planned, handed out and ended."""
