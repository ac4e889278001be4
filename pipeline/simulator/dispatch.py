"""What the dispatcher does in the simulation: open jobs, and the queues that their shards are put on.

What decides is what decides in production: `dispatch_order`, `is_deadline_at_risk`, `plan_shedding` and `FairShares`
say whose shard goes onto a queue, and `backlog_for` how long the queue may be.
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
from pipeline.dispatcher.ordering import backlog_for, dispatch_order, is_deadline_at_risk, urgency
from pipeline.simulator.workers import SimJob
from pipeline.worker_client.protocol import BY_URGENCY
from schemas.jobs.job import Tier


class WaitingShard(NamedTuple):
    """A shard on a queue, with its rows."""

    job: SimJob
    number: int
    rows: float


class SimulatedDispatch:
    """Attributes:
    queues: shards that nobody has taken yet.
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
        """It has ended: none of its shards is handed out any more."""
        tier, tenant = job.order.tier, job.order.tenant
        of_tenant = self._jobs[tier][tenant]
        of_tenant.remove(job)
        if not of_tenant:
            del self._jobs[tier][tenant]
        for entry in [entry for entry in self.queues[tier] if entry.job is job]:
            self.queues[tier].remove(entry)

    def fill(self, now: float, workers: int, rate: float) -> int:
        """One look; how many shards were put. `rate`: tokens a second of all workers."""
        depth = backlog_for(self._settings.backlog, workers, self._settings.backlog_per_worker)
        put = 0
        for tier in BY_URGENCY:
            queue, shares = self.queues[tier], self._shares[tier]
            room = depth - len(queue)
            wanted = self._wanted(tier, room, now, rate) if room > 0 else []
            pressing = partial(self._presses, shares=shares, now=now, rate=rate)
            for job, number in dispatch_order(shares, wanted, room, lambda job: job.order, pressing, self._is_lost):
                rows = job.put(number)
                queue.append(WaitingShard(job, number, rows))
                shares.charge(job.order.tenant, round(rows * job.planned_tokens))
                put += 1
        return put

    def _wanted(self, tier: Tier, room: int, now: float, rate: float) -> list[tuple[SimJob, list[int]]]:
        """Of each tenant the first jobs, as many as fill the room: `dispatch_order` would look at no others."""
        self._sort_out(tier, now, rate)
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

    def _sort_out(self, tier: Tier, now: float, rate: float) -> None:
        """Which deadlines can be met, looked at as often as the dispatcher does."""
        if now < self._shed_at.get(tier, -inf) + self._settings.cache_every:
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

    def _presses(self, job: SimJob, shares: FairShares, now: float, rate: float) -> bool:
        left = None if job.due is None or self._is_lost(job) else job.due - now
        together = self._shedding_plans[job.order.tier].cumulative_tokens.get(job.order.id, 0.0)
        return is_deadline_at_risk(
            left, job.rows_left * job.planned_tokens, together, rate, shares.ahead(job.order.tenant)
        )
