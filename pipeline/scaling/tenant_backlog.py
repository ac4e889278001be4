"""The open tokens and jobs of each tenant, for ingest sources that apply backpressure.

Estimated from the open jobs' records, which are read every few seconds. Jobs that this process adds count immediately.
"""

from __future__ import annotations

import threading
from collections import Counter

from pipeline.ledger.active_index import open_jobs
from pipeline.ports import World
from schemas.jobs.job import Job

BYTES_PER_TOKEN = 4
"""Estimated size of a token in input that is not planned yet."""


class TenantBacklog:
    """Open tokens and jobs of the root `world.store`, by tenant. `refresh_interval_seconds`: seconds between two
    reads."""

    def __init__(self, world: World, refresh_interval_seconds: float) -> None:
        self._world = world
        self._refresh_interval_seconds = refresh_interval_seconds
        self._next_refresh = 0.0
        self._tokens: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
        self._jobs: dict[str, Job] = {}  # orders of open jobs, by prefix; they never change
        self._lock = threading.Lock()

    def tokens_of(self, tenant: str) -> int:
        """Estimated tokens of the tenant's open jobs that have no part yet."""
        with self._lock:
            self._refresh_if_due()
            return self._tokens[tenant]

    def jobs_of(self, tenant: str) -> int:
        """Number of the tenant's open jobs."""
        with self._lock:
            self._refresh_if_due()
            return self._open[tenant]

    def added(self, job: Job) -> None:
        """Count a job that this process has accepted since the last read."""
        with self._lock:
            self._tokens[job.tenant] += _unplanned(job)
            self._open[job.tenant] += 1

    def _refresh_if_due(self) -> None:
        if self._world.clock.monotonic() >= self._next_refresh:
            self._refresh()
            self._next_refresh = self._world.clock.monotonic() + self._refresh_interval_seconds

    def _refresh(self) -> None:
        tokens: Counter[str] = Counter()
        count: Counter[str] = Counter()
        jobs: dict[str, Job] = {}
        for ledger in open_jobs(self._world.store):
            job = jobs[ledger.prefix] = self._jobs.get(ledger.prefix) or ledger.job()
            progress = ledger.progress()
            left = None if progress is None else progress.tokens_left
            tokens[job.tenant] += _unplanned(job) if left is None else left
            count[job.tenant] += 1
        self._tokens, self._open, self._jobs = tokens, count, jobs


def _unplanned(job: Job) -> int:
    return job.input.size // BYTES_PER_TOKEN
