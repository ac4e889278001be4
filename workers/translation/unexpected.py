"""Converts an unexpected exception into the error of its request, and logs it.

A worker serves many requests at once, and their texts and the model's answers are untrusted input: an exception caused
by one request must not affect another. Neither the error nor the log quotes the exception's message, which may contain
text of the request, or of an answer that a content policy would have withheld.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

import structlog

from schemas.requests.errors import RowError, RowErrorCode

_FRAMES: Final = 6

logger = structlog.get_logger(__name__)


def unforeseen(error: Exception, what: str, request: str) -> RowError:
    """Log the exception as `what`, with the request's name and the innermost code lines; returns the request's
    error."""
    kind = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    at = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    logger.error(what, request=request, error=kind, at=at)
    return RowError(RowErrorCode.ENGINE_ERROR, f"the worker failed with this request ({kind}); see its log")
