"""Webhooks: tenants' endpoints are notified that a batch has ended."""
