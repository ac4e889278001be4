"""Builds a worker's metrics from the counters of its loop, its side work and its engine.

This module counts only the requests that have ended. It reads all other counters where they are kept, every few
seconds, on the thread that steps the engine.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from engine.cache.block_tier import TierStats
from engine.engine import EngineStats
from engine.expert_load import ExpertLoad
from engine.request import Completion
from engine.scheduler.latency import ClassStats, LatencyCounts
from engine.scheduler.slo_control import SloStats, SloTerms
from engine.speculative.stats import SpeculationStats
from engine.step_engine import StepEngine
from schemas.jobs.job import Tier
from schemas.jobs.outcome import Usage
from schemas.workers.metrics import (
    AdapterMetrics,
    CacheTierMetrics,
    ExperimentMetrics,
    HandoverMetrics,
    HistogramSample,
    SloMetrics,
    SloWeights,
    SpeculationMetrics,
    TierMetrics,
    TokenRates,
    WorkerMetrics,
)
from workers.observability.gpu import GpuReader
from workers.policies.counts import PolicyCounts, counted_since
from workers.translation.requests import PRIORITIES
from workers.translation.responses import failure_of

RATE_SECONDS: Final = 10.0
"""Window of the token rates, in seconds; the actual window may be a little longer."""


@dataclass(slots=True)
class _TierCounts:
    """Counters of ended requests of one tier, or one adapter."""

    answered: int = 0
    failed: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    drafted: int = 0
    accepted: int = 0


class EndedRequests:
    """Counts the requests that have ended, by tier and by adapter."""

    def __init__(self) -> None:
        self._tiers: dict[Tier, _TierCounts] = {}
        self._adapters: dict[str, _TierCounts] = {}

    def record(self, tier: Tier, completion: Completion, adapter: str | None) -> None:
        """Count a completion; `adapter`: the name of the one that answered."""
        kinds = [self._tiers.setdefault(tier, _TierCounts())]
        if adapter is not None:
            kinds.append(self._adapters.setdefault(adapter, _TierCounts()))
        for counts in kinds:
            if failure_of(completion) is None:
                counts.answered += 1
            else:
                counts.failed += 1
            counts.prompt += completion.prompt_tokens
            counts.cached += completion.cached_tokens
            counts.completion += completion.generated_tokens
            counts.drafted += completion.drafted_tokens
            counts.accepted += completion.accepted_tokens

    def record_refused(self, tier: Tier, requests: int) -> None:
        """Count requests that never entered the engine."""
        if requests:
            self._tiers.setdefault(tier, _TierCounts()).failed += requests

    def of_adapter(self, name: str) -> _TierCounts:
        """The counters of an adapter."""
        return self._adapters.get(name) or _TierCounts()

    def of(self, tier: Tier) -> _TierCounts:
        """The counters of a tier."""
        return self._tiers.get(tier) or _TierCounts()


@dataclass(frozen=True, slots=True)
class SideWorkMetrics:
    """Metrics of the side work.

    Attributes:
        open: requests in the engine.  waiting: requests that are prepared and not in it yet, by tier.
        ended: requests that have ended.  stolen: requests that were addressed to other workers.
        handover: None: there are no hand-overs between workers.  experiment: None: the worker takes part in none.
    """

    open: int = 0
    waiting: Mapping[Tier, int] = field(default_factory=dict)
    ended: EndedRequests = field(default_factory=EndedRequests)
    handover: HandoverMetrics | None = None
    stolen: int = 0
    experiment: ExperimentMetrics | None = None


class _Reading(NamedTuple):
    """The engine's counters at a moment of the worker's clock (seconds)."""

    at: float
    stats: EngineStats
    load: ExpertLoad | None


class MetricsReader:
    """Builds the metrics of the worker of one loaded model.

    Args:
        model: the model's name.  began: start of serving it, on the worker's clock (seconds).
        gpu_uuids: of the GPUs that compute it.  policies: counts of the content policies; None: there are none.
        adapters: bytes of the weights of each of its adapters.
    """

    def __init__(
        self,
        model: str,
        engine: StepEngine,
        began: float,
        gpu_uuids: Sequence[str] = (),
        policies: PolicyCounts | None = None,
        adapters: Mapping[str, int] | None = None,
    ) -> None:
        self.ended = EndedRequests()
        self._adapters = adapters or {}
        self._model = model
        self._engine = engine
        self._began = began
        self._gpus = GpuReader(gpu_uuids)
        self._policies = policies or PolicyCounts()
        self._policies_before = self._policies.read()
        # The warm-up's steps are not counted.
        self._before, self._classes_before = engine.stats(), engine.classes()
        self._readings = deque([_Reading(began, self._before, engine.expert_load())])

    def read(self, now: float, queued: Mapping[Tier, int], side_work: SideWorkMetrics) -> WorkerMetrics:
        """The metrics now.

        Args:
            now: on the worker's clock (seconds).  queued: rows of open shards that the engine doesn't have yet.
        """
        stats, before = self._engine.stats(), self._before
        reading = _Reading(now, stats, self._engine.expert_load())
        earlier = self._earlier(reading)
        load = None if reading.load is None or earlier.load is None else reading.load.since(earlier.load)
        waiting = Counter(queued) + Counter(side_work.waiting)
        found = {
            tier: self._tier(tier, counts, then, waiting[tier], side_work.ended.of(tier))
            for (tier, _), counts, then in zip(
                sorted(PRIORITIES.items(), key=lambda one: one[1]),
                self._engine.classes(),
                self._classes_before,
                strict=True,
            )
        }
        return WorkerMetrics(
            model=self._model,
            seconds=max(0.0, now - self._began),
            tiers={tier: metrics for tier, metrics in found.items() if metrics != _NO_METRICS},
            rates=_rates(earlier, reading),
            computed=stats.computed - before.computed,
            prompt=stats.prompt - before.prompt,
            generated=stats.generated - before.generated,
            recomputed=stats.recomputed - before.recomputed,
            prefix_queried=stats.queried - before.queried,
            prefix_hits=stats.cached - before.cached,
            steps=_histogram(stats.step_times, before.step_times),
            step_rows=stats.step_rows - before.step_rows,
            preemptions=stats.preemptions - before.preemptions,
            kv_blocks=stats.total_blocks,
            kv_blocks_used=stats.total_blocks - stats.free_blocks,
            expert_load=None if load is None else load.busiest_expert,
            rank_load=None if load is None else load.busiest_rank,
            lane_open=side_work.open,
            lane_waiting=sum(side_work.waiting.values()),
            lane_stolen=side_work.stolen,
            pace=None if stats.slo is None else _slo_metrics(stats.slo),
            experiment=side_work.experiment,
            speculation=_speculation(stats.speculation),
            cache_tier=None if stats.tier is None else _cache_tier(stats.tier),
            host_tier=None if stats.host_tier is None else _cache_tier(stats.host_tier),
            handover=side_work.handover,
            policies=counted_since(self._policies_before, self._policies.read()),
            adapters={
                name: one for name in self._adapters if (one := self._adapter(name, side_work.ended)) is not None
            },
            gpus=self._gpus.read(),
        )

    def _adapter(self, name: str, lane: EndedRequests) -> AdapterMetrics | None:
        """The metrics of an adapter; None: no request has named it."""
        rows, calls = self.ended.of_adapter(name), lane.of_adapter(name)
        answered, failed = rows.answered + calls.answered, rows.failed + calls.failed
        if not answered and not failed:
            return None
        usage = _usage(rows) + _usage(calls)
        return AdapterMetrics(answered=answered, failed=failed, usage=usage, weights_bytes=self._adapters[name])

    def _tier(self, tier: Tier, counts: ClassStats, then: ClassStats, waiting: int, lane: _TierCounts) -> TierMetrics:
        rows = self.ended.of(tier)
        return TierMetrics(
            running=counts.running,
            waiting=counts.waiting + waiting,
            answered=rows.answered + lane.answered,
            failed=rows.failed + lane.failed,
            usage=_usage(rows) + _usage(lane),
            ttft=_histogram(counts.first_token, then.first_token),
            itl=_histogram(counts.between_tokens, then.between_tokens),
            whole=_histogram(counts.whole, then.whole),
        )

    def _earlier(self, reading: _Reading) -> _Reading:
        """The latest reading that is at least `RATE_SECONDS` older."""
        while len(self._readings) > 1 and self._readings[1].at <= reading.at - RATE_SECONDS:
            self._readings.popleft()
        self._readings.append(reading)
        return self._readings[0]


def _rates(earlier: _Reading, reading: _Reading) -> TokenRates:
    seconds, stats, before = reading.at - earlier.at, reading.stats, earlier.stats
    if seconds <= 0:
        return TokenRates()
    return TokenRates(
        prompt=(stats.prompt - before.prompt) / seconds,
        cached=(stats.cached - before.cached) / seconds,
        generated=(stats.generated - before.generated) / seconds,
    )


_NO_METRICS: Final = TierMetrics()


def _usage(counts: _TierCounts) -> Usage:
    return Usage(
        prompt=counts.prompt,
        cached=counts.cached,
        completion=counts.completion,
        drafted=counts.drafted,
        accepted=counts.accepted,
    )


def _histogram(counts: LatencyCounts, before: LatencyCounts) -> HistogramSample:
    """The samples since `before`."""
    old = before.counts or (0,) * len(counts.counts)
    added = [now - then for now, then in zip(counts.counts, old, strict=True)]
    while added and not added[-1]:
        added.pop()
    return HistogramSample(counts=tuple(added), seconds=max(0.0, counts.seconds - before.seconds))


def _slo_metrics(stats: SloStats) -> SloMetrics:
    return SloMetrics(
        weights=_terms(stats.weights),
        terms=_terms(stats.terms),
        others=min(1.0, stats.others),
        beside_streams=stats.beside_streams,
        beside_prompts=stats.beside_prompts,
        late_first_tokens=stats.late_first_tokens,
        late_tokens=stats.late_tokens,
        drops=stats.drops,
    )


def _terms(terms: SloTerms) -> SloWeights:
    return SloWeights(ttft=terms.ttft, itl=terms.itl, utilisation=terms.utilisation, drops=terms.drops)


def _cache_tier(stats: TierStats) -> CacheTierMetrics:
    return CacheTierMetrics(
        hits=stats.hits, rejected=stats.rejected, bytes_read=stats.bytes_read, bytes_written=stats.bytes_written,
        is_on=stats.is_on,
    )  # fmt: skip


def _speculation(stats: SpeculationStats) -> SpeculationMetrics | None:
    if not stats.drafted:
        return None
    return SpeculationMetrics(
        drafted=stats.drafted, accepted=stats.accepted, gained=stats.gained, seconds=stats.compared_seconds
    )
