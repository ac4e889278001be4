"""Checkpoint files: safetensors and GGUF tensors, read one at a time, and the config that comes with them."""
