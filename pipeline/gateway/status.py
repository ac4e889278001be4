"""How an installation stands: its workers, what is open, who waits. For the page, and for whoever watches from outside.

All of it is hints, some seconds old. Looks are shared: however many ask, the root is read once in a while.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from pipeline.models.catalog import Catalog
from pipeline.observability.metric_definitions import OTHER
from pipeline.ports import Heartbeats, WorkerState, World
from pipeline.scaling.open_work import OpenJobs, OpenJobsIndex, OpenJobSummary
from schemas.models import CatalogEntry
from schemas.workers.metrics import LATENCY_BOUNDS, WorkerMetrics


class Status:
    """Looks at the root that `world.store` is, and at its workers' heartbeats. Threads may share one.

    Args:
        look_every: seconds for which a look is believed.
    """

    def __init__(self, world: World, heartbeats: Heartbeats, look_every: float) -> None:
        self._world = world
        self._heartbeats = heartbeats
        self._look_every = look_every
        self._catalog = Catalog(world.store)
        self._lock = threading.Lock()
        self._next_look = 0.0
        self._workers: list[WorkerState] = []
        self._entries: list[CatalogEntry] = []
        self._work = OpenJobsIndex(world.store)
        self._figures: dict[str, WorkerMetrics] = {}
        self._open = OpenJobs([], more=False)

    def document(self, tenant: str | None, *, samples: bool) -> dict[str, Any]:
        """How everything stands, of JSON's own types.

        Args:
            tenant: whose jobs the backlog counts; None: everybody's.
            samples: with the workers' names, and what they measure of all tenants' work.
        """
        with self._lock:
            self._look_again()
            workers, entries, found, figures = self._workers, self._entries, self._open, self._figures
        names = {entry.pin.key: entry.pin.name for entry in entries}
        return {
            "object": "status",
            "as_of": self._world.clock.now().isoformat(),
            "workers": [_worker(state, names, figures.get(state.name), samples=samples) for state in workers],
            "latency_bounds": LATENCY_BOUNDS,
            "backlog": _backlog([one for one in found.jobs if tenant in (None, one.job.tenant)], found.more),
            "models": sorted(entry.pin.name for entry in entries),
        }

    def backlog(self) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
        """Of everybody's open jobs: (model, tier) -> tokens that are left, and (tier, status) -> jobs. Raises
        `PipelineError` where the root or the workers can't be looked at."""
        with self._lock:
            self._look_again()
            found = self._open.jobs
        tokens: Counter[tuple[str, str]] = Counter()
        jobs: Counter[tuple[str, str]] = Counter()
        for one in found:
            model = one.job.models[0].name if len(one.job.models) == 1 else OTHER
            tokens[model, one.job.tier.value] += one.left
            jobs[one.job.tier.value, one.status.value] += 1
        return tokens, jobs

    def _look_again(self) -> None:
        if self._world.clock.monotonic() >= self._next_look:
            self._look()
            self._next_look = self._world.clock.monotonic() + self._look_every

    def _look(self) -> None:
        found = self._work.look()
        self._workers, self._entries = self._heartbeats.workers(), self._catalog.entries()
        self._figures = self._heartbeats.figures()
        self._open = found


def _worker(
    state: WorkerState, names: dict[str, str], figures: WorkerMetrics | None, *, samples: bool
) -> dict[str, Any]:
    return {
        "name": state.name if samples else None,
        "models": sorted(names.get(key, key) for key in state.models),
        "shards": len(state.held) if samples else None,
        "waiting_tokens": state.waiting_tokens if samples else None,
        "tokens_per_second": state.tokens_per_second if samples else None,
        "draining": state.draining,
        "figures": figures.model_dump(mode="json") if samples and figures is not None else None,
    }


def _backlog(found: list[OpenJobSummary], more: bool) -> dict[str, Any]:
    jobs: Counter[tuple[str | None, str]] = Counter()
    tokens: Counter[tuple[str | None, str]] = Counter()
    for one in found:
        kind = (one.job.models[0].name if len(one.job.models) == 1 else None, one.job.tier.value)
        jobs[kind] += 1
        tokens[kind] += one.left
    kinds = sorted(jobs, key=lambda kind: (kind[0] or "", kind[1]))
    return {
        "jobs": sum(jobs.values()),
        "tokens": sum(tokens.values()),
        "incomplete": more,
        "kinds": [
            {"model": model, "tier": tier, "jobs": jobs[model, tier], "tokens": tokens[model, tier]}
            for model, tier in kinds
        ],
    }
