"""What each part of a process knows, told by the names of the table. What isn't known isn't told: no constant zero."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import TYPE_CHECKING, Final

from pipeline.counters import DeadLetterCounts, UnexpectedErrors
from pipeline.dispatcher.metrics import JOB_BOUNDS, DispatchMetrics
from pipeline.observability.histogram import LatencyRecorder
from pipeline.observability.metric_definitions import OTHER
from pipeline.observability.samples import Samples, Source, Times
from pipeline.ports import Clock, Heartbeats
from schemas.jobs.job import Tier
from schemas.jobs.outcome import JobStatus
from schemas.jobs.results import RowStatus
from schemas.workers.metrics import HistogramSample, PaceMetrics, PaceWeights, WorkerMetrics

if TYPE_CHECKING:
    from pipeline.gateway.http.metrics import HttpMetrics
    from pipeline.gateway.status import Status
    from pipeline.ingest.intake import IntakeMetrics
    from pipeline.models.rollout_controller import ReleaseMetrics


DOORS: Final = ("kafka", "bucket", "bucket-events", "folder")
"""Those that write dead letters: told from the first moment on, or the first letter would be no increase."""


JOB_TIERS: Final = (Tier.STANDARD, Tier.BULK)
ENDS: Final = (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED)
RESULTS: Final = ("answered", "cached", "failed", "cancelled")


def build(told: Samples) -> None:
    """Which tokenmill this is."""
    try:
        told.value("tokenmill_build_info", 1, version("tokenmill"))
    except PackageNotFoundError:  # run from a source tree that isn't installed
        told.value("tokenmill_build_info", 1, "unknown")


def own_work(figures: Callable[[], WorkerMetrics | None]) -> Source:
    """A worker's own figures, once there are any."""

    def tell(told: Samples) -> None:
        if (known := figures()) is not None:
            _worker(told, known, None)

    return tell


def workers(heartbeats: Heartbeats, *, each: bool) -> Source:
    """The workers that live. `each`: what each of them counts, too."""

    def tell(told: Samples) -> None:
        figures = heartbeats.figures()
        names = [state.name for state in heartbeats.workers()]
        loaded = Counter(figures[name].model if name in figures else OTHER for name in names)
        for model, count in sorted(loaded.items()):
            told.value("tokenmill_workers", count, model)
        for name, known in figures.items() if each else ():
            _worker(told, known, name)

    return tell


def prices(heartbeats: Heartbeats, otherwise: float | None) -> Source:
    """What an hour of one worker costs, of each model that is served, on the mean of its workers; `otherwise`: of those
    that don't say their price. None: nobody knows."""

    def tell(told: Samples) -> None:
        said = {worker.name: worker.price_per_hour for worker in heartbeats.workers()}
        found: defaultdict[str, list[float]] = defaultdict(list)
        for name, figures in heartbeats.figures().items():
            price = otherwise if said.get(name) is None else said[name]
            if price is not None:
                found[figures.model].append(price)
        for model, each in sorted(found.items()):
            told.value("tokenmill_worker_hour_price", sum(each) / len(each), model)

    return tell


def all_of(*sources: Source) -> Source:
    """Several as one."""

    def tell(told: Samples) -> None:
        for source in sources:
            source(told)

    return tell


def dispatching(figures: DispatchMetrics, clock: Clock) -> Source:
    """What a dispatcher knows: how jobs stand while it leads, and what it has seen committed."""

    def tell(told: Samples) -> None:
        standing = figures.snapshot
        told.value("tokenmill_leading", int(standing is not None))
        if standing is not None:
            told.value("tokenmill_jobs_needing_attention", standing.attention)
            for (model, tier), tokens in sorted(standing.backlog.items()):
                told.value("tokenmill_backlog_tokens", tokens, model, tier)
            for (tier, status), count in sorted(standing.jobs.items()):
                told.value("tokenmill_jobs", count, tier, status)
            for (tier, state), count in sorted(standing.shards.items()):
                told.value("tokenmill_shards", count, tier, state)
            for tier, made in sorted(standing.oldest.items()):
                age = max(0.0, (clock.now() - made).total_seconds())
                told.value("tokenmill_oldest_waiting_seconds", age, tier)
        for (tier, status), count in _with_zeros(figures.rows(), JOB_TIERS, RowStatus):
            told.value("tokenmill_committed_rows_total", count, tier, status)
        for (model, tier, kind), tokens in sorted(figures.tokens().items()):
            told.value("tokenmill_committed_tokens_total", tokens, model, tier, kind)
        for (tier, status), count in _with_zeros(figures.ended(), JOB_TIERS, ENDS):
            told.value("tokenmill_jobs_ended_total", count, tier, status)
        for tier in sorted({*JOB_TIERS, *figures.job_durations}):
            took = figures.job_durations.get(tier)
            counts, seconds = ((), 0.0) if took is None else took.read()
            told.value("tokenmill_job_seconds", Times(counts, seconds, JOB_BOUNDS), tier)
        for tier, cost in sorted(figures.cost().items()):
            told.value("tokenmill_cost_total", cost, tier)

    return tell


def unexpected_errors(errors: UnexpectedErrors) -> Source:
    """Exceptions that were never foreseen."""

    def tell(told: Samples) -> None:
        for part, count in sorted(errors.counts().items()):
            told.value("tokenmill_unforeseen_errors_total", count, part)

    return tell


def installation(status: Status) -> Source:
    """How open jobs stand, as the root has it; for a process without a dispatcher."""

    def tell(told: Samples) -> None:
        tokens, jobs = status.backlog()
        for (model, tier), left in sorted(tokens.items()):
            told.value("tokenmill_backlog_tokens", left, model, tier)
        for (tier, word), count in sorted(jobs.items()):
            told.value("tokenmill_jobs", count, tier, word)

    return tell


def http(figures: HttpMetrics) -> Source:
    """What a gateway counts."""

    def tell(told: Samples) -> None:
        for request, count in sorted(figures.requests().items()):
            told.value("tokenmill_http_requests_total", count, *request)
        told.value("tokenmill_http_requests_in_progress", figures.in_progress())
        for answer, count in _with_zeros(figures.answers(), Tier, RESULTS):
            told.value("tokenmill_answers_total", count, *answer)
        _times(told, "tokenmill_answer_first_token_seconds", figures.first_tokens)
        _times(told, "tokenmill_answer_seconds", figures.wholes)
        for state, count in sorted(figures.callers().items()):
            told.value("tokenmill_callers", count, state)

    return tell


def intake(figures: IntakeMetrics, letters: DeadLetterCounts) -> Source:
    """What came in at the doors of this process."""

    def tell(told: Samples) -> None:
        for result, count in sorted(figures.read().items()):
            told.value("tokenmill_intake_jobs_total", count, result)
        written = letters.read()
        for door in DOORS:
            told.value("tokenmill_dead_letters_total", written.get(door, 0), door)

    return tell


def releases(figures: Callable[[], ReleaseMetrics]) -> Source:
    """How open releases stand, and which canary prompts failed."""

    def tell(told: Samples) -> None:
        known = figures()
        for model, count in sorted(known.canaries.items()):
            told.value("tokenmill_canary_failures", count, model)
        for model, compared in sorted(known.open.items()):
            told.value("tokenmill_releases_open", 1, model)
            told.value("tokenmill_release_rows", compared.rows, model, "compared")
            told.value("tokenmill_release_rows", compared.failed, model, "failed")
            if compared.agreement is not None:
                told.value("tokenmill_release_agreement_ratio", compared.agreement.mean, model)
            if compared.latency is not None:
                told.value("tokenmill_release_latency_ratio", compared.latency.mean, model)
            if compared.drift is not None:
                told.value("tokenmill_release_drift_nats", compared.drift.mean, model)
        for (model, verdict), count in sorted(known.ended.items()):
            told.value("tokenmill_releases_ended_total", count, model, verdict)

    return tell


def _with_zeros(
    counts: Mapping[tuple[str, str], int], tiers: Iterable[str], words: Iterable[str]
) -> list[tuple[tuple[str, str], int]]:
    """Counts that begin at 0, so that the first of a kind is an increase: to a watcher, what begins with 1 has always
    been so."""
    zeros = {(str(tier), str(word)): 0 for tier, word in product(tiers, words)}
    return sorted((zeros | dict(counts)).items())


def _times(told: Samples, name: str, by_tier: Mapping[Tier, LatencyRecorder]) -> None:
    for tier, buckets in by_tier.items():
        counts, seconds = buckets.read()
        if any(counts):
            told.value(name, Times(counts, seconds), tier.value)


def _worker(told: Samples, known: WorkerMetrics, worker: str | None) -> None:
    """What one worker counts. `worker`: its name, where that must be told."""
    model = known.model

    def value(name: str, amount: float, *labels: str) -> None:
        told.value(name, amount, model, *labels, worker=worker)

    def histogram(name: str, times: HistogramSample, *labels: str) -> None:
        if times.counts:
            told.value(name, Times(times.counts, times.seconds), model, *labels, worker=worker)

    for tier, figures in known.tiers.items():
        for status, count in (("succeeded", figures.answered), ("failed", figures.failed)):
            value("tokenmill_requests_total", count, tier.value, status)
        for kind in ("prompt", "cached", "completion", "drafted", "accepted"):
            value("tokenmill_tokens_total", getattr(figures.usage, kind), tier.value, kind)
        value("tokenmill_running_requests", figures.running, tier.value)
        value("tokenmill_waiting_requests", figures.waiting, tier.value)
        histogram("tokenmill_time_to_first_token_seconds", figures.ttft, tier.value)
        histogram("tokenmill_inter_token_seconds", figures.itl, tier.value)
        histogram("tokenmill_request_seconds", figures.whole, tier.value)
    engine = {"prompt": known.prompt, "generated": known.generated, "recomputed": known.recomputed}
    if known.kv_blocks:
        engine["cached"] = known.prefix_hits
        value("tokenmill_prefix_queried_tokens_total", known.prefix_queried)
        value("tokenmill_prefix_hit_tokens_total", known.prefix_hits)
        value("tokenmill_kv_blocks", known.kv_blocks)
        value("tokenmill_kv_blocks_used", known.kv_blocks_used)
        value("tokenmill_preemptions_total", known.preemptions)
    if (guesses := known.speculation) is not None:
        engine |= {"drafted": guesses.drafted, "accepted": guesses.accepted}
        if guesses.seconds:
            value("tokenmill_speculation_gained_tokens", guesses.gained)
            value("tokenmill_speculation_compared_seconds_total", guesses.seconds)
    for kind, tokens in engine.items():
        value("tokenmill_engine_tokens_total", tokens, kind)
    value("tokenmill_worker_seconds_total", known.seconds)
    histogram("tokenmill_step_seconds", known.steps)
    value("tokenmill_step_rows_total", known.step_rows)
    value("tokenmill_step_tokens_total", known.computed)
    value("tokenmill_store_outage", int(known.store_outage is not None))
    value("tokenmill_lane_requests", known.lane_open, "open")
    value("tokenmill_lane_requests", known.lane_waiting, "waiting")
    if known.pace is not None:
        _pace(value, known.pace)


def _pace(value: Callable[..., None], pace: PaceMetrics) -> None:
    for term in PaceWeights.model_fields:
        value("tokenmill_pace_weight", getattr(pace.weights, term), term)
        value("tokenmill_pace_term", getattr(pace.terms, term), term)
    value("tokenmill_pace_objective", pace.objective)
    value("tokenmill_pace_others_ratio", pace.others)
    value("tokenmill_pace_allowed_tokens", pace.beside_streams, "streams")
    value("tokenmill_pace_allowed_tokens", pace.beside_prompts, "prompts")
    missed = {"ttft": pace.late_first_tokens, "itl": pace.late_tokens, "deadline": pace.drops}
    for promise, count in missed.items():
        value("tokenmill_pace_missed_total", count, promise)
