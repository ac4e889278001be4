"""Computes shards: prefetch, the loop, checkpoints, isolation of poison rows."""
