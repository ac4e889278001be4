"""Counters that the parts of a process share, for monitoring: exceptions that were never foreseen, dead letters."""

from __future__ import annotations

import threading
from collections import Counter

import structlog

logger = structlog.get_logger(__name__)


class UnexpectedErrors:
    """Counts exceptions that were never foreseen, by the part that met them. Threads share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def expect(self, part: str) -> None:
        """Report the part with zero until it fails: a counter that begins at one shows no increase."""
        with self._lock:
            self._counts[part] += 0

    def note(self, part: str, error: Exception, **context: object) -> None:
        """Count one more, and log it with its traceback."""
        with self._lock:
            self._counts[part] += 1
        logger.error("an unforeseen error", part=part, error=type(error).__name__, **context, exc_info=error)

    def counts(self) -> dict[str, int]:
        """Part -> exceptions."""
        with self._lock:
            return dict(self._counts)


class DeadLetterCounts:
    """By door. Threads share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: Counter[str] = Counter()

    def note(self, door: str) -> None:
        """One more."""
        with self._lock:
            self._written[door] += 1

    def read(self) -> dict[str, int]:
        """Door -> letters."""
        with self._lock:
            return dict(self._written)
