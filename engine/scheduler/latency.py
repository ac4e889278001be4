"""Latency histograms of an engine's requests: time to first token, between tokens, and end to end.

Samples are counted by class in fixed buckets, so that the counts of several engines can be added up. A step that
samples a token for each of many rows costs a few microseconds here: most often all rows had their last token at the
same time.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.scheduler.running_batch import RunningBatch
from engine.scheduler.sequence import CLASSES, Sequence, class_of

BOUNDS: Final = (
    0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5,
    1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Upper ends of the buckets, seconds, each included; the last bucket has none."""

_BOUNDS = np.array(BOUNDS)


@dataclass(frozen=True, slots=True)
class LatencyCounts:
    """Counts of a latency's samples since the start.

    Attributes:
        counts: by bucket; one more than there are `BOUNDS`.
        seconds: sum of all samples.
    """

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    seconds: float = 0.0


class LatencyHistogram:
    """Counts samples of a latency in fixed buckets."""

    __slots__ = ("_counts", "_seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Add `times` samples of the same value."""
        self._counts[bisect_left(BOUNDS, seconds)] += times
        self._seconds += seconds * times

    def add_each(self, seconds: NDArray[np.float64]) -> None:
        """Add one sample of each value."""
        for bucket, times in enumerate(np.bincount(np.searchsorted(_BOUNDS, seconds)).tolist()):
            self._counts[bucket] += times
        self._seconds += float(seconds.sum())

    @property
    def counts(self) -> LatencyCounts:
        return LatencyCounts(tuple(self._counts), self._seconds)


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Statistics of one class of requests; counts since the start.

    Attributes:
        running, waiting: sequences now.
        first_token: from a request's arrival in the engine to the first token of each of its choices; choices that came
            with tokens (`Request.partial`) have none.
        between_tokens: from a token of a choice to its next one; for the first one after tokens that came with the
            request, from its arrival. Accepted drafts arrive in one step with the token behind them, and count with it
            as one.
        whole: from arrival to the end of the last choice, of answered requests.
    """

    running: int = 0
    waiting: int = 0
    first_token: LatencyCounts = field(default_factory=LatencyCounts)
    between_tokens: LatencyCounts = field(default_factory=LatencyCounts)
    whole: LatencyCounts = field(default_factory=LatencyCounts)


class Latencies:
    """Records the latencies of the scheduler's requests by class (`engine.scheduler.sequence.class_of`).

    Args:
        batch: holds the time of each row's latest token.
    """

    def __init__(self, batch: RunningBatch) -> None:
        self._batch = batch
        self._first, self._between, self._whole = ([LatencyHistogram() for _ in range(CLASSES)] for _ in range(3))

    def record_tokens(self, rows: NDArray[np.int32], now: float) -> None:
        """Record that these rows have a new token.

        Args:
            rows: int32 [B].  now: seconds.
        """
        if not rows.size:
            return
        batch = self._batch
        last = batch.last_token_at[rows]
        batch.last_token_at[rows] = now
        if batch.only_class is not None and (last == last[0]).all():  # no row's first token: NaN equals nothing
            self._between[batch.only_class].add(now - float(last[0]), len(rows))
            return
        classes = batch.latency_class[rows]
        for of_class in np.unique(classes).tolist():
            gaps = now - last[(classes == of_class) & ~np.isnan(last)]
            if gaps.size:
                self._between[of_class].add_each(gaps)
        for row in rows[np.isnan(last)].tolist():
            owner = batch.owner(row)
            self._first[class_of(owner.request.priority)].add(now - owner.arrived_at)

    def record_answer(self, sequence: Sequence, now: float) -> None:
        """Record that the last choice of a request has come to its natural end."""
        self._whole[class_of(sequence.request.priority)].add(now - sequence.arrived_at)

    def stats(self, waiting: list[int]) -> tuple[ClassStats, ...]:
        """Return the statistics of all classes, the most urgent first. `waiting`: waiting sequences by class."""
        return tuple(
            ClassStats(running, queued, first.counts, between.counts, whole.counts)
            for running, queued, first, between, whole in zip(
                self._batch.by_class, waiting, self._first, self._between, self._whole, strict=True
            )
        )
