"""A lower bound of what any schedule pays, with full knowledge of the trace: workers are whole, pay a cold start each
time, and cost the same when idle.

Two bounds are computed, and the larger one counts. Neither requires more than every schedule must do.

*By steps* (`_bound_by_steps`). Time is divided into the autoscaler's intervals. The completed work W(t) is at most the
work that has arrived by t and at least the work that was due by t. Dynamic programming over (completed work, workers)
finds the cheapest course of the number of workers that keeps W between these two curves: a step of a worker costs its
length, and each added worker a cold start. The curves don't distinguish jobs, so a schedule within them may compute a
later job while an earlier one waits; and both are rounded in the oracle's favour: arrivals to the beginning of their
step, deadlines to the end.

*By busy periods* (`_bound_by_periods`), for fleets that are too large for the first. Each second of work is paid once.
In each period that no job's window crosses, as many workers as the densest interval needs are started, or kept since
the period before, whichever is cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_CELLS: Final = 3 * 10**8
"""Steps x amounts of work x workers; more would take longer than the simulation itself."""


@dataclass(frozen=True, slots=True)
class OracleJob:
    """A job for the oracle. `work`: seconds of one worker; `due`: infinite without a deadline."""

    arrival: float
    work: float
    due: float = inf


def least_cost(
    tasks: Sequence[OracleJob], max_workers: int, cold_start_seconds: float, step: float
) -> tuple[float, int]:
    """Lower bounds of the worker-seconds that meet all deadlines, and of the concurrent workers.

    Args:
        step: seconds between two changes of the number of workers.
    """
    if not tasks:
        return 0.0, 0
    low, peak = _bound_by_periods(tasks, cold_start_seconds)
    return max(low, _bound_by_steps(tasks, max_workers, cold_start_seconds, step)), peak


def _bound_by_steps(tasks: Sequence[OracleJob], max_workers: int, cold_start_seconds: float, step: float) -> float:
    """The bound by steps; 0 where it would take too long, or where the steps are too coarse for the work."""
    steps = ceil(max(task.due for task in tasks) / step) + 1
    arrived, owed = _curves(tasks, steps, step)
    if steps * (max_workers + 1) * float(np.mean(arrived - owed + 1)) > MAX_CELLS:
        return 0.0
    workers = np.arange(max_workers + 1)
    # cost[n, w]: of the cheapest course with n workers now and owed[t - 1] + w units of completed work
    cost = np.full((max_workers + 1, 1), inf)
    cost[0, 0] = 0.0
    base = 0
    for at in range(steps):
        cost = _change_workers(cost, workers, cold_start_seconds, may_start=(at + 1) * step > cold_start_seconds)
        low, high = int(owed[at]), int(arrived[at])
        moved = np.full((max_workers + 1, high - low + 1), inf)
        for n in range(max_workers + 1):
            _advance(cost[n], base + n, moved[n], low, high)
        cost, base = moved + (workers * step)[:, None], low
    lowest = float(np.min(cost))
    return lowest if lowest < inf else 0.0


def _curves(tasks: Sequence[OracleJob], steps: int, step: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Arrived and due work at the end of each step, in steps of a worker."""
    arrived, due = np.zeros(steps + 1), np.zeros(steps + 1)
    for task in tasks:
        arrived[min(steps, int(task.arrival / step))] += task.work / step
        due[min(steps, ceil(task.due / step))] += task.work / step
    owed = np.floor(np.cumsum(due)[:steps] + 1e-6).astype(np.int64)
    return np.maximum(np.ceil(np.cumsum(arrived)[:steps] - 1e-6).astype(np.int64), owed), owed


def _change_workers(
    cost: NDArray[Any], workers: NDArray[Any], cold_start_seconds: float, *, may_start: bool
) -> NDArray[Any]:
    """The cost after a change of the number of workers: removing them is free, each added one costs a cold start."""
    fewer = np.minimum.accumulate(cost[::-1], axis=0)[::-1]
    if not may_start:
        return fewer
    starts = (workers * cold_start_seconds)[:, None]
    return np.minimum(fewer, np.minimum.accumulate(cost - starts, axis=0) + starts)


def _advance(of_n: NDArray[Any], base: int, into: NDArray[Any], low: int, high: int) -> None:
    """Let all n workers compute while there is work: more completed work is never worse."""
    begin, end = max(0, low - base), min(len(of_n), high - base + 1)
    if begin < end:
        into[begin + base - low : end + base - low] = of_n[begin:end]
    beyond = of_n[max(0, end) :]
    if len(beyond):
        into[-1] = min(into[-1], float(np.min(beyond)))


def _bound_by_periods(tasks: Sequence[OracleJob], cold_start_seconds: float) -> tuple[float, int]:
    total, peak, ended = 0.0, 0, -inf
    for period in _busy_periods(tasks):
        begin, workers = min(task.arrival for task in period), _min_workers(period)
        total += sum(task.work for task in period) + workers * min(cold_start_seconds, max(0.0, begin - ended))
        peak, ended = max(peak, workers), max(task.due for task in period)
    return total, peak


def _busy_periods(tasks: Sequence[OracleJob]) -> list[list[OracleJob]]:
    """Groups of tasks whose windows overlap."""
    found: list[list[OracleJob]] = []
    end = -inf
    for task in sorted(tasks, key=lambda one: one.arrival):
        if task.arrival > end or not found:
            found.append([])
        found[-1].append(task)
        end = max(end, task.due)
    return found


def _min_workers(tasks: Sequence[OracleJob]) -> int:
    """The workers that the densest interval needs: the work that arrives and is due within it, over its length."""
    arrivals = np.array([task.arrival for task in tasks])
    dues = np.array([task.due for task in tasks])
    works = np.array([task.work for task in tasks])
    by_due = np.argsort(dues, kind="stable")
    arrivals, dues, works = arrivals[by_due], dues[by_due], works[by_due]
    densest = 0.0
    for begin in np.unique(arrivals):
        within = np.cumsum(np.where(arrivals >= begin, works, 0.0))
        span = np.maximum(dues - begin, 1e-9)
        densest = max(densest, float(np.max(np.where(arrivals >= begin, within / span, 0.0))))
    return max(1, ceil(densest - 1e-9))
