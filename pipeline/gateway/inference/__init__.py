"""Requests whose callers wait: from a body to the lane, and back as a response or a stream."""
