"""The least that any schedule pays which knows all beforehand: workers are whole, have a start each time, and are paid
while they have nothing to do.

Two bounds, of which the higher counts. Neither asks for more than every schedule must do, so no schedule goes below.

*Step by step* (`_stepwise`). Time goes in steps, as often as the autoscaler looks. W(t), the work that is done, is at
most what has come by then and at least what was due by then. Of all courses of the number of workers that keep it
between these two curves the cheapest is found, by dynamic programming over (done, workers): a worker's step costs its
length, and one more than a step ago a cold start. The curves forget which job is which: a schedule that they allow may
work on a job of tomorrow while one of today waits, as long as the sum is right; and both are rounded to the oracle's
favour, what comes to the beginning of its step, what is due to the end.

*Stretch by stretch* (`_in_stretches`), which costs nothing to reckon, for fleets that are too large for that: each
second of work once; and in each stretch of time that no job's window reaches across, for as many workers as the densest
interval needs, a start, or being kept since the stretch before, whichever is less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MOST_CELLS: Final = 3 * 10**8
"""Steps x amounts of work x workers that are looked at; more would take longer than the simulation itself."""


@dataclass(frozen=True, slots=True)
class OracleJob:
    """A job to the oracle. `work`: seconds of one worker; `due`: a moment, infinite where it has no deadline."""

    arrival: float
    work: float
    due: float = inf


def least_cost(tasks: Sequence[OracleJob], most: int, cold_start_seconds: float, step: float) -> tuple[float, int]:
    """Worker-seconds that all of them cost at least, each done until it is due; and the workers that are needed at
    once, at least.

    Args:
        most: workers.  step: seconds between two changes of their number.
    """
    if not tasks:
        return 0.0, 0
    low, peak = _in_stretches(tasks, cold_start_seconds)
    return max(low, _stepwise(tasks, most, cold_start_seconds, step)), peak


def _stepwise(tasks: Sequence[OracleJob], most: int, cold_start_seconds: float, step: float) -> float:
    """0 where it would take too long, or where the steps are too coarse for the work."""
    steps = ceil(max(task.due for task in tasks) / step) + 1
    come, owed = _curves(tasks, steps, step)
    if steps * (most + 1) * float(np.mean(come - owed + 1)) > MOST_CELLS:
        return 0.0
    workers = np.arange(most + 1)
    # cost[n, w]: of the cheapest course that has n workers now and owed[t - 1] + w units of work done
    cost = np.full((most + 1, 1), inf)
    cost[0, 0] = 0.0
    base = 0
    for at in range(steps):
        cost = _changed(cost, workers, cold_start_seconds, may_start=(at + 1) * step > cold_start_seconds)
        low, high = int(owed[at]), int(come[at])
        moved = np.full((most + 1, high - low + 1), inf)
        for n in range(most + 1):
            _advance(cost[n], base + n, moved[n], low, high)
        cost, base = moved + (workers * step)[:, None], low
    least = float(np.min(cost))
    return least if least < inf else 0.0


def _curves(tasks: Sequence[OracleJob], steps: int, step: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Work that has come and that is due, in steps of a worker: at the end of each step."""
    come, due = np.zeros(steps + 1), np.zeros(steps + 1)
    for task in tasks:
        come[min(steps, int(task.arrival / step))] += task.work / step
        due[min(steps, ceil(task.due / step))] += task.work / step
    owed = np.floor(np.cumsum(due)[:steps] + 1e-6).astype(np.int64)
    return np.maximum(np.ceil(np.cumsum(come)[:steps] - 1e-6).astype(np.int64), owed), owed


def _changed(cost: NDArray[Any], workers: NDArray[Any], cold_start_seconds: float, *, may_start: bool) -> NDArray[Any]:
    """With another number of workers: fewer at once and for nothing, more for a start of each."""
    fewer = np.minimum.accumulate(cost[::-1], axis=0)[::-1]
    if not may_start:
        return fewer
    starts = (workers * cold_start_seconds)[:, None]
    return np.minimum(fewer, np.minimum.accumulate(cost - starts, axis=0) + starts)


def _advance(of_n: NDArray[Any], base: int, into: NDArray[Any], low: int, high: int) -> None:
    """All of n workers work as far as there is anything to do: having done more is never worse."""
    begin, end = max(0, low - base), min(len(of_n), high - base + 1)
    if begin < end:
        into[begin + base - low : end + base - low] = of_n[begin:end]
    beyond = of_n[max(0, end) :]
    if len(beyond):
        into[-1] = min(into[-1], float(np.min(beyond)))


def _in_stretches(tasks: Sequence[OracleJob], cold_start_seconds: float) -> tuple[float, int]:
    total, peak, ended = 0.0, 0, -inf
    for stretch in _stretches(tasks):
        begin, workers = min(task.arrival for task in stretch), _workers(stretch)
        total += sum(task.work for task in stretch) + workers * min(cold_start_seconds, max(0.0, begin - ended))
        peak, ended = max(peak, workers), max(task.due for task in stretch)
    return total, peak


def _stretches(tasks: Sequence[OracleJob]) -> list[list[OracleJob]]:
    """Tasks whose windows touch, together."""
    found: list[list[OracleJob]] = []
    end = -inf
    for task in sorted(tasks, key=lambda one: one.arrival):
        if task.arrival > end or not found:
            found.append([])
        found[-1].append(task)
        end = max(end, task.due)
    return found


def _workers(tasks: Sequence[OracleJob]) -> int:
    """The most that work of one interval, come and due within it, needs at once over all of it."""
    arrivals = np.array([task.arrival for task in tasks])
    dues = np.array([task.due for task in tasks])
    works = np.array([task.work for task in tasks])
    by_due = np.argsort(dues, kind="stable")
    arrivals, dues, works = arrivals[by_due], dues[by_due], works[by_due]
    most = 0.0
    for begin in np.unique(arrivals):
        within = np.cumsum(np.where(arrivals >= begin, works, 0.0))
        span = np.maximum(dues - begin, 1e-9)
        most = max(most, float(np.max(np.where(arrivals >= begin, within / span, 0.0))))
    return max(1, ceil(most - 1e-9))
