"""Heartbeats, leases, rate limits and the response cache on Redis."""
