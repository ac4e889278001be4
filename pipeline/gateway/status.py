"""The status of an installation: its workers, models and backlog, for the web page and for `/v1/status`.

The data is some seconds old. All callers share one cached snapshot, so the root is read at a bounded rate.
"""

from __future__ import annotations

import threading
from collections import Counter

from pipeline.gateway.response_models import BacklogEstimate, BacklogKind, Installation, WorkerStatus
from pipeline.models.catalog import Catalog
from pipeline.observability.metric_definitions import OTHER
from pipeline.ports import Heartbeats, WorkerState, World
from pipeline.scaling.open_work import OpenJobs, OpenJobsIndex, OpenJobSummary
from schemas.jobs.job import Tier
from schemas.models import CatalogEntry
from schemas.workers.metrics import LATENCY_BOUNDS, WorkerMetrics


class Status:
    """A cached snapshot of the open jobs in `world.store` and of the workers' heartbeats. Thread-safe.

    Args:
        refresh_interval_seconds: seconds for which a snapshot is reused.
    """

    def __init__(self, world: World, heartbeats: Heartbeats, refresh_interval_seconds: float) -> None:
        self._world = world
        self._heartbeats = heartbeats
        self._refresh_interval_seconds = refresh_interval_seconds
        self._catalog = Catalog(world.store)
        self._lock = threading.Lock()
        self._refresh_at = 0.0
        self._workers: list[WorkerState] = []
        self._entries: list[CatalogEntry] = []
        self._open_jobs_index = OpenJobsIndex(world.store)
        self._worker_metrics: dict[str, WorkerMetrics] = {}
        self._open_jobs = OpenJobs([], more=False)

    def read(self, tenant: str | None, *, samples: bool) -> Installation:
        """The state of the installation.

        Args:
            tenant: the tenant whose jobs the backlog counts; None: all tenants.
            samples: include the workers' names and their metrics, which cover the work of all tenants.
        """
        with self._lock:
            self._refresh_if_due()
            workers, entries = self._workers, self._entries
            open_jobs, worker_metrics = self._open_jobs, self._worker_metrics
        names = {entry.pin.key: entry.pin.name for entry in entries}
        return Installation(
            as_of=self._world.clock.now(),
            workers=[_worker(state, names, worker_metrics.get(state.name), samples=samples) for state in workers],
            latency_bounds=list(LATENCY_BOUNDS),
            backlog=_backlog([one for one in open_jobs.jobs if tenant in (None, one.job.tenant)], open_jobs.more),
            models=sorted(entry.pin.name for entry in entries),
        )

    def backlog(self) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
        """The open jobs of all tenants: (model, tier) -> remaining tokens, and (tier, status) -> jobs. Raises
        `PipelineError` when the root or the heartbeats can't be read."""
        with self._lock:
            self._refresh_if_due()
            summaries = self._open_jobs.jobs
        tokens: Counter[tuple[str, str]] = Counter()
        jobs: Counter[tuple[str, str]] = Counter()
        for one in summaries:
            model = one.job.computed_by or OTHER
            tokens[model, one.job.tier.value] += one.left
            jobs[one.job.tier.value, one.status.value] += 1
        return tokens, jobs

    def _refresh_if_due(self) -> None:
        if self._world.clock.monotonic() >= self._refresh_at:
            self._refresh()
            self._refresh_at = self._world.clock.monotonic() + self._refresh_interval_seconds

    def _refresh(self) -> None:
        open_jobs = self._open_jobs_index.read()
        self._workers, self._entries = self._heartbeats.workers(), self._catalog.entries()
        self._worker_metrics = self._heartbeats.metrics()
        self._open_jobs = open_jobs


def _worker(state: WorkerState, names: dict[str, str], metrics: WorkerMetrics | None, *, samples: bool) -> WorkerStatus:
    return WorkerStatus(
        name=state.name if samples else None,
        models=sorted(names.get(key, key) for key in state.models),
        shards=len(state.held) if samples else None,
        waiting_tokens=state.waiting_tokens if samples else None,
        tokens_per_second=state.tokens_per_second if samples else None,
        draining=state.draining,
        metrics=metrics if samples else None,
    )


def _backlog(open_jobs: list[OpenJobSummary], incomplete: bool) -> BacklogEstimate:
    jobs: Counter[tuple[str | None, Tier]] = Counter()
    tokens: Counter[tuple[str | None, Tier]] = Counter()
    for one in open_jobs:
        kind = (one.job.computed_by, one.job.tier)
        jobs[kind] += 1
        tokens[kind] += one.left
    kinds = sorted(jobs, key=lambda kind: (kind[0] or "", kind[1]))
    return BacklogEstimate(
        jobs=sum(jobs.values()),
        tokens=sum(tokens.values()),
        incomplete=incomplete,
        kinds=[
            BacklogKind(model=model, tier=tier, jobs=jobs[model, tier], tokens=tokens[model, tier])
            for model, tier in kinds
        ],
    )
