"""Whose shard goes next onto a queue: tenants by weight, then the tenant's jobs by deadline and age, then the planner's
order; but a job that would miss its deadline if it waited for its turn goes first, and one that is lost (`triage`)
after those that are not. Nothing is looked up and nothing is sent here, so that what decides can be simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from math import ceil
from typing import Final, Protocol, TypeVar

from pipeline.dispatcher.fair_share import FairShares

PRESSING_TIMES: Final = 2.0
"""A job presses when this many times what is left of it, done by all workers, takes it to its deadline,"""

PRESSING_SECONDS: Final = 300.0
"""and so many seconds: shards on their way, and answers that turn out longer."""

PRESSING_TOGETHER: Final = 1.25
"""It presses, too, when it and all that is due before it take that many times less than the time until its deadline."""

ADVANCE_SECONDS: Final = 1_800.0
"""A tenant is at most so much of all workers' time ahead of the others by that: deadlines are no way to get more than
one's share for long."""

FAR = datetime.max.replace(tzinfo=UTC)


class OrderingKey(Protocol):
    """What of an order says whose turn it is."""

    @property
    def id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def deadline(self) -> datetime | None: ...
    @property
    def created_at(self) -> datetime: ...


J = TypeVar("J")


def urgency(job: OrderingKey) -> tuple[datetime, datetime, str]:
    """Which job of a tenant and tier goes first: by deadline, then age."""
    return (job.deadline or FAR, job.created_at, job.id)


def dispatch_order(
    shares: FairShares,
    jobs: Iterable[tuple[J, list[int]]],
    room: int,
    order_of: Callable[[J], OrderingKey],
    pressing: Callable[[J], bool] = lambda _job: False,
    lost: Callable[[J], bool] = lambda _job: False,
    allowed: Callable[[J, int], bool] = lambda _job, _number: True,
) -> Iterator[tuple[J, int]]:
    """Up to `room` shards, one after the other. Whoever takes one charges its tenant before asking for the next.

    Args:
        jobs: each with the numbers of shards that it wants to put, the first to go last; they are used up.
        pressing: whether a job would miss its deadline if it waited for its tenant's turn. Such jobs go first, the
            nearest deadline before the others; their tenants are charged, so the others have their turns afterwards.
        lost: whether a job misses its deadline whatever is done. Of its tenant's jobs it goes after those that don't,
            and before those that have none: what is done of it until then is kept.
        allowed: whether the shard may be put now; if not, its job is passed over.
    """
    by_tenant: defaultdict[str, list[tuple[J, list[int]]]] = defaultdict(list)

    def place(entry: tuple[J, list[int]]) -> tuple[int, tuple[datetime, datetime, str]]:
        order = order_of(entry[0])
        return 2 if order.deadline is None else int(lost(entry[0])), urgency(order)

    for entry in sorted(jobs, key=place, reverse=True):
        by_tenant[order_of(entry[0]).tenant].append(entry)
    shares.wants(by_tenant)
    while room > 0 and by_tenant:
        first = {
            tenant: order_of(entries[-1][0]).deadline or FAR
            for tenant, entries in by_tenant.items()
            if pressing(entries[-1][0])
        }
        nearest = min(first.values(), default=FAR)
        tenant = shares.next([tenant for tenant, due in first.items() if due == nearest] or by_tenant)
        job, numbers = by_tenant[tenant][-1]
        if allowed(job, number := numbers.pop()):
            room -= 1
            yield job, number
        else:
            numbers.clear()
        if not numbers:
            by_tenant[tenant].pop()
        if not by_tenant[tenant]:
            del by_tenant[tenant]


def is_deadline_at_risk(
    time_left: float | None, tokens_left: float, together: float, rate: float, ahead: float
) -> bool:
    """Whether a job that isn't lost goes before its tenant's turn.

    Args:
        time_left: seconds until its deadline; None: it has none.  tokens_left: of it.
        together: tokens of it and of all that is due before it (`SheddingPlan.together`).
        rate: tokens a second of all workers that can compute it; 0: not known.
        ahead: of its tenant, see `FairShares.ahead`.
    """
    if time_left is None or rate <= 0:
        return False
    needs = max(PRESSING_TIMES * tokens_left, PRESSING_TOGETHER * together) / rate + PRESSING_SECONDS
    return time_left < needs and ahead < ADVANCE_SECONDS * rate


def backlog_for(least: int, workers: int, per_worker: float) -> int:
    """Shards that may wait in a queue: few, so that order and priority can still change, but no fewer than its workers
    take between two looks."""
    return max(least, ceil(workers * per_worker))
