"""Encoders, and the pooling that makes one vector of a text."""
