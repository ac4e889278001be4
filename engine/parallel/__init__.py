"""Tensor parallelism: one model's weights and cache sharded over several devices of one machine, a process each."""
