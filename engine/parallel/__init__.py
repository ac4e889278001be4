"""Tensor parallelism: one model's weights and cache shared by several devices of one machine, a process each."""
