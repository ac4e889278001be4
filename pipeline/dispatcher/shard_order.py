"""The dispatch order of shards on a queue: tenants by weight, then the tenant's jobs by deadline and age, then the
planner's order. A job that would miss its deadline if it waited for its tenant's turn goes first. A job whose deadline
is given up (`load_shedding`) goes after its tenant's jobs that can be in time. The functions here are pure, so that the
simulator uses them too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from math import ceil
from typing import Final, Protocol, TypeVar

from pipeline.dispatcher.fair_share import FairShares

DEADLINE_RISK_FACTOR: Final = 2.0
"""A job's deadline is at risk when this many times its remaining tokens, computed by all workers, take until then,"""

DEADLINE_RISK_SECONDS: Final = 300.0
"""and this many seconds more: for shards in transit, and answers that are longer than estimated."""

DEADLINE_RISK_CUMULATIVE_FACTOR: Final = 1.25
"""It is also at risk when this many times its tokens and those of all jobs due before it take until its deadline."""

MAX_ADVANCE_SECONDS: Final = 1_800.0
"""Time of all workers by which deadlines may bring a tenant ahead of the others: deadlines must not give a tenant more
than its share for long."""

NO_DEADLINE = datetime.max.replace(tzinfo=UTC)


class OrderingKey(Protocol):
    """The fields of a job that decide its dispatch order."""

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
    """Sort key of a tenant's jobs of one tier: by deadline, then age."""
    return (job.deadline or NO_DEADLINE, job.created_at, job.id)


def dispatch_order(
    shares: FairShares,
    jobs: Iterable[tuple[J, list[int]]],
    room: int,
    order_of: Callable[[J], OrderingKey],
    is_at_risk: Callable[[J], bool] = lambda _job: False,
    is_lost: Callable[[J], bool] = lambda _job: False,
    is_allowed: Callable[[J, int], bool] = lambda _job, _number: True,
) -> Iterator[tuple[J, int]]:
    """Up to `room` shards, one after the other. The caller charges a shard's tenant before it asks for the next.

    Args:
        jobs: each with the numbers of its shards to dispatch, in reverse order; the lists are consumed.
        is_at_risk: whether a job would miss its deadline if it waited for its tenant's turn. Such jobs go first, by
            nearest deadline; their tenants are charged, so the other tenants catch up afterwards.
        is_lost: whether a job's deadline is given up. It goes after its tenant's jobs that can be in time, and before
            those without a deadline, since results that it has by its deadline count.
        is_allowed: whether the shard may be dispatched now; if not, its job is skipped.
    """
    by_tenant: defaultdict[str, list[tuple[J, list[int]]]] = defaultdict(list)

    def sort_key(entry: tuple[J, list[int]]) -> tuple[int, tuple[datetime, datetime, str]]:
        order = order_of(entry[0])
        return 2 if order.deadline is None else int(is_lost(entry[0])), urgency(order)

    for entry in sorted(jobs, key=sort_key, reverse=True):
        by_tenant[order_of(entry[0]).tenant].append(entry)
    shares.set_active(by_tenant)
    while room > 0 and by_tenant:
        due_at_risk = {
            tenant: order_of(entries[-1][0]).deadline or NO_DEADLINE
            for tenant, entries in by_tenant.items()
            if is_at_risk(entries[-1][0])
        }
        nearest = min(due_at_risk.values(), default=NO_DEADLINE)
        tenant = shares.next([tenant for tenant, due in due_at_risk.items() if due == nearest] or by_tenant)
        job, numbers = by_tenant[tenant][-1]
        if is_allowed(job, number := numbers.pop()):
            room -= 1
            yield job, number
        else:
            numbers.clear()
        if not numbers:
            by_tenant[tenant].pop()
        if not by_tenant[tenant]:
            del by_tenant[tenant]


def is_deadline_at_risk(
    time_left: float | None, tokens_left: float, cumulative_tokens: float, rate: float, ahead: float
) -> bool:
    """Whether a job whose deadline isn't given up goes before its tenant's turn.

    Args:
        time_left: seconds until its deadline; None: it has none.
        tokens_left: remaining tokens of the job.
        cumulative_tokens: tokens of the job and of all jobs due before it (`SheddingPlan.cumulative_tokens`).
        rate: tokens per second of all workers that can compute it; 0: not known.
        ahead: of its tenant, see `FairShares.ahead`.
    """
    if time_left is None or rate <= 0:
        return False
    needs = (
        max(DEADLINE_RISK_FACTOR * tokens_left, DEADLINE_RISK_CUMULATIVE_FACTOR * cumulative_tokens) / rate
        + DEADLINE_RISK_SECONDS
    )
    return time_left < needs and ahead < MAX_ADVANCE_SECONDS * rate


def backlog_for(min_backlog: int, workers: int, per_worker: float) -> int:
    """Shards that may wait in a queue: few, so that order and priority can still change, but as many as the queue's
    workers take between two ticks."""
    return max(min_backlog, ceil(workers * per_worker))
