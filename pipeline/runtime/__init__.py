"""Shared runtime of long-running parts: supervision, leader election, executors, errors of unavailable services."""
