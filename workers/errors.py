"""Errors of a worker. The engine and single rows have their own."""

from __future__ import annotations


class WorkerError(Exception):
    """Base class of all errors that a worker raises deliberately; the run can't continue."""


class TokenizerError(WorkerError):
    """Raised when a model's tokenizer is missing, broken or of an unsupported kind."""


class ModelMismatchError(WorkerError):
    """Raised when a job is pinned to other weights or another dtype than the loaded ones. The answers of both must not
    be mixed in one job, and its rows must not be failed either."""


class BrokenEngineError(WorkerError):
    """Raised when the engine's steps fail repeatedly, whatever rows they compute."""
