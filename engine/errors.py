"""What can go wrong in the engine, as a small tree.

Asserts elsewhere in this package guard our own invariants; what a caller can cause is one of these.
"""

from __future__ import annotations


class EngineError(Exception):
    """The root: every error the engine raises on purpose."""


class ModelNotFound(EngineError):
    """Raised when the path or name given for a model leads to no weights."""


class UnsupportedModel(EngineError):
    """Raised when a model exists but this engine can't run it; the message names what is missing."""


class CorruptWeights(EngineError):
    """Raised when weight files are incomplete, of the wrong shape or not what their header says."""


class RequestRefused(EngineError):
    """Raised by `Engine.add` when a request can never run; nothing of it is kept."""


class ContextLengthExceeded(RequestRefused):
    """Raised when prompt + max_tokens do not fit the model's context or the whole KV cache.

    Attributes:
        prompt_tokens: tokens of the prompt. max_tokens: tokens asked for. limit: tokens that fit.
    """

    def __init__(self, prompt_tokens: int, max_tokens: int, limit: int) -> None:
        super().__init__(
            f"prompt of {prompt_tokens} tokens and max_tokens {max_tokens} need "
            f"{prompt_tokens + max_tokens}, but the context holds {limit}; shorten the prompt or lower max_tokens"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class EngineLost(EngineError):
    """Raised when a part of the engine is gone for good, such as a rank's process: no step will ever work again. Nobody
    should go on with it, or blame the requests."""


class OutOfMemory(EngineError):
    """Raised when weights or the smallest useful KV cache do not fit the memory given."""
