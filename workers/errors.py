"""What can go wrong in a worker, beside what the engine and single rows report."""

from __future__ import annotations


class WorkerError(Exception):
    """The root: every error a worker raises on purpose; the run can't go on."""


class TokenizerError(WorkerError):
    """Raised when a model's tokenizer is missing, broken or of a kind that can't be run here."""


class ModelMismatchError(WorkerError):
    """Raised when a job is pinned to other weights or another dtype than the loaded ones: mixing their answers in one
    job would be wrong, and refusing its rows for good would be too."""


class BrokenEngineError(WorkerError):
    """Raised when the engine's steps fail again and again, whatever they are given."""
