"""The simulated dispatcher: open jobs, and the queues of their shards.

It decides with production code: `dispatch_order`, `is_deadline_at_risk`, `plan_shedding` and `FairShares` choose the
next shard of a queue, and `backlog_for` the length of the queue.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from functools import partial
from math import inf
from typing import NamedTuple

from pipeline.dispatcher.dispatcher import DispatchSettings
from pipeline.dispatcher.fair_share import FairShares
from pipeline.dispatcher.load_shedding import JobDeadline, SheddingPlan, plan_shedding
from pipeline.dispatcher.shard_order import backlog_for, dispatch_order, is_deadline_at_risk, urgency
from pipeline.simulator.workers import SimJob
from pipeline.worker_client.ports import BY_URGENCY
from schemas.jobs.job import Tier


class WaitingShard(NamedTuple):
    """A shard on a queue, with its rows."""

    job: SimJob
    number: int
    rows: float


class SimulatedDispatch:
    """The simulated dispatcher.

    Attributes:
        queues: shards that no worker has taken yet.
    """

    def __init__(self, settings: DispatchSettings) -> None:
        self._settings = settings
        self._jobs: dict[Tier, dict[str, list[SimJob]]] = {tier: {} for tier in BY_URGENCY}  # by tenant, by urgency
        self._shares = {tier: FairShares(settings.weights) for tier in BY_URGENCY}
        self._shedding_plans = dict.fromkeys(BY_URGENCY, SheddingPlan())
        self._shed_at: dict[Tier, float] = {}
        self.queues: dict[Tier, deque[WaitingShard]] = {tier: deque() for tier in BY_URGENCY}

    def __iter__(self) -> Iterator[SimJob]:
        """Open jobs, the more urgent tiers first."""
        for tier in BY_URGENCY:
            for jobs in self._jobs[tier].values():
                yield from jobs

    def add(self, job: SimJob) -> None:
        of_tenant = self._jobs[job.order.tier].setdefault(job.order.tenant, [])
        insort(of_tenant, job, key=lambda one: urgency(one.order))

    def forget(self, job: SimJob) -> None:
        """Remove an ended job: none of its shards is dispatched any more."""
        tier, tenant = job.order.tier, job.order.tenant
        of_tenant = self._jobs[tier][tenant]
        of_tenant.remove(job)
        if not of_tenant:
            del self._jobs[tier][tenant]
        for entry in [entry for entry in self.queues[tier] if entry.job is job]:
            self.queues[tier].remove(entry)

    def fill(self, now: float, workers: int, rate: float) -> int:
        """Run one tick; returns the number of queued shards. `rate`: tokens per second of all workers."""
        depth = backlog_for(self._settings.backlog, workers, self._settings.backlog_per_worker)
        put = 0
        for tier in BY_URGENCY:
            queue, shares = self.queues[tier], self._shares[tier]
            room = depth - len(queue)
            wanted = self._wanted(tier, room, now, rate) if room > 0 else []
            is_at_risk = partial(self._is_at_risk, shares=shares, now=now, rate=rate)
            for job, number in dispatch_order(shares, wanted, room, lambda job: job.order, is_at_risk, self._is_lost):
                rows = job.put(number)
                queue.append(WaitingShard(job, number, rows))
                shares.charge(job.order.tenant, round(rows * job.planned_tokens))
                put += 1
        return put

    def _wanted(self, tier: Tier, room: int, now: float, rate: float) -> list[tuple[SimJob, list[int]]]:
        """Each tenant's first jobs, as many as fill the room: `dispatch_order` would reach no others."""
        self._plan_shedding(tier, now, rate)
        found = []
        for jobs in self._jobs[tier].values():
            left = room
            for job in sorted(jobs, key=lambda job: 2 if job.due is None else self._is_lost(job)):
                if job.ready <= now and (numbers := job.unput(left)):
                    found.append((job, numbers))
                    left -= len(numbers)
                if left <= 0:
                    break
        return found

    def _plan_shedding(self, tier: Tier, now: float, rate: float) -> None:
        """Plan load shedding, at the dispatcher's interval."""
        if now < self._shed_at.get(tier, -inf) + self._settings.cache_interval_seconds:
            return
        self._shed_at[tier] = now
        due = [
            JobDeadline(job.order.id, job.due - now, job.rows_left * job.planned_tokens)
            for jobs in self._jobs[tier].values()
            for job in jobs
            if job.due is not None
        ]
        self._shedding_plans[tier] = plan_shedding(due, rate)

    def _is_lost(self, job: SimJob) -> bool:
        return job.order.id in self._shedding_plans[job.order.tier].lost

    def _is_at_risk(self, job: SimJob, shares: FairShares, now: float, rate: float) -> bool:
        left = None if job.due is None or self._is_lost(job) else job.due - now
        cumulative = self._shedding_plans[job.order.tier].cumulative_tokens.get(job.order.id, 0.0)
        return is_deadline_at_risk(
            left, job.rows_left * job.planned_tokens, cumulative, rate, shares.ahead(job.order.tenant)
        )
