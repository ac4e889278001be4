"""Readers of quantized checkpoints' formats."""
