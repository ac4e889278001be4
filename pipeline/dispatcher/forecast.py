"""Forecasts the end of each open job by simulating the dispatcher's sharing at the measured throughput.

Generalised processor sharing (Parekh & Gallager 1993, section 2) approximates the dispatch of single shards: the tiers
share a model's workers, the tenants of a tier share by weight, and a tenant's jobs run one after the other. With a
virtual clock for each tier, a job's end is known when it begins, so a forecast costs the sorting of the jobs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from pipeline.worker_client.bulk_reserve import FLOOR
from pipeline.worker_client.ports import BY_URGENCY
from schemas.jobs.job import Tier


@dataclass(frozen=True, slots=True)
class JobLoad:
    """A job's remaining tokens on one model.

    Attributes:
        tokens: expected tokens of prompts and answers.
    """

    job: str
    model: str
    tier: Tier
    tenant: str
    tokens: float


def forecast(
    loads: Iterable[JobLoad], rates: Mapping[str, float], weights: Mapping[str, float], floor: float = FLOOR
) -> dict[str, float]:
    """Seconds from now until each job ends; jobs that need a model of unknown throughput are left out.

    Args:
        loads: in the order in which each tenant's jobs of a tier are served.
        rates: tokens per second of all workers of a model.
        weights: of tenants; others have 1.
        floor: the share of bulk work while there is more urgent work.
    """
    by_model: defaultdict[str, list[JobLoad]] = defaultdict(list)
    for load in loads:
        by_model[load.model].append(load)
    ends: dict[str, float] = {}
    for model, of_model in by_model.items():
        rate = rates.get(model, 0.0)
        for job, seconds in _forecast_model(of_model, rate, weights, floor).items() if rate > 0 else ():
            ends[job] = max(ends.get(job, 0.0), seconds)
    unknown = {load.job for model, of_model in by_model.items() if not rates.get(model) for load in of_model}
    return {job: seconds for job, seconds in ends.items() if job not in unknown}


class _Shares:
    """One tier of one model: its tenants' jobs, and its virtual clock (tokens per unit of weight)."""

    def __init__(self, loads: list[JobLoad], weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._waiting: defaultdict[str, deque[JobLoad]] = defaultdict(deque)
        for load in loads:
            self._waiting[load.tenant].append(load)
        self._clock = self._weight = 0.0
        self._ends: list[tuple[float, str, str]] = []  # on the virtual clock, tenant, job
        for tenant in list(self._waiting):
            self._weight += weights.get(tenant, 1.0)
            self._begin(tenant)

    def __bool__(self) -> bool:
        return bool(self._ends)

    def until_next(self, rate: float) -> float:
        """Seconds until the next job ends at this rate."""
        return max(0.0, self._ends[0][0] - self._clock) * self._weight / rate if rate > 0 else inf

    def advance(self, seconds: float, rate: float) -> None:
        self._clock += seconds * rate / self._weight

    def end_next(self) -> str:
        """End the next job and return it; its tenant's next job begins, or the other tenants get its share."""
        self._clock, tenant, job = heappop(self._ends)
        if self._waiting[tenant]:
            self._begin(tenant)
        else:
            self._weight -= self._weights.get(tenant, 1.0)
        return job

    def _begin(self, tenant: str) -> None:
        load = self._waiting[tenant].popleft()
        heappush(self._ends, (self._clock + load.tokens / self._weights.get(tenant, 1.0), tenant, load.job))


def _forecast_model(loads: list[JobLoad], rate: float, weights: Mapping[str, float], floor: float) -> dict[str, float]:
    urgent, bulk = (_Shares([load for load in loads if load.tier is tier], weights) for tier in BY_URGENCY)
    now, ends = 0.0, {}
    while urgent or bulk:
        share = 1.0 if not bulk else 0.0 if not urgent else 1 - floor
        rates = [(tier, rate * part) for tier, part in ((urgent, share), (bulk, 1 - share)) if tier]
        seconds, first = min((tier.until_next(of_tier), number) for number, (tier, of_tier) in enumerate(rates))
        now += seconds
        for number, (tier, of_tier) in enumerate(rates):
            if number != first:
                tier.advance(seconds, of_tier)
        ends[rates[first][0].end_next()] = now
    return ends
