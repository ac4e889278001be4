"""Models: a path becomes something that turns flat batches of token ids into hidden states and logits."""
