"""Computes shards: prefetch, the worker's loop, checkpoints, and isolation of poison rows."""
