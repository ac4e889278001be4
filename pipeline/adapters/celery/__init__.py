"""Shard queues on any broker that Celery speaks."""
