"""Heartbeats, leases and rate limits on Redis."""
