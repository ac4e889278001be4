"""How an installation stands: its workers, what is open, who waits. For the page, and for whoever watches from outside.

All of it is hints, some seconds old. Looks are shared: however many ask, the root is read once in a while.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Final

from pipeline.active import open_jobs
from pipeline.backlog import BYTES_PER_TOKEN
from pipeline.catalog import Catalog
from pipeline.ledger import JobNotFound, LedgerError
from pipeline.ports import Heartbeats, WorkerState, World
from schemas.job import CatalogEntry, Job

_MOST_JOBS: Final = 1_000
"""Open jobs that a look reads, the newest; then the backlog is said to be larger than its numbers."""


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
        self._jobs: dict[str, Job] = {}  # by prefix: their orders never change
        self._open: list[tuple[Job, int]] = []
        self._more = False

    def document(self, tenant: str | None) -> dict[str, Any]:
        """How everything stands, of JSON's own types.

        Args:
            tenant: whose jobs the backlog counts; None: everybody's.
        """
        with self._lock:
            now = self._world.clock.monotonic()
            if now >= self._next_look:
                self._look()
                self._next_look = self._world.clock.monotonic() + self._look_every
            workers, entries, found, more = self._workers, self._entries, self._open, self._more
        names = {entry.pin.key: entry.pin.name for entry in entries}
        return {
            "object": "status",
            "as_of": self._world.clock.now().isoformat(),
            "workers": [_worker(state, names) for state in workers],
            "backlog": _backlog([(job, left) for job, left in found if tenant in (None, job.tenant)], more),
            "models": sorted(entry.pin.name for entry in entries),
        }

    def _look(self) -> None:
        jobs: dict[str, Job] = {}
        found: list[tuple[Job, int]] = []
        more = False
        for ledger in open_jobs(self._world.store):
            if len(found) == _MOST_JOBS:
                more = True
                break
            try:
                job = jobs[ledger.prefix] = self._jobs.get(ledger.prefix) or ledger.job()
                progress = ledger.progress()
            except (JobNotFound, LedgerError):  # damaged, or just removed: whoever asks for that job is told
                continue
            left = None if progress is None else progress.tokens_left
            found.append((job, job.input.size // BYTES_PER_TOKEN if left is None else left))
        self._workers, self._entries = self._heartbeats.workers(), self._catalog.entries()
        self._jobs, self._open, self._more = jobs, found, more


def _worker(state: WorkerState, names: dict[str, str]) -> dict[str, Any]:
    return {
        "name": state.name,
        "models": sorted(names.get(key, key) for key in state.models),
        "shards": len(state.held),
        "waiting_tokens": state.waiting_tokens,
        "tokens_per_second": state.tokens_per_second,
        "draining": state.draining,
    }


def _backlog(found: list[tuple[Job, int]], more: bool) -> dict[str, Any]:
    jobs: Counter[tuple[str | None, str]] = Counter()
    tokens: Counter[tuple[str | None, str]] = Counter()
    for job, left in found:
        kind = (job.models[0].name if len(job.models) == 1 else None, job.tier.value)
        jobs[kind] += 1
        tokens[kind] += left
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
