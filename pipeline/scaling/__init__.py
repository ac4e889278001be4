"""Autoscaling decides how many workers a pool should have: a pure policy function, and the readers of its input."""
