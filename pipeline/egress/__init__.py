"""Egress publishes results, job changes and release events to topics, at least once."""
