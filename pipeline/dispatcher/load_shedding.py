"""Which deadlines are given up when not all can be met, so that the others are.

Earliest deadline first meets all deadlines that can be met, and under overload hardly any: each job gets its turn when
it is nearly too late, and takes the time of the next one. So jobs are given up beforehand, of those that are in the way
of the first that would be late the largest, until the others are in time: that loses the fewest (Moore 1968). It is
decided anew at each look, by what is left of each then: whoever was given up comes back when there is room.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class JobDeadline:
    """A job with a deadline: seconds until then, and tokens that are left of it."""

    job: str
    time_left: float
    tokens: float


@dataclass(frozen=True, slots=True)
class SheddingPlan:
    """What is in time, and what is not.

    Attributes:
        lost: jobs that miss their deadlines, or the others would.
        together: of the others, the tokens of each with all that is due before it.
    """

    lost: frozenset[str] = frozenset()
    together: Mapping[str, float] = field(default_factory=dict)


def plan_shedding(jobs: Iterable[JobDeadline], rate: float) -> SheddingPlan:
    """`rate`: tokens a second of all workers; with 0 nothing is known, and nothing lost."""
    if rate <= 0:
        return SheddingPlan()
    ordered = sorted(jobs, key=lambda due: (due.time_left, due.job))
    kept: list[tuple[float, str]] = []  # the largest first
    lost, total = set[str](), 0.0
    for due in ordered:
        heapq.heappush(kept, (-due.tokens, due.job))
        total += due.tokens
        while kept and total > max(0.0, due.time_left) * rate:
            tokens, job = heapq.heappop(kept)
            total += tokens
            lost.add(job)
    together, total = dict[str, float](), 0.0
    for due in ordered:
        if due.job not in lost:
            total += due.tokens
            together[due.job] = total
    return SheddingPlan(frozenset(lost), together)
