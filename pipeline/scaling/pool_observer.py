"""Observes pools: combines the root's open jobs, heartbeats and worker metrics into the policy's input.

Of a model with prefill and decode workers (`worker --role`) each role is a pool, and needs as many workers as its own
resource is used: prefill workers are bound by arithmetic, so by the time in which they compute prompts, and by the
prompts that wait; decode workers by memory, so by their KV caches, and by the answers that wait for room in them
(DistServe, Zhong et al. 2024, section 3).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Final

from pipeline.lane.ports import AnswerCounts
from pipeline.ports import Heartbeats, WorkerState
from pipeline.scaling.backlog import BacklogMetrics, BacklogReader
from pipeline.scaling.fleet import Demand
from pipeline.scaling.open_work import OpenJobSummary
from pipeline.scaling.policy import PoolObservation
from schemas.jobs.job import Tier
from schemas.settings.autoscaling import AutoscaleOptions, ScalingLimits
from schemas.settings.kv_transfer import Role
from schemas.workers.metrics import LATENCY_BOUNDS, WorkerMetrics

TTFT_SAMPLES: Final = 20
"""First tokens that a quantile needs; fewer are carried over to the next observation."""

TTFT_SECONDS: Final = 300.0
"""Time after which too few first tokens are discarded."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers that serve the same models, by the models' names, and have the role; "both": of any role."""

    name: str
    models: tuple[str, ...]
    limits: ScalingLimits
    role: Role = "both"


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Cumulative TTFT histogram of all workers of a pool (`LATENCY_BOUNDS`), and the start of the next quantile's
    window (seconds)."""

    counts: tuple[int, ...] = ()
    since: float | None = None


@dataclass(frozen=True, slots=True)
class RootObservation:
    """One observation of the whole root."""

    backlog_metrics: BacklogMetrics
    jobs: Sequence[OpenJobSummary]
    workers: Sequence[WorkerState]
    metrics: Mapping[str, WorkerMetrics]
    keys: Mapping[str, str]
    callers: Mapping[str, int]
    answers: Mapping[str, AnswerCounts]
    at: datetime


def observe_root(reader: BacklogReader, heartbeats: Heartbeats, at: datetime) -> RootObservation:
    """Observe the root. Raises `PipelineError` when the store or the heartbeats can't be read."""
    found = reader.observe()
    return RootObservation(
        found.metrics, found.jobs, found.workers, heartbeats.metrics(), found.names, found.callers, found.answers, at
    )


def pools_of(options: AutoscaleOptions, models: Set[str]) -> list[Pool]:
    """The pools that the settings name, and one for each other model. A pool without any of the models is left out: its
    first worker is still starting, and a decision for zero workers would end it."""
    named = [
        Pool(name, pool.models, pool.limits or options.limits, pool.role)
        for name, pool in sorted(options.pools.items())
        if not models.isdisjoint(pool.models)
    ]
    taken = {model for pool in options.pools.values() for model in pool.models} | options.pools.keys()
    return named + [Pool(model, (model,), options.limits) for model in sorted(models) if model not in taken]


def observe(pool: Pool, seen: RootObservation, before: FirstTokens) -> tuple[PoolObservation, FirstTokens]:
    """The pool's observation, and the TTFT state for its next one.

    Requests on the lane are callers of the pool that serves their model, also while it has no worker.
    All remaining tokens of a job with several models count, at the throughput of the slowest model that the pool
    serves: only the job's plan has the division by model. A pool of prefill workers has no jobs: they count for the
    decode workers of the model.
    """
    speeds = {
        model.model: model.tokens_per_second for model in seen.backlog_metrics.models if model.model in pool.models
    }
    demands = []
    for job, _, left in seen.jobs if pool.role != "prefill" else ():
        names = {pin.loaded_name for pin in job.models} & speeds.keys()
        if names and left > 0:
            demands.append(
                Demand(
                    left / min(speeds[name] for name in names),
                    None if job.deadline is None else (job.deadline - seen.at).total_seconds(),
                    max(0.0, (seen.at - job.created_at).total_seconds()),
                    job.tier is Tier.BULK,
                )
            )
    serving = [
        worker for worker in seen.workers
        if not worker.draining and any(seen.keys.get(key) in pool.models for key in worker.models)
    ]  # fmt: skip
    own = [worker for worker in serving if pool.role in ("both", worker.role)]
    metrics = [seen.metrics[worker.name] for worker in own if worker.name in seen.metrics]
    p95, first_tokens = _ttft(_counts(metrics), before, seen.at.timestamp())
    used = [one.kv_blocks_used / one.kv_blocks for one in metrics if one.kv_blocks]
    # Requests that a worker has taken and not begun to answer are on the lane as well.
    waiting = max(sum(one.lane_waiting for one in metrics), _on_lane(pool, seen, serving))
    observed = PoolObservation(
        demands, len(own), p95, sum(one.lane_open for one in metrics) + waiting, waiting,
        sum(used) / len(used) if used else None, interactive_workers(pool, metrics, waiting),
    )  # fmt: skip
    return observed, first_tokens


def _on_lane(pool: Pool, seen: RootObservation, serving: Sequence[WorkerState]) -> int:
    """Requests on the lane that wait for the pool. The lane doesn't say which of them have their prompt computed: those
    that decode workers have taken do, and the rest counts for the prefill workers. Where one of the roles has no worker
    all count, so that its first one is started."""
    on_lane = sum(seen.callers.get(name, 0) for name in pool.models)
    if pool.role == "both":
        return on_lane
    if {"prefill", "decode"} - {worker.role for worker in serving}:
        return on_lane
    decoding = sum(
        seen.metrics[worker.name].lane_waiting
        for worker in serving if worker.role == "decode" and worker.name in seen.metrics
    )  # fmt: skip
    return max(0, on_lane - decoding) if pool.role == "prefill" else decoding


def interactive_workers(pool: Pool, metrics: Sequence[WorkerMetrics], waiting: int) -> float:
    """Workers that a pool's interactive requests need; 0.0 for a pool of both roles, and while nothing is measured.

    Args:
        waiting: interactive requests that no worker has begun.
    """
    if pool.role == "prefill":
        return _prefill_workers(pool.limits, metrics, waiting)
    return _decode_workers(pool.limits, metrics, waiting) if pool.role == "decode" else 0.0


def _prefill_workers(limits: ScalingLimits, metrics: Sequence[WorkerMetrics], waiting: int) -> float:
    """Those that compute prompts as they come, at the target share of their time, and those that compute the waiting
    ones within the TTFT target."""
    seconds, prompt_tokens = sum(one.steps.seconds for one in metrics), sum(one.prompt for one in metrics)
    first_tokens = sum(tier.ttft.samples for one in metrics for tier in one.tiers.values())
    if not (seconds and prompt_tokens and first_tokens):
        return 0.0
    interactive = sum(one.tiers[Tier.INTERACTIVE].ttft.samples for one in metrics if Tier.INTERACTIVE in one.tiers)
    rate = prompt_tokens / seconds
    arriving = sum(one.rates.prompt for one in metrics) * interactive / first_tokens
    queued = waiting * prompt_tokens / first_tokens
    return arriving / rate / limits.interactive_target_share + queued / rate / limits.ttft_target_seconds


def _decode_workers(limits: ScalingLimits, metrics: Sequence[WorkerMetrics], waiting: int) -> float:
    """Those whose KV caches hold the running answers and the waiting ones, at the target share."""
    used, running = 0.0, 0
    for one in metrics:
        rows = sum(tier.running for tier in one.tiers.values())
        tier = one.tiers.get(Tier.INTERACTIVE)
        if tier is not None and rows and one.kv_blocks:
            used += one.kv_blocks_used / one.kv_blocks * tier.running / rows
            running += tier.running
    if not running:
        return 0.0
    return (used + waiting * used / running) / limits.interactive_target_share


def _counts(metrics: Collection[WorkerMetrics]) -> tuple[int, ...]:
    """First tokens of interactive requests, summed over these workers, by bucket."""
    counts = [0] * (len(LATENCY_BOUNDS) + 1)
    for one in metrics:
        tier = one.tiers.get(Tier.INTERACTIVE)
        for bucket, number in enumerate(() if tier is None else tier.ttft.counts):
            counts[bucket] += number
    return tuple(counts)


def _ttft(counts: tuple[int, ...], before: FirstTokens, now: float) -> tuple[float | None, FirstTokens]:
    """The 95 % quantile since the last one, as the upper bound of its bucket. A worker that left took its counts with
    it: a bucket whose count fell is ignored."""
    if before.since is None or len(before.counts) != len(counts):
        return None, FirstTokens(counts, now)
    new = [max(0, now_in - then) for now_in, then in zip(counts, before.counts, strict=True)]
    samples = sum(new)
    if samples < TTFT_SAMPLES:
        return None, before if now - before.since < TTFT_SECONDS else FirstTokens(counts, now)
    ends = (*LATENCY_BOUNDS, 2 * LATENCY_BOUNDS[-1])
    p95 = next(end for end, upto in zip(ends, accumulate(new), strict=True) if upto >= 0.95 * samples)
    return p95, FirstTokens(counts, now)
