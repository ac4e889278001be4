"""Metric collectors for each part of a process, by the names of `METRICS`. An unknown value is not reported, instead of
a constant zero."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import TYPE_CHECKING, Final, Literal

from pipeline.answers.index import LOOKUP_RESULTS, AnswerStoreCounts
from pipeline.counters import DeadLetterCounts, UnexpectedErrors
from pipeline.dispatcher.dispatch_counts import JOB_BOUNDS, DispatchMetrics
from pipeline.observability.histogram import Histogram, LatencyRecorder
from pipeline.observability.metric_definitions import OTHER
from pipeline.observability.samples import Samples, Source
from pipeline.ports import Clock, Heartbeats
from schemas.experiments import SliceCounts
from schemas.jobs.job import Tier
from schemas.jobs.outcome import JobStatus
from schemas.jobs.results import RowStatus
from schemas.workers.metrics import (
    THROTTLE_REASONS,
    ExperimentMetrics,
    GpuMetrics,
    HandoverMetrics,
    HistogramSample,
    SloMetrics,
    SloWeights,
    WorkerMetrics,
)

if TYPE_CHECKING:
    from pipeline.gateway.http.metrics import HttpMetrics
    from pipeline.gateway.status import Status
    from pipeline.ingest.intake import IntakeMetrics
    from pipeline.lane.prefix_router import PrefixRouter
    from pipeline.models.open_releases import OpenReleases
    from pipeline.models.rollout_controller import ReleaseMetrics
    from pipeline.overload.controller import OverloadController
    from pipeline.routing.rules import RouteCounts
    from schemas.releases import ReleaseComparison


INGEST_SOURCES: Final = ("kafka", "bucket", "bucket-events", "folder")
"""Ingest sources that write dead letters: reported as zero from the start, so that the first dead letter is an
increase."""


JOB_TIERS: Final = (Tier.STANDARD, Tier.BULK)
END_STATUSES: Final = (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED)
RESULTS: Final = ("answered", "cached", "failed", "cancelled")
POLICY_ACTIONS: Final = ("pass", "flag", "route", "refuse")


def build(samples: Samples) -> None:
    """Report tokenmill's version."""
    try:
        samples.value("tokenmill_build_info", 1, version("tokenmill"))
    except PackageNotFoundError:  # run from a source tree that isn't installed
        samples.value("tokenmill_build_info", 1, "unknown")


def own_work(metrics: Callable[[], WorkerMetrics | None]) -> Source:
    """A worker's own metrics, once there are any."""

    def collect(samples: Samples) -> None:
        if (known := metrics()) is not None:
            _worker(samples, known, None)

    return collect


def workers(heartbeats: Heartbeats, *, each: bool) -> Source:
    """The live workers. `each`: also the metrics of each of them."""

    def collect(samples: Samples) -> None:
        metrics = heartbeats.metrics()
        names = [state.name for state in heartbeats.workers()]
        loaded = Counter(metrics[name].model if name in metrics else OTHER for name in names)
        for model, count in sorted(loaded.items()):
            samples.value("tokenmill_workers", count, model)
        for name, known in metrics.items() if each else ():
            _worker(samples, known, name)

    return collect


def prices(heartbeats: Heartbeats, otherwise: float | None) -> Source:
    """The hourly price of one worker, by served model, as the mean of its workers. `otherwise`: of workers that report
    no price; None: unknown."""

    def collect(samples: Samples) -> None:
        said = {worker.name: worker.price_per_hour for worker in heartbeats.workers()}
        found: defaultdict[str, list[float]] = defaultdict(list)
        for name, metrics in heartbeats.metrics().items():
            price = otherwise if said.get(name) is None else said[name]
            if price is not None:
                found[metrics.model].append(price)
        for model, each in sorted(found.items()):
            samples.value("tokenmill_worker_hour_price", sum(each) / len(each), model)

    return collect


def all_of(*sources: Source) -> Source:
    """Combine several sources into one."""

    def collect(samples: Samples) -> None:
        for source in sources:
            source(samples)

    return collect


def dispatching(metrics: DispatchMetrics, clock: Clock) -> Source:
    """A dispatcher's metrics: the state of jobs while it leads, and committed rows, tokens and costs."""

    def collect(samples: Samples) -> None:
        snapshot = metrics.snapshot
        samples.value("tokenmill_is_leader", int(snapshot is not None))
        if snapshot is not None:
            samples.value("tokenmill_jobs_needing_attention", snapshot.attention)
            for (model, tier), tokens in sorted(snapshot.backlog.items()):
                samples.value("tokenmill_backlog_tokens", tokens, model, tier)
            for (tier, status), count in sorted(snapshot.jobs.items()):
                samples.value("tokenmill_jobs", count, tier, status)
            for (tier, state), count in sorted(snapshot.shards.items()):
                samples.value("tokenmill_shards", count, tier, state)
            for tier, made in sorted(snapshot.oldest.items()):
                age = max(0.0, (clock.now() - made).total_seconds())
                samples.value("tokenmill_oldest_waiting_seconds", age, tier)
        for (tier, status), count in _with_zeros(metrics.rows(), JOB_TIERS, RowStatus):
            samples.value("tokenmill_committed_rows_total", count, tier, status)
        for (model, tier, kind), tokens in sorted(metrics.tokens().items()):
            samples.value("tokenmill_committed_tokens_total", tokens, model, tier, kind)
        for (tier, status), count in _with_zeros(metrics.ended(), JOB_TIERS, END_STATUSES):
            samples.value("tokenmill_jobs_ended_total", count, tier, status)
        for tier in sorted({*JOB_TIERS, *metrics.job_durations}):
            took = metrics.job_durations.get(tier)
            empty = Histogram(bounds=JOB_BOUNDS)
            samples.value("tokenmill_job_seconds", empty if took is None else took.read(), tier)
        for (model, tier), cost in sorted(metrics.cost().items()):
            samples.value("tokenmill_cost_total", cost, model, tier)
        stored_answers(metrics.answers, "job")(samples)

    return collect


def stored_answers(counts: AnswerStoreCounts, source: Literal["job", "http"]) -> Source:
    """The use of the answer store."""

    def collect(samples: Samples) -> None:
        known = counts.snapshot()
        for result in LOOKUP_RESULTS:
            samples.value("tokenmill_stored_answer_lookups_total", known.get(result, 0), source, result)
        samples.value("tokenmill_stored_answer_bytes_total", known.get("bytes", 0), source)

    return collect


def unexpected_errors(errors: UnexpectedErrors) -> Source:
    """Unexpected exceptions."""

    def collect(samples: Samples) -> None:
        for part, count in sorted(errors.counts().items()):
            samples.value("tokenmill_unexpected_errors_total", count, part)

    return collect


def installation(status: Status) -> Source:
    """The state of open jobs, read from the root; for a process without a dispatcher."""

    def collect(samples: Samples) -> None:
        tokens, jobs = status.backlog()
        for (model, tier), left in sorted(tokens.items()):
            samples.value("tokenmill_backlog_tokens", left, model, tier)
        for (tier, word), count in sorted(jobs.items()):
            samples.value("tokenmill_jobs", count, tier, word)

    return collect


def http(metrics: HttpMetrics) -> Source:
    """A gateway's metrics."""

    def collect(samples: Samples) -> None:
        for request, count in sorted(metrics.requests().items()):
            samples.value("tokenmill_http_requests_total", count, *request)
        samples.value("tokenmill_http_requests_in_progress", metrics.in_progress())
        for answer, count in _with_zeros(metrics.answers(), Tier, RESULTS):
            samples.value("tokenmill_answers_total", count, *answer)
        _histograms(samples, "tokenmill_answer_first_token_seconds", metrics.first_tokens)
        _histograms(samples, "tokenmill_answer_seconds", metrics.response_times)
        for answer_latency, count in sorted(metrics.goodput.counts().items()):
            samples.value("tokenmill_answer_latency_total", count, *answer_latency)
        for state, count in sorted(metrics.callers().items()):
            samples.value("tokenmill_inference_requests", count, state)

    return collect


def lane_routes(router: PrefixRouter) -> Source:
    """Where a gateway sent its requests."""

    def collect(samples: Samples) -> None:
        for route, count in router.routes().items():
            samples.value("tokenmill_lane_routed_requests_total", count, route)

    return collect


def virtual_models(counts: RouteCounts) -> Source:
    """The choices of virtual models' rules in this process."""

    def collect(samples: Samples) -> None:
        for (virtual, model), count in sorted(counts.chosen().items()):
            samples.value("tokenmill_virtual_model_requests_total", count, virtual, model)
        for model, count in sorted(counts.failures().items()):
            samples.value("tokenmill_routing_label_failures_total", count, model)

    return collect


def overload(control: OverloadController) -> Source:
    """A gateway's overload control."""

    def collect(samples: Samples) -> None:
        for (model, tier), count in sorted(control.refused().items()):
            samples.value("tokenmill_shed_requests_total", count, model, tier)
        for model, seconds in sorted(control.waits().items()):
            samples.value("tokenmill_forecast_wait_seconds", seconds, model)
        for (model, step), is_active in sorted(control.steps().items()):
            samples.value("tokenmill_degradation_step_active", int(is_active), model, step)

    return collect


def intake(metrics: IntakeMetrics, dead_letters: DeadLetterCounts) -> Source:
    """Jobs and dead letters of this process's ingest sources."""

    def collect(samples: Samples) -> None:
        for result, count in sorted(metrics.read().items()):
            samples.value("tokenmill_intake_jobs_total", count, result)
        written = dead_letters.read()
        for source in INGEST_SOURCES:
            samples.value("tokenmill_dead_letters_total", written.get(source, 0), source)

    return collect


def releases(metrics: Callable[[], ReleaseMetrics]) -> Source:
    """The state of open releases, and failed canary prompts."""

    def collect(samples: Samples) -> None:
        known = metrics()
        for model, count in sorted(known.canaries.items()):
            samples.value("tokenmill_canary_failures", count, model)
        for model, compared in sorted(known.open.items()):
            samples.value("tokenmill_releases_open", 1, model)
            samples.value("tokenmill_release_rows", compared.rows, model, "compared")
            samples.value("tokenmill_release_rows", compared.failed, model, "failed")
            if compared.agreement is not None:
                samples.value("tokenmill_release_agreement_ratio", compared.agreement.mean, model)
            if compared.latency is not None:
                samples.value("tokenmill_release_latency_ratio", compared.latency.mean, model)
            if compared.drift is not None:
                samples.value("tokenmill_release_drift_nats", compared.drift.mean, model)
            for traffic, part in (("mirror", compared.mirror), ("canary", compared.canary)):
                if part is not None:
                    _requests(samples, part, model, traffic)
        for (model, verdict), count in sorted(known.ended.items()):
            samples.value("tokenmill_releases_ended_total", count, model, verdict)

    return collect


def _requests(samples: Samples, compared: ReleaseComparison, model: str, traffic: str) -> None:
    for kind, count in (("compared", compared.rows), ("failed", compared.failed), ("lost", compared.lost)):
        samples.value("tokenmill_release_compared_requests", count, model, traffic, kind)
    ratios = {"agreement": compared.agreement, "ttft": compared.ttft, "itl": compared.itl, "length": compared.length}
    for what, bounds in ratios.items():
        if bounds is not None:
            samples.value("tokenmill_release_requests_ratio", bounds.mean, model, traffic, what)


def release_requests(open_releases: OpenReleases) -> Source:
    """A gateway's requests that were copied to a version on trial, or answered by it."""

    def collect(samples: Samples) -> None:
        for kind, count in open_releases.counts().items():
            samples.value("tokenmill_release_requests_total", count, kind)

    return collect


def _with_zeros(
    counts: Mapping[tuple[str, str], int], tiers: Iterable[str], words: Iterable[str]
) -> list[tuple[tuple[str, str], int]]:
    """Counts with zeros for missing labels, so that the first event of a kind is an increase: Prometheus sees no
    increase in a counter that begins at 1."""
    zeros = {(str(tier), str(word)): 0 for tier, word in product(tiers, words)}
    return sorted((zeros | dict(counts)).items())


def _histograms(samples: Samples, name: str, by_tier: Mapping[Tier, LatencyRecorder]) -> None:
    for tier, recorder in by_tier.items():
        counted = recorder.read()
        if any(counted.counts):
            samples.value(name, counted, tier.value)


def _worker(samples: Samples, known: WorkerMetrics, worker: str | None) -> None:
    """The metrics of one worker. `worker`: its name, where it is needed as a label."""
    model = known.model

    def value(name: str, amount: float, *labels: str) -> None:
        samples.value(name, amount, model, *labels, worker=worker)

    def histogram(name: str, times: HistogramSample, *labels: str) -> None:
        if times.counts:
            samples.value(name, Histogram(times.counts, times.seconds), model, *labels, worker=worker)

    for tier, metrics in known.tiers.items():
        for status, count in (("succeeded", metrics.answered), ("failed", metrics.failed)):
            value("tokenmill_requests_total", count, tier.value, status)
        for kind in ("prompt", "cached", "completion", "drafted", "accepted"):
            value("tokenmill_tokens_total", getattr(metrics.usage, kind), tier.value, kind)
        value("tokenmill_running_requests", metrics.running, tier.value)
        value("tokenmill_waiting_requests", metrics.waiting, tier.value)
        histogram("tokenmill_time_to_first_token_seconds", metrics.ttft, tier.value)
        histogram("tokenmill_inter_token_seconds", metrics.itl, tier.value)
        histogram("tokenmill_request_seconds", metrics.whole, tier.value)
    engine = {"prompt": known.prompt, "generated": known.generated, "recomputed": known.recomputed}
    if known.kv_blocks:
        engine["cached"] = known.prefix_hits
        value("tokenmill_prefix_queried_tokens_total", known.prefix_queried)
        value("tokenmill_prefix_hit_tokens_total", known.prefix_hits)
        value("tokenmill_kv_blocks", known.kv_blocks)
        value("tokenmill_kv_blocks_used", known.kv_blocks_used)
        value("tokenmill_preemptions_total", known.preemptions)
    if (speculation := known.speculation) is not None:
        engine |= {"drafted": speculation.drafted, "accepted": speculation.accepted}
        if speculation.seconds:
            value("tokenmill_speculation_gained_tokens", speculation.gained)
            value("tokenmill_speculation_compared_seconds_total", speculation.seconds)
    for medium, cache in (("disk", known.cache_tier), ("host", known.host_tier)):
        if cache is not None:
            value("tokenmill_kv_tier_hits_total", cache.hits, medium)
            value("tokenmill_kv_tier_bytes_total", cache.bytes_read, medium, "read")
            value("tokenmill_kv_tier_bytes_total", cache.bytes_written, medium, "written")
    if (disk := known.cache_tier) is not None:
        value("tokenmill_kv_tier_rejected_blocks_total", disk.rejected)
        value("tokenmill_kv_tier_off", int(not disk.is_on))
    for holder, load in (("expert", known.expert_load), ("rank", known.rank_load)):
        if load is not None:
            value("tokenmill_expert_load", load, holder)
    for kind, tokens in engine.items():
        value("tokenmill_engine_tokens_total", tokens, kind)
    value("tokenmill_worker_seconds_total", known.seconds)
    histogram("tokenmill_step_seconds", known.steps)
    value("tokenmill_step_rows_total", known.step_rows)
    value("tokenmill_step_tokens_total", known.computed)
    value("tokenmill_store_outage", int(known.store_outage is not None))
    value("tokenmill_lane_requests", known.lane_open, "open")
    value("tokenmill_lane_requests", known.lane_waiting, "waiting")
    value("tokenmill_lane_stolen_requests_total", known.lane_stolen)
    if known.pace is not None:
        _pace(value, known.pace)
    if known.experiment is not None:
        _experiment(value, known.experiment)
    if known.handover is not None:
        _handover(value, known.handover)
    for policy, judged in known.policies.items():
        for action in POLICY_ACTIONS:
            value("tokenmill_judged_texts_total", judged.texts.get(action, 0), policy, action)
        value("tokenmill_content_policy_failures_total", judged.failures, policy)
        for kind, count in (("prompt", judged.prompt_tokens), ("completion", judged.completion_tokens)):
            value("tokenmill_guard_tokens_total", count, policy, kind)
    for name, adapter in known.adapters.items():
        for status, count in (("succeeded", adapter.answered), ("failed", adapter.failed)):
            value("tokenmill_adapter_requests_total", count, name, status)
        for kind in ("prompt", "cached", "completion"):
            value("tokenmill_adapter_tokens_total", getattr(adapter.usage, kind), name, kind)
        value("tokenmill_adapter_weights_bytes", adapter.weights_bytes, name)
    for gpu in known.gpus:
        _gpu(value, gpu)


def _pace(value: Callable[..., None], pace: SloMetrics) -> None:
    for term in SloWeights.model_fields:
        value("tokenmill_slo_weight", getattr(pace.weights, term), term)
        value("tokenmill_slo_term", getattr(pace.terms, term), term)
    value("tokenmill_slo_objective", pace.objective)
    value("tokenmill_slo_batch_ratio", pace.others)
    value("tokenmill_slo_batch_tokens", pace.beside_streams, "streams")
    value("tokenmill_slo_batch_tokens", pace.beside_prompts, "prompts")
    missed = {"ttft": pace.late_first_tokens, "itl": pace.late_tokens, "deadline": pace.drops}
    for promise, count in missed.items():
        value("tokenmill_slo_missed_total", count, promise)


def _experiment(value: Callable[..., None], experiment: ExperimentMetrics) -> None:
    for arm, counts in experiment.arms.items():
        value("tokenmill_experiment_arm", int(arm == experiment.arm), experiment.name, arm)
        value("tokenmill_experiment_seconds_total", counts.seconds, experiment.name, arm)
        for event in SliceCounts.model_fields:
            if event != "seconds":
                value("tokenmill_experiment_events_total", getattr(counts, event), experiment.name, arm, event)


def _handover(value: Callable[..., None], handover: HandoverMetrics) -> None:
    requests = {
        "sent": handover.offered_requests,
        "received": handover.fetched_requests,
        "stayed": handover.stayed_requests,
        "refused": handover.refused_requests,
    }
    for outcome, count in requests.items():
        value("tokenmill_handovers_total", count, outcome)
    value("tokenmill_kv_transfer_bytes_total", handover.sent_bytes, "sent")
    value("tokenmill_kv_transfer_bytes_total", handover.received_bytes, "received")
    value("tokenmill_kv_transfer_bytes_total", handover.used_bytes, "used")
    for reason, count in (("expired", handover.expired_offers), ("broken", handover.broken_transfers)):
        value("tokenmill_kv_transfers_failed_total", count, reason)
    value("tokenmill_kv_fetch_seconds_total", handover.fetch_seconds)


def _gpu(value: Callable[..., None], gpu: GpuMetrics) -> None:
    amounts = {
        "memory_bytes": gpu.memory_bytes,
        "memory_used_bytes": gpu.memory_used_bytes,
        "utilization_ratio": gpu.utilization,
        "power_watts": gpu.power_watts,
        "power_limit_watts": gpu.power_limit_watts,
        "temperature_celsius": gpu.temperature_celsius,
        "sm_clock_hertz": gpu.sm_clock_hertz,
    }
    for name, amount in amounts.items():
        if amount is not None:
            value(f"tokenmill_gpu_{name}", amount, gpu.device, gpu.uuid)
    if gpu.throttled is not None:
        for reason in THROTTLE_REASONS:
            value("tokenmill_gpu_throttled", int(reason in gpu.throttled), gpu.device, gpu.uuid, reason)
