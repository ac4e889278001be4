"""Counters that the parts of a process share, for monitoring: unexpected exceptions, dead letters."""

from __future__ import annotations

import threading
from collections import Counter

import structlog

logger = structlog.get_logger(__name__)


class UnexpectedErrors:
    """Counts unexpected exceptions by the part that raised them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def expect(self, part: str) -> None:
        """Report the part with zero until it fails: a counter that begins at one shows no increase."""
        with self._lock:
            self._counts[part] += 0

    def record(self, part: str, error: Exception, **context: object) -> None:
        """Count an exception, and log it with its traceback."""
        with self._lock:
            self._counts[part] += 1
        logger.error("an unforeseen error", part=part, error=type(error).__name__, **context, exc_info=error)

    def counts(self) -> dict[str, int]:
        """Part -> number of exceptions."""
        with self._lock:
            return dict(self._counts)


class DeadLetterCounts:
    """Counts dead letters by ingest source. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: Counter[str] = Counter()

    def record(self, source: str) -> None:
        """Count a dead letter of this ingest source."""
        with self._lock:
            self._written[source] += 1

    def read(self) -> dict[str, int]:
        """Ingest source -> number of dead letters."""
        with self._lock:
            return dict(self._written)
