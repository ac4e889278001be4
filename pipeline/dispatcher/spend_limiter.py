"""The spend limiter decides which shards of a job may start under the spending limits of the job and its tenant.

A shard starts if the cost so far, the expected cost of running shards and its own expected cost together stay within
the limit. Running shards go on until the cost so far reaches the limit: the cost of parts, and of open shards according
to their checkpoints. Then the job is closed, even while shards run. It is also closed when no shard runs and the next
one would pass the limit. Computed rows stay, and the other rows' errors say why they have no answer. So a job never
costs more than the limit plus what its workers compute until they learn of the closing: between two checkpoints, two
reads of these (`LOGGED_COST_INTERVAL_SECONDS`) and two heartbeats.

The cost of a token is measured on the job's own parts; before there are any, it is computed from the price and the
throughput that workers report. Where neither is known, one shard starts alone. Costs are read from the ledger, so a
dispatcher that takes over has them as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import UTC
from typing import Final

import structlog

from pipeline.dispatcher.job_state import OpenJob, ShardId, estimated_tokens
from pipeline.jobs.tenant_spend import EndedSpending
from pipeline.ports import WorkerState, World
from schemas.jobs.job import Closing
from schemas.jobs.plan import ShardRef
from schemas.requests.limits import SpendLimits

NO_LIMITS: Final = SpendLimits()
WARNING_INTERVAL_SECONDS: Final = 60.0
"""Interval between two log warnings that a tenant's jobs wait."""
LOGGED_COST_INTERVAL_SECONDS: Final = 2.0
"""Interval between two reads of the cost of open shards."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SpendSettings:
    """Spending limits of tenants.

    Attributes:
        limits: of each tenant that `tenants` doesn't name.
        wait: jobs of a tenant that has reached its limit wait for the next day or month; else they end.
    """

    limits: SpendLimits = NO_LIMITS
    tenants: Mapping[str, SpendLimits] = field(default_factory=dict)
    wait: bool = False

    def of(self, tenant: str) -> SpendLimits:
        return self.tenants.get(tenant, self.limits)


@dataclass(frozen=True, slots=True)
class _Limit:
    """One limit that applies to a job, and the cost so far.

    Attributes:
        spent: cost of parts.
        expected: expected cost of running shards, and cost of failed attempts at others.
        logged_cost: cost of attempts at open shards so far.
        shards: running shards.
        unpriced: the cost of some of the work is unknown.
    """

    name: str
    amount: float
    spent: float
    expected: float
    logged_cost: float
    shards: int
    of_tenant: bool = False
    unpriced: bool = False

    @property
    def is_reached(self) -> bool:
        return self.spent + self.logged_cost >= self.amount


class SpendLimiter:
    """Applies spending limits to a dispatcher's jobs. For the thread that ticks.

    Args:
        price_per_hour: of workers that report no price.
    """

    def __init__(self, world: World, settings: SpendSettings, price_per_hour: float | None) -> None:
        self._world = world
        self._settings = settings
        self._price = price_per_hour
        self._ended = EndedSpending(world.store)
        self._jobs: list[OpenJob] = []
        self._trusted = False
        self._held_of: dict[str, set[int]] = {}
        self._rates: Mapping[str, float] = {}
        self._unpriced: Set[str] = frozenset()
        self._refused: dict[str, tuple[OpenJob, _Limit, str]] = {}
        self._next_warning: dict[str, float] = {}
        self._next_logged = 0.0
        self._is_logged_fresh = False

    def refresh(
        self, jobs: Collection[OpenJob], workers: Collection[WorkerState], held: Set[ShardId], *, trusted: bool
    ) -> None:
        """Update jobs, prices and held shards. `trusted`: `held` has all shards that workers hold."""
        self._jobs = [job for job in jobs if self._is_limited(job)]
        self._trusted = trusted
        self._refused.clear()
        if self._jobs:
            self._rates, self._unpriced = _rates(workers, self._price)
            self._held_of = {}
            for job, number in held:
                self._held_of.setdefault(job, set()).add(number)
            self._is_logged_fresh = trusted and self._read_logged_costs()

    def stand_by(self) -> None:
        """Discard cached spending, which another dispatcher updates from now on."""
        self._ended.forget()

    def allows(self, job: OpenJob, shard: ShardRef) -> bool:
        """Whether the shard may be queued for the first time."""
        if not self._is_limited(job):
            return True
        if not self._trusted:  # shards that workers hold already would not be counted
            return False
        job.cost.read_all_logged_costs(job.open_shards.keys())
        return self._fits(job, job.key_of(shard), self._expected(job, shard))

    def allows_again(self, job: OpenJob, shard: ShardRef) -> bool:
        """Whether a queued shard that seems to be lost may be queued again. It counts as running already, with the cost
        of attempts at it so far."""
        if not self._is_limited(job):
            return True
        job.cost.read_logged_costs([shard.number])
        return self._fits(job, job.key_of(shard), 0.0)

    def close_jobs(self) -> None:
        """Close the jobs that have reached a limit, and those that were refused a shard while no running shard can
        change that."""
        if not self._trusted:
            return
        for job, limit, why in [*self._reached(), *self._refused.values()]:
            if limit.shards and not limit.is_reached:
                continue
            if limit.of_tenant and (self._settings.wait or limit.unpriced):
                self._warn(job, why)
                continue
            if job.ledger.create_closing(Closing(kind="spend", at=self._world.clock.now(), reason=why)):
                logger.warning("a job ends at its spending limit", job=job.job.id, reason=why)

    def _reached(self) -> Iterator[tuple[OpenJob, _Limit, str]]:
        """Jobs that have running shards though they have reached a limit."""
        for job in self._jobs if self._is_logged_fresh else ():
            if job.closing is not None or not self._under_way(job):
                continue
            for limit in self._limits(job):
                if limit.is_reached:
                    yield (
                        job,
                        limit,
                        f"{limit.name} is {limit.amount:g}: {limit.spent + limit.logged_cost:.4g} is spent",
                    )
                    break

    def _read_logged_costs(self) -> bool:
        """Read the cost so far of the shards that workers hold, if it is due; False if not. Each shard costs a listing
        and a read of a small object."""
        now = self._world.clock.monotonic()
        if now < self._next_logged:
            return False
        self._next_logged = now + LOGGED_COST_INTERVAL_SECONDS
        for job in self._jobs:
            if job.closing is None:
                job.cost.read_logged_costs(self._held_of.get(job.job.id, set()) & job.open_shards.keys())
        return True

    def record_end(self, job: OpenJob) -> None:
        """Record the job's cost for its tenant in markers, before the job gets its outcome."""
        if job.ledger.in_root and self._settings.of(job.job.tenant):
            self._ended.ended(job.job.tenant, job.job.id, job.cost.by_day)

    def _is_limited(self, job: OpenJob) -> bool:
        return job.job.max_cost is not None or (job.ledger.in_root and bool(self._settings.of(job.job.tenant)))

    def _fits(self, job: OpenJob, model: str, expected: float | None) -> bool:
        for limit in self._limits(job):
            due = limit.spent + limit.expected
            if limit.unpriced or model in self._unpriced:
                limit = replace(limit, unpriced=True)
                why = f"{limit.name} can't be enforced: its workers have no price per hour"
            elif expected is None and not limit.shards and due < limit.amount:
                continue  # the first shard measures the cost
            elif expected is not None and due + expected <= limit.amount:
                continue
            else:
                more = "" if expected is None else f", and the next shard should cost {expected:.4g}"
                why = f"{limit.name} is {limit.amount:g}: {due:.4g} is spent{more}"
            self._refused[job.job.id] = job, limit, why
            return False
        return True

    def _limits(self, job: OpenJob) -> Iterator[_Limit]:
        if job.job.max_cost is not None:
            yield self._limit("what the job may cost", job.job.max_cost, job.cost.spent.cost, [job])
        limits = self._settings.of(job.job.tenant)
        if not (limits and job.ledger.in_root):
            return
        today = self._world.clock.now().astimezone(UTC).date()
        jobs = [other for other in self._jobs if other.job.tenant == job.job.tenant]
        for amount, beginning, what in (
            (limits.per_day, today.isoformat(), "day"),
            (limits.per_month, today.isoformat()[:7], "month"),
        ):
            if amount is not None:
                spent = self._ended.of(job.job.tenant, today, beginning, {other.job.id for other in jobs})
                spent += sum(
                    cost for other in jobs for day, cost in other.cost.by_day.items() if day.startswith(beginning)
                )
                yield self._limit(f"what its tenant may spend in a {what}", amount, spent, jobs, of_tenant=True)

    def _limit(
        self, name: str, amount: float, spent: float, jobs: Collection[OpenJob], *, of_tenant: bool = False
    ) -> _Limit:
        expected, logged, shards = 0.0, 0.0, 0
        for job in jobs:
            under_way = self._under_way(job)
            shards += len(under_way)
            logged += sum(job.cost.logged_cost.values())
            for number in under_way | job.cost.logged_cost.keys():
                cost = self._expected(job, job.open_shards[number]) if number in under_way else None
                expected += max(cost or 0.0, job.cost.logged_cost.get(number, 0.0))
        unpriced = any(job.cost.spent.unpriced for job in jobs)
        return _Limit(name, amount, spent, expected, logged, shards, of_tenant, unpriced)

    def _under_way(self, job: OpenJob) -> Set[int]:
        """The job's shards that are on a queue or held by a worker."""
        return job.queued.keys() | (self._held_of.get(job.job.id, set()) & job.open_shards.keys())

    def _expected(self, job: OpenJob, shard: ShardRef) -> float | None:
        """Expected cost of the shard; None: not known yet."""
        model = job.key_of(shard)
        rate = job.cost.cost_per_token(model)
        if rate is None:
            rate = self._rates.get(model)
        return None if rate is None else rate * estimated_tokens(shard)

    def _warn(self, job: OpenJob, why: str) -> None:
        now = self._world.clock.monotonic()
        if now >= self._next_warning.get(job.job.tenant, 0.0):
            self._next_warning[job.job.tenant] = now + WARNING_INTERVAL_SECONDS
            logger.warning("a tenant's jobs wait for its spending limit", tenant=job.job.tenant, reason=why)


def _rates(workers: Collection[WorkerState], otherwise: float | None) -> tuple[dict[str, float], set[str]]:
    """The cost of a token on the most expensive worker of each model, as far as it is known, and the models with a
    worker of unknown price."""
    rates: dict[str, float] = {}
    unpriced = set[str]()
    for worker in workers:
        price = otherwise if worker.price_per_hour is None else worker.price_per_hour
        if price is None:
            unpriced |= worker.models
        elif worker.tokens_per_second:
            rate = price / 3600 / worker.tokens_per_second
            rates.update((model, max(rate, rates.get(model, 0.0))) for model in worker.models)
    return rates, unpriced
