"""Loads, warms up and evaluates a model."""
