"""Shard queues and heartbeats inside one process."""
