"""What somebody could have done who knew everything beforehand: which deadlines, and for how much at least.

The oracle knows when jobs come and how long their answers turn out, and asks for its machines a cold start before it
needs them, though not before the beginning. Like anybody it pays for starts and for workers that have nothing to do,
has only whole workers, and changes their number when the autoscaler looks. To its favour its machines are never taken
away, its work is divided at will, fills every batch and never waits for a dispatcher, and it may change its mind as
often as it likes.

*Deadlines.* All machines together are one that is as fast as all of them; on it, earliest deadline first meets every
deadline that can be met (Dertouzos 1974). Where it can't meet all, jobs are left out until it meets the others: of
those that are in the way of the first that is late, the largest, as Moore (1968) has it for jobs that are there from
the beginning. With arrivals this need not be the largest set.

*Cost.* That of `least_cost`, which no schedule goes below.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from pipeline.simulator.lower_bound import OracleJob, least_cost


@dataclass(frozen=True, slots=True)
class OracleResult:
    """What could have been done.

    Attributes:
        met: of the tasks, by their place, whether their deadline could be met; those without one count as met.
        worker_seconds: that any schedule pays for at least.  peak: workers that it needs at once, at least.
    """

    met: tuple[bool, ...]
    worker_seconds: float
    peak: int


def best(
    tasks: Sequence[OracleJob],
    most: int,
    cold_start_seconds: float,
    within: float,
    step: float = 30.0,
    ready: float = 0.0,
) -> OracleResult:
    """Tasks whose deadlines can't be met cost nothing here.

    Args:
        most: workers.  cold_start_seconds: seconds of each start.
        within: seconds after its arrival that work without a deadline is to be done in; only the cost depends on it.
        step: seconds between two changes of the number of workers.  ready: the moment at which the first can be there.
    """
    met = _feasible(tasks, most, ready)
    paid = [task if task.due < inf else OracleJob(task.arrival, task.work, task.arrival + within)
            for task, kept in zip(tasks, met, strict=True) if kept]  # fmt: skip
    seconds, peak = least_cost(paid, most, cold_start_seconds, step)
    return OracleResult(tuple(met), seconds, peak)


def _feasible(tasks: Sequence[OracleJob], most: int, ready: float) -> list[bool]:
    left_out: set[int] = set()
    while (late := _first_late(tasks, most, ready, left_out)) is not None:
        left_out.add(late)
    return [place not in left_out for place in range(len(tasks))]


def _first_late(tasks: Sequence[OracleJob], most: int, ready: float, left_out: set[int]) -> int | None:
    """Play EDF; at the first deadline that is missed, the largest of what kept the machines busy without a break until
    then, of those due no later. None: all are met."""
    waiting: list[tuple[float, int]] = []
    left = [task.work / most for task in tasks]
    coming = sorted((task.arrival, place) for place, task in enumerate(tasks) if place not in left_out)
    now, busy_with, following = ready, list[int](), 0
    while following < len(coming) or waiting:
        if not waiting:
            now, busy_with = max(now, coming[following][0]), []
        while following < len(coming) and coming[following][0] <= now + 1e-9:
            place = coming[following][1]
            heapq.heappush(waiting, (tasks[place].due, place))
            busy_with.append(place)
            following += 1
        due, place = waiting[0]
        until = now + left[place]
        if following < len(coming) and coming[following][0] < until:
            left[place] -= coming[following][0] - now
            now = coming[following][0]
            continue
        heapq.heappop(waiting)
        now = until
        if now > due + 1e-6:
            return max((other for other in busy_with if tasks[other].due <= due), key=lambda other: tasks[other].work)
    return None
