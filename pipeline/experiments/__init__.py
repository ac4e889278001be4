"""Experiments with the scheduler's weights: assignment, stored objects, comparison."""
