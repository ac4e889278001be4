"""Models: a path becomes something that turns flat batches of token ids into hidden states and logits."""

from engine.models.load import ModelDescription, describe_model, load_model

__all__ = ["ModelDescription", "describe_model", "load_model"]
