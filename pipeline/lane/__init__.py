"""The lane: interactive requests to a worker and their tokens back, in one process or over Redis."""
