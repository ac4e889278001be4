"""The engine's exceptions.

Asserts elsewhere in this package guard internal invariants; errors that a caller can cause are one of these.
"""

from __future__ import annotations


class EngineError(Exception):
    """The root: every error the engine raises on purpose."""


class ModelNotFound(EngineError):
    """Raised when there are no weights at the path or name of a model."""


class UnsupportedModel(EngineError):
    """Raised when a model exists but this engine can't run it; the message names what is missing."""


class CorruptWeights(EngineError):
    """Raised when weight files are incomplete, of the wrong shape or not what their header says."""


class RequestRefused(EngineError):
    """Raised by `Engine.add` when a request can never run; the engine stores nothing of it."""


class ContextLengthExceeded(RequestRefused):
    """Raised when prompt + max_tokens do not fit the model's context or the whole KV cache.

    Attributes:
        prompt_tokens: tokens of the prompt. max_tokens: requested tokens. limit: tokens that fit.
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
    """Raised when a part of the engine is gone for good, such as a rank's process: no step will ever work again. The
    caller must discard the engine; the requests are not the cause."""


class OutOfMemory(EngineError):
    """Raised when weights or the smallest useful KV cache do not fit the memory given."""
