"""Quantized weights: their forms, their products, and the methods that make them."""
