"""Texts as vectors: encoders, and what a model publishes about how its hidden states become one vector."""
