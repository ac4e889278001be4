"""Which shards may be begun where a job or its tenant may only cost so much.

A shard is begun when what is spent, what the shards that are under way should cost, and what it should cost itself
stay within the limit together. What is under way goes on until the limit is reached by what is spent: by parts, and by
open shards as far as their checkpoints say. Then the job is closed, also while shards are under way, and it is closed
when none is and the next one would pass the limit. What it has computed is kept, and its other rows say why they have
no answer. So it never costs more than the limit and what its workers compute until they are told: between two
checkpoints, two looks at these (`LOGGED_SECONDS`) and two heartbeats.

What a token costs is learnt from the job's own parts; before there are any, from what the workers say of their price
and their speed. Where neither is known one shard goes ahead alone. All that was spent is read from the ledger, so a
dispatcher that takes over knows it too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import UTC
from typing import Final

import structlog

from pipeline.dispatcher.job_state import OpenJob, Shard, cost
from pipeline.jobs.tenant_spend import EndedSpending
from pipeline.ports import WorkerState, World
from schemas.jobs.job import Closing
from schemas.jobs.plan import ShardRef
from schemas.requests.limits import SpendLimits

NO_LIMITS: Final = SpendLimits()
SILENT_SECONDS: Final = 60.0
"""Between two words in the log that a tenant's jobs wait."""
LOGGED_SECONDS: Final = 2.0
"""Between two looks at what open shards have cost by now."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SpendSettings:
    """What may be spent.

    Attributes:
        limits: of each tenant that `tenants` doesn't name.
        wait: jobs of a tenant that has reached its limit wait for its next day or month; else they end.
    """

    limits: SpendLimits = NO_LIMITS
    tenants: Mapping[str, SpendLimits] = field(default_factory=dict)
    wait: bool = False

    def of(self, tenant: str) -> SpendLimits:
        return self.tenants.get(tenant, self.limits)


@dataclass(frozen=True, slots=True)
class _Limit:
    """One limit that a job is under, and how it stands.

    Attributes:
        spent: by parts.  expected: the cost of shards that are under way, and of what attempts at others have lost.
        logged: what attempts at open shards are known to have cost by now.
        shards: under way.
        unpriced: of some of what was spent nobody knows the cost.
    """

    of: str
    amount: float
    spent: float
    expected: float
    logged: float
    shards: int
    of_tenant: bool = False
    unpriced: bool = False

    @property
    def is_reached(self) -> bool:
        return self.spent + self.logged >= self.amount


class SpendLimiter:
    """The limits of a dispatcher's jobs, for the thread that ticks.

    Args:
        price_per_hour: of workers that don't say theirs.
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
        self._told: dict[str, float] = {}
        self._next_logged = 0.0
        self._logged_anew = False

    def look(
        self, jobs: Collection[OpenJob], workers: Collection[WorkerState], held: Set[Shard], *, trusted: bool
    ) -> None:
        """Learn how things stand. `trusted`: what is held now is all that workers hold."""
        self._jobs = [job for job in jobs if self._is_limited(job)]
        self._trusted = trusted
        self._refused.clear()
        if self._jobs:
            self._rates, self._unpriced = _rates(workers, self._price)
            self._held_of = {}
            for job, number in held:
                self._held_of.setdefault(job, set()).add(number)
            self._logged_anew = trusted and self._learn_logged()

    def stand_by(self) -> None:
        """Another dispatcher leads."""
        self._ended.forget()

    def allows(self, job: OpenJob, shard: ShardRef) -> bool:
        """Whether the shard may be put for the first time."""
        if not self._is_limited(job):
            return True
        if not self._trusted:  # what workers hold already would not count
            return False
        job.learn_all_logged()
        return self._fits(job, job.key_of(shard), self._expected(job, shard))

    def allows_again(self, job: OpenJob, shard: ShardRef) -> bool:
        """Whether a shard that was put, and seems to be lost, may be put again. It counts as under way already, with
        what attempts at it are known to have cost."""
        if not self._is_limited(job):
            return True
        job.learn_logged([shard.number])
        return self._fits(job, job.key_of(shard), 0.0)

    def close(self) -> None:
        """Close the jobs that have reached a limit, and those that were refused a shard while nothing is under way that
        could change that."""
        if not self._trusted:
            return
        for job, limit, why in [*self._reached(), *self._refused.values()]:
            if limit.shards and not limit.is_reached:
                continue
            if limit.of_tenant and (self._settings.wait or limit.unpriced):
                self._tell(job, why)
                continue
            if job.ledger.create_closing(Closing(kind="spend", at=self._world.clock.now(), reason=why)):
                logger.warning("a job ends at its spending limit", job=job.job.id, reason=why)

    def _reached(self) -> Iterator[tuple[OpenJob, _Limit, str]]:
        """Jobs that have shards under way though they have reached a limit."""
        for job in self._jobs if self._logged_anew else ():
            if job.closing is not None or not self._under_way(job):
                continue
            for limit in self._limits(job):
                if limit.is_reached:
                    yield job, limit, f"{limit.of} is {limit.amount:g}: {limit.spent + limit.logged:.4g} is spent"
                    break

    def _learn_logged(self) -> bool:
        """Learn what the shards that workers hold have cost by now, if it is time: False if not. Each is a listing and
        a small object."""
        now = self._world.clock.monotonic()
        if now < self._next_logged:
            return False
        self._next_logged = now + LOGGED_SECONDS
        for job in self._jobs:
            if job.closing is None:
                job.learn_logged(self._held_of.get(job.job.id, set()) & job.open_shards.keys())
        return True

    def ends(self, job: OpenJob) -> None:
        """The job is about to get its outcome: from now on markers tell what it has cost its tenant."""
        if job.ledger.in_root and self._settings.of(job.job.tenant):
            self._ended.ended(job.job.tenant, job.job.id, job.spent_by_day)

    def _is_limited(self, job: OpenJob) -> bool:
        return job.job.max_cost is not None or (job.ledger.in_root and bool(self._settings.of(job.job.tenant)))

    def _fits(self, job: OpenJob, model: str, expected: float | None) -> bool:
        for limit in self._limits(job):
            due = limit.spent + limit.expected
            if limit.unpriced or model in self._unpriced:
                limit = replace(limit, unpriced=True)
                why = f"{limit.of} can't be kept: nobody says what an hour of its workers costs"
            elif expected is None and not limit.shards and due < limit.amount:
                continue  # one goes ahead, and tells
            elif expected is not None and due + expected <= limit.amount:
                continue
            else:
                more = "" if expected is None else f", and the next shard should cost {expected:.4g}"
                why = f"{limit.of} is {limit.amount:g}: {due:.4g} is spent{more}"
            self._refused[job.job.id] = job, limit, why
            return False
        return True

    def _limits(self, job: OpenJob) -> Iterator[_Limit]:
        if job.job.max_cost is not None:
            yield self._limit("what the job may cost", job.job.max_cost, job.spent.cost, [job])
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
                    cost for other in jobs for day, cost in other.spent_by_day.items() if day.startswith(beginning)
                )
                yield self._limit(f"what its tenant may spend in a {what}", amount, spent, jobs, of_tenant=True)

    def _limit(
        self, of: str, amount: float, spent: float, jobs: Collection[OpenJob], *, of_tenant: bool = False
    ) -> _Limit:
        expected, logged, shards = 0.0, 0.0, 0
        for job in jobs:
            under_way = self._under_way(job)
            shards += len(under_way)
            logged += sum(job.logged.values())
            for number in under_way | job.logged.keys():
                cost = self._expected(job, job.open_shards[number]) if number in under_way else None
                expected += max(cost or 0.0, job.logged.get(number, 0.0))
        unpriced = any(job.spent.unpriced for job in jobs)
        return _Limit(of, amount, spent, expected, logged, shards, of_tenant, unpriced)

    def _under_way(self, job: OpenJob) -> Set[int]:
        """The job's shards that are on a queue, or with a worker."""
        return job.puts.keys() | (self._held_of.get(job.job.id, set()) & job.open_shards.keys())

    def _expected(self, job: OpenJob, shard: ShardRef) -> float | None:
        """What the shard should cost; None: nobody knows yet."""
        model = job.key_of(shard)
        rate = job.cost_per_token(model)
        if rate is None:
            rate = self._rates.get(model)
        return None if rate is None else rate * cost(shard)

    def _tell(self, job: OpenJob, why: str) -> None:
        now = self._world.clock.monotonic()
        if now >= self._told.get(job.job.tenant, 0.0):
            self._told[job.job.tenant] = now + SILENT_SECONDS
            logger.warning("a tenant's jobs wait for its spending limit", tenant=job.job.tenant, reason=why)


def _rates(workers: Collection[WorkerState], otherwise: float | None) -> tuple[dict[str, float], set[str]]:
    """What a token costs on the dearest of each model's workers, as far as that is known, and the models of which a
    worker's price isn't."""
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
