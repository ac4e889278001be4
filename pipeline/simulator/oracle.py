"""The oracle: the deadlines that a scheduler with full knowledge could meet, and a lower bound of their cost.

The oracle knows arrivals and answer lengths in advance, and requests workers one cold start ahead, though not before
the trace begins. It pays for cold starts and idle workers, has whole workers only, and changes their number at the
autoscaler's interval. In its favour, workers are never interrupted, work divides at will, every batch is full, and
dispatching takes no time.

*Deadlines.* All workers together count as one that is as fast as all of them. On it, earliest deadline first meets
every set of deadlines that can be met (Dertouzos 1974). Where not all can be met, jobs are removed until the others
are: at the first late job, the largest of those that delayed it, as in Moore (1968) for jobs that all arrive at the
beginning. With arrivals this need not be the largest feasible set.

*Cost.* That of `least_cost`, a lower bound for every schedule.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from pipeline.simulator.lower_bound import OracleJob, least_cost


@dataclass(frozen=True, slots=True)
class OracleResult:
    """The oracle's outcome.

    Attributes:
        met: for each task, whether its deadline could be met; tasks without one count as met.
        worker_seconds, peak: lower bounds of any schedule's paid time and concurrent workers.
    """

    met: tuple[bool, ...]
    worker_seconds: float
    peak: int


def best(
    tasks: Sequence[OracleJob],
    max_workers: int,
    cold_start_seconds: float,
    within: float,
    step: float = 30.0,
    ready: float = 0.0,
) -> OracleResult:
    """The outcome of the oracle. Tasks whose deadlines can't be met cost nothing.

    Args:
        cold_start_seconds: of each start.
        within: implied deadline of work without one, in seconds from its arrival; only the cost depends on it.
        step: seconds between two changes of the number of workers.  ready: time at which the first worker can compute.
    """
    met = _feasible(tasks, max_workers, ready)
    paid = [task if task.due < inf else OracleJob(task.arrival, task.work, task.arrival + within)
            for task, is_met in zip(tasks, met, strict=True) if is_met]  # fmt: skip
    seconds, peak = least_cost(paid, max_workers, cold_start_seconds, step)
    return OracleResult(tuple(met), seconds, peak)


def _feasible(tasks: Sequence[OracleJob], max_workers: int, ready: float) -> list[bool]:
    removed: set[int] = set()
    while (late := _first_late(tasks, max_workers, ready, removed)) is not None:
        removed.add(late)
    return [index not in removed for index in range(len(tasks))]


def _first_late(tasks: Sequence[OracleJob], max_workers: int, ready: float, removed: set[int]) -> int | None:
    """Run earliest deadline first. At the first missed deadline, the largest job of the busy period until then that is
    due no later; None: all deadlines are met."""
    waiting: list[tuple[float, int]] = []
    left = [task.work / max_workers for task in tasks]
    arrivals = sorted((task.arrival, index) for index, task in enumerate(tasks) if index not in removed)
    now, busy_period, following = ready, list[int](), 0
    while following < len(arrivals) or waiting:
        if not waiting:
            now, busy_period = max(now, arrivals[following][0]), []
        while following < len(arrivals) and arrivals[following][0] <= now + 1e-9:
            index = arrivals[following][1]
            heapq.heappush(waiting, (tasks[index].due, index))
            busy_period.append(index)
            following += 1
        due, index = waiting[0]
        until = now + left[index]
        if following < len(arrivals) and arrivals[following][0] < until:
            left[index] -= arrivals[following][0] - now
            now = arrivals[following][0]
            continue
        heapq.heappop(waiting)
        now = until
        if now > due + 1e-6:
            return max((other for other in busy_period if tasks[other].due <= due), key=lambda other: tasks[other].work)
    return None
