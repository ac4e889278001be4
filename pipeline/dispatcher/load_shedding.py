"""Load shedding chooses the deadlines to give up when not all can be met, so that the others are met.

Earliest deadline first meets all deadlines if all can be met, but hardly any under overload: each job runs when it is
nearly too late, and takes the time of the next one. So deadlines are given up beforehand: among the jobs due up to the
first one that would be late, the largest is removed, until the others are in time. That misses the fewest deadlines
(Moore 1968). Each refresh decides again from the remaining tokens: a job returns to the plan when capacity allows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class JobDeadline:
    """A job with a deadline: seconds until the deadline, and the job's remaining tokens."""

    job: str
    time_left: float
    tokens: float


@dataclass(frozen=True, slots=True)
class SheddingPlan:
    """Which deadlines are given up, and which are met.

    Attributes:
        lost: jobs whose deadlines are given up.
        cumulative_tokens: other job -> its tokens and those of all jobs due before it.
    """

    lost: frozenset[str] = frozenset()
    cumulative_tokens: Mapping[str, float] = field(default_factory=dict)


def plan_shedding(jobs: Iterable[JobDeadline], rate: float) -> SheddingPlan:
    """Decide which deadlines to give up. `rate`: tokens per second of all workers; 0: not known, and none is given
    up."""
    if rate <= 0:
        return SheddingPlan()
    ordered = sorted(jobs, key=lambda due: (due.time_left, due.job))
    on_time: list[tuple[float, str]] = []  # the largest first
    lost, total = set[str](), 0.0
    for due in ordered:
        heapq.heappush(on_time, (-due.tokens, due.job))
        total += due.tokens
        while on_time and total > max(0.0, due.time_left) * rate:
            tokens, job = heapq.heappop(on_time)
            total += tokens
            lost.add(job)
    cumulative_tokens, total = dict[str, float](), 0.0
    for due in ordered:
        if due.job not in lost:
            total += due.tokens
            cumulative_tokens[due.job] = total
    return SheddingPlan(frozenset(lost), cumulative_tokens)
