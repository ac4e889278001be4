"""A latency histogram with fixed buckets."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.workers.metrics import LATENCY_BOUNDS


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations counted by bucket.

    Attributes:
        counts: samples by bucket; trailing zeros may be omitted.
        seconds: sum of all samples.
        bounds: inclusive upper bounds of the buckets, seconds; the last bucket has none.
    """

    counts: Sequence[int] = ()
    seconds: float = 0.0
    bounds: Sequence[float] = LATENCY_BOUNDS


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

    def read(self) -> Histogram:
        """What has been counted so far."""
        with self._lock:
            return Histogram(tuple(self._counts), self._seconds, self.bounds)
