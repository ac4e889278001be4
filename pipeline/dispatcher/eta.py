"""Forecasts when open jobs finish, from their remaining tokens and the throughput of their models' workers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from pipeline.dispatcher.forecast import JobLoad, forecast
from pipeline.dispatcher.job_state import OpenJob, estimated_tokens
from pipeline.dispatcher.load_shedding import JobDeadline, SheddingPlan, plan_shedding
from pipeline.dispatcher.shard_order import urgency
from pipeline.ports import WorkerState
from pipeline.scaling.tenant_backlog import BYTES_PER_TOKEN
from schemas.jobs.job import Job, Tier

Tokens = Mapping[str, float]
"""A job's remaining tokens by model (`ModelPin.base_key`): the same workers compute a model's adapters."""


class EtaForecaster:
    """Forecasts the completion of a dispatcher's jobs. `weights`: of tenants."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._rates: defaultdict[str, float] = defaultdict(float)  # tokens per second, by model
        self._remaining: list[tuple[Job, Tokens]] = []
        self._shedding_plans: dict[tuple[str, Tier], SheddingPlan] = {}

    def refresh(self, jobs: Collection[OpenJob], workers: Collection[WorkerState], now: datetime) -> None:
        """Update throughput and remaining tokens, and set each job's ETA. A job that is being planned or closed gets
        None."""
        self._rates = defaultdict(float)
        for worker in workers:
            for model in worker.models:
                self._rates[model] += worker.tokens_per_second or 0.0
        computed = _computed_tokens(jobs, workers)
        self._remaining = [(job.job, _remaining_tokens(job, computed)) for job in jobs if job.closing is None]
        self._shedding_plans = self._plan_shedding_by_tier(now)
        ends = self._forecast(self._remaining)
        for job in jobs:
            seconds = ends.get(job.job.id) if job.is_planned and job.closing is None else None
            job.set_eta(None if seconds is None else now + timedelta(seconds=seconds))

    def forecast_end(self, job: Job, tokens: Tokens, now: datetime) -> datetime | None:
        """Forecast when a job that isn't planned yet finishes, given the open jobs; None: the throughput of its models'
        workers is not known yet."""
        others = [(other, left) for other, left in self._remaining if other.id != job.id]
        seconds = self._forecast([*others, (job, tokens)]).get(job.id)
        return None if seconds is None else now + timedelta(seconds=seconds)

    def rate(self, model: str) -> float:
        """Tokens per second of all workers of a model (`ModelPin.base_key`), as of the last refresh; 0: not known."""
        return self._rates.get(model, 0.0)

    def plan_shedding(self, model: str, tier: Tier) -> SheddingPlan:
        """Which of a tier's deadlines the workers of a model (`ModelPin.base_key`) can meet, as of the last refresh."""
        return self._shedding_plans.get((model, tier), SheddingPlan())

    def _plan_shedding_by_tier(self, now: datetime) -> dict[tuple[str, Tier], SheddingPlan]:
        due: defaultdict[tuple[str, Tier], list[JobDeadline]] = defaultdict(list)
        for job, by_model in self._remaining:
            if job.deadline is not None:
                for model, tokens in by_model.items():
                    due[model, job.tier].append(JobDeadline(job.id, (job.deadline - now).total_seconds(), tokens))
        return {(model, tier): plan_shedding(jobs, self.rate(model)) for (model, tier), jobs in due.items()}

    def _forecast(self, left: list[tuple[Job, Tokens]]) -> dict[str, float]:
        loads = [
            JobLoad(job.id, model, job.tier, job.tenant, tokens)
            for job, by_model in sorted(left, key=lambda one: urgency(one[0]))
            for model, tokens in by_model.items()
        ]
        return forecast(loads, self._rates, self._weights)


def _computed_tokens(jobs: Collection[OpenJob], workers: Collection[WorkerState]) -> dict[tuple[str, str], float]:
    """Tokens that workers have computed of shards without a part, by job and model. A worker reports one number for all
    shards that it holds; it is spread evenly over them."""
    open_jobs = {job.job.id: job for job in jobs}
    done: defaultdict[tuple[str, str], float] = defaultdict(float)
    for worker in workers:
        tokens_of: Counter[tuple[str, str]] = Counter()
        for name, number in worker.held:
            shard = open_jobs[name].open_shards.get(number) if name in open_jobs else None
            if shard is not None:
                tokens_of[name, open_jobs[name].key_of(shard)] += estimated_tokens(shard)
        total = tokens_of.total()
        for key, tokens in tokens_of.items():
            done[key] += tokens * max(0.0, 1 - worker.waiting_tokens / total) if total else 0.0
    return done


def _remaining_tokens(job: OpenJob, done: Mapping[tuple[str, str], float]) -> Tokens:
    if not job.is_planned:  # segments are still to come; the input's size estimates the total
        return {job.job.models[0].base_key: max(job.tokens_left.total(), job.job.input.size / BYTES_PER_TOKEN)}
    found: defaultdict[str, float] = defaultdict(float)
    for model, tokens in job.tokens_left.items():
        found[job.base_key_of(model)] += max(0.0, tokens - done.get((job.job.id, model), 0.0))
    return found
