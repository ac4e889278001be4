"""Tokenizer, detokenizer and log-probabilities."""
