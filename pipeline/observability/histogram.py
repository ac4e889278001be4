"""A latency histogram with fixed buckets."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence

from schemas.workers.metrics import LATENCY_BOUNDS


class LatencyRecorder:
    """Counts durations by bucket. Thread-safe.

    Args:
        bounds: inclusive upper bounds of the buckets, seconds; the last bucket has none.
    """

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._seconds = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Add a sample."""
        with self._lock:
            self._counts[bisect_left(self.bounds, seconds)] += 1
            self._seconds += seconds

    def read(self) -> tuple[tuple[int, ...], float]:
        """The count of each bucket, and the sum of all samples in seconds."""
        with self._lock:
            return tuple(self._counts), self._seconds
