"""Execution: a process that owns an engine; text in and out, shards, the lane, checkpoints."""
