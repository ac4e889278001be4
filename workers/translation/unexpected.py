"""What nobody foresaw about one request: its own error, and a line in the log.

A worker serves many requests at once, and what they and the model say is anybody's: an exception on the way of one of
them must be the end of no other. Neither the error nor the log quotes the exception's message: it may hold text of the
request, or of an answer that a content policy would have withheld.
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
    """The error that the request ends with. Logged as `what`, with the request's name and the innermost lines of
    code."""
    kind = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    at = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    logger.error(what, request=request, error=kind, at=at)
    return RowError(RowErrorCode.ENGINE_ERROR, f"the worker failed with this request ({kind}); see its log")
