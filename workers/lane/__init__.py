"""Serves the lane: interactive requests in the running batch."""
