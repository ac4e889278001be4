"""How much is open in a root, by tenant: for doors that hold back when it is too much.

Read from the open jobs' papers every few seconds: an estimate, and never older than that but for what this process has
added itself, which counts at once.
"""

from __future__ import annotations

import threading
from collections import Counter

from pipeline.ledger.active_index import open_jobs
from pipeline.ports import World
from schemas.jobs.job import Job

BYTES_PER_TOKEN = 4
"""Of input that is not planned yet."""


class TenantBacklog:
    """Open tokens of the root that `world.store` is. `look_every`: seconds between two looks."""

    def __init__(self, world: World, look_every: float) -> None:
        self._world = world
        self._look_every = look_every
        self._next_look = 0.0
        self._tokens: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
        self._jobs: dict[str, Job] = {}  # of open jobs, by prefix: their orders never change
        self._lock = threading.Lock()

    def tokens_of(self, tenant: str) -> int:
        """Estimated tokens of the tenant's open jobs that have no part yet."""
        with self._lock:
            self._look_again()
            return self._tokens[tenant]

    def jobs_of(self, tenant: str) -> int:
        """The tenant's open jobs."""
        with self._lock:
            self._look_again()
            return self._open[tenant]

    def added(self, job: Job) -> None:
        """A job was accepted here since the last look."""
        with self._lock:
            self._tokens[job.tenant] += _unplanned(job)
            self._open[job.tenant] += 1

    def _look_again(self) -> None:
        if self._world.clock.monotonic() >= self._next_look:
            self._look()
            self._next_look = self._world.clock.monotonic() + self._look_every

    def _look(self) -> None:
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
