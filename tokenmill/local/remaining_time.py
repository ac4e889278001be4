"""The time that a run still takes: the rows that are left, at the speed of the last half minute.

Nothing is known before as many rows have ended as are computed at once, since only short answers have ended by then;
nor when all rows that are left are being computed, since the longest of them decides.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Final, NamedTuple

WINDOW_SECONDS: Final = 30.0
MIN_SECONDS: Final = 2.0
"""Of measurements, before a speed is known."""


class RunMeasurement(NamedTuple):
    """The state of a run's engines.

    Attributes:
        seconds: since the run began to compute.
        rows: that ended in this run.  running: that are being computed.
        tokens: generated so far; 0 in runs that generate none.
    """

    seconds: float
    rows: int
    running: int
    tokens: int


class RemainingTime:
    """Estimates the time left from measurements, which come several times a second."""

    def __init__(self) -> None:
        self._measured: deque[RunMeasurement] = deque()

    def add(self, measurement: RunMeasurement) -> None:
        """Add the newest measurement, and forget those before the window."""
        measured = self._measured
        measured.append(measurement)
        while measured[-1].seconds - measured[0].seconds > WINDOW_SECONDS:
            measured.popleft()

    def estimate(self, rows_left: int) -> float | None:
        """Seconds until so many more rows have ended; None: not known."""
        if not self._measured:
            return None
        first, last = self._measured[0], self._measured[-1]
        seconds = last.seconds - first.seconds
        if seconds < MIN_SECONDS or not last.rows:
            return None
        running = self._mean_running(seconds)
        work = last.tokens - first.tokens if last.tokens else last.rows - first.rows
        if last.rows < running or rows_left <= running or not work:
            return None
        # All tokens, those of unfinished rows too, for each ended row: long answers end last, so that the mean of ended
        # ones alone is too short (this is the mean of censored lengths, if they are exponentially distributed).
        work_of_row = last.tokens / last.rows if last.tokens else 1.0
        return rows_left * work_of_row * seconds / work

    def _mean_running(self, seconds: float) -> float:
        """The rows computed at once, in the mean of the window. Between two measurements these are the more of both:
        rows that began in a step that takes long, such as the first, are in the second only."""
        rows = (
            max(before.running, after.running) * (after.seconds - before.seconds)
            for before, after in pairwise(self._measured)
        )
        return sum(rows) / seconds
