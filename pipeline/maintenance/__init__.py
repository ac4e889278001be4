"""Retention: removes from a root what has expired."""
