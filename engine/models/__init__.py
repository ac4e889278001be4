"""Models: loads a path as a model that maps flat batches of token ids to hidden states and logits."""
