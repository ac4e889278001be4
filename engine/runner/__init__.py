"""Computes a planned step on a device: input buffers, the forward pass, CUDA graphs, memory."""
