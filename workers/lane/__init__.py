"""Serves the lane: computes interactive requests in the running batch."""
