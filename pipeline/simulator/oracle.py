"""What somebody could have done who knew everything beforehand: which deadlines, and for how much at least.

The oracle knows when jobs come and how long their answers turn out. Its machines are never taken away, its work can be
divided at will and never waits for a dispatcher, and each of its workers is there at the moment when it is needed
first. It pays for a worker's start like anybody.

*Deadlines.* All machines together are one that is as fast as all of them; on it, earliest deadline first meets every
deadline that can be met (Dertouzos 1974). Where it can't meet all, jobs are left out until it meets the others: of
those that are in the way of the first that is late, the largest, as Moore (1968) has it for jobs that are there from
the beginning. With arrivals this need not be the largest set.

*Cost.* No schedule costs less than: each second of work once; and in each stretch of time that no job's window reaches
across, for as many workers as the densest interval needs, a start, or being kept since the stretch before, whichever is
less. The bound asks for no more, so it is low: no schedule may reach it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np


@dataclass(frozen=True, slots=True)
class Task:
    """A job to the oracle. `work`: seconds of one worker; `due`: a moment, infinite where it has no deadline."""

    arrival: float
    work: float
    due: float = inf


@dataclass(frozen=True, slots=True)
class Best:
    """What could have been done.

    Attributes:
        met: of the tasks, by their place, whether their deadline could be met; those without one count as met.
        worker_seconds: that any schedule pays for at least.  peak: workers that it needs at once, at least.
    """

    met: tuple[bool, ...]
    worker_seconds: float
    peak: int


def best(tasks: Sequence[Task], most: int, cold_start: float, within: float) -> Best:
    """`within`: seconds after its arrival that work without a deadline is done in, at the latest; only where windows
    end depends on it. Tasks whose deadlines can't be met cost nothing here."""
    met = _feasible(tasks, most)
    paid = [task if task.due < inf else Task(task.arrival, task.work, task.arrival + within)
            for task, kept in zip(tasks, met, strict=True) if kept]  # fmt: skip
    seconds, peak = _least_cost(paid, cold_start)
    return Best(tuple(met), seconds, peak)


def _feasible(tasks: Sequence[Task], most: int) -> list[bool]:
    left_out: set[int] = set()
    while (late := _first_late(tasks, most, left_out)) is not None:
        left_out.add(late)
    return [place not in left_out for place in range(len(tasks))]


def _first_late(tasks: Sequence[Task], most: int, left_out: set[int]) -> int | None:
    """Play EDF; at the first deadline that is missed, the largest of what kept the machines busy without a break until
    then, of those due no later. None: all are met."""
    waiting: list[tuple[float, int]] = []
    left = [task.work / most for task in tasks]
    coming = sorted((task.arrival, place) for place, task in enumerate(tasks) if place not in left_out)
    now, busy_with, following = 0.0, list[int](), 0
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


def _least_cost(tasks: Sequence[Task], cold_start: float) -> tuple[float, int]:
    total, peak, ended = 0.0, 0, -inf
    for stretch in _stretches(tasks):
        begin, workers = min(task.arrival for task in stretch), _workers(stretch)
        total += sum(task.work for task in stretch) + workers * min(cold_start, max(0.0, begin - ended))
        peak, ended = max(peak, workers), max(task.due for task in stretch)
    return total, peak


def _stretches(tasks: Sequence[Task]) -> list[list[Task]]:
    """Tasks whose windows touch, together."""
    found: list[list[Task]] = []
    end = -inf
    for task in sorted(tasks, key=lambda one: one.arrival):
        if task.arrival > end or not found:
            found.append([])
        found[-1].append(task)
        end = max(end, task.due)
    return found


def _workers(tasks: Sequence[Task]) -> int:
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
