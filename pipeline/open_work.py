"""The open jobs of a root, and what is left of each: for whoever tells how an installation stands.

Estimated, and some seconds old. Orders never change, so each is read once; what changes is a small object for each job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pipeline.active import open_jobs
from pipeline.backlog import BYTES_PER_TOKEN
from pipeline.ledger import JobNotFound, LedgerError
from pipeline.ports import ObjectStore
from schemas.job import Job
from schemas.outcome import JobStatus

MOST_JOBS: Final = 1_000
"""Open jobs that a look reads, the newest; then more is open than it tells."""


class OpenJob(NamedTuple):
    """A job, how it stands, and how many tokens are left to be computed for it."""

    job: Job
    status: JobStatus
    left: int


@dataclass(frozen=True, slots=True)
class OpenJobs:
    """What one look has found.

    Attributes:
        jobs: the newest first.  more: there are further jobs.
    """

    jobs: list[OpenJob]
    more: bool


class OpenWork:
    """Looks at the jobs of the root that `store` is. Not for threads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._jobs: dict[str, Job] = {}  # by prefix: their orders never change

    def look(self) -> OpenJobs:
        """The open jobs, the newest first. Raises `PipelineError` when the store can't be read."""
        jobs: dict[str, Job] = {}
        found: list[OpenJob] = []
        more = False
        for ledger in open_jobs(self._store):
            if len(found) == MOST_JOBS:
                more = True
                break
            try:
                job = jobs[ledger.prefix] = self._jobs.get(ledger.prefix) or ledger.job()
                progress = ledger.progress()
            except (JobNotFound, LedgerError):  # damaged, or just removed: whoever asks for that job is told
                continue
            left = None if progress is None else progress.tokens_left
            status = JobStatus.VALIDATING if progress is None else progress.status
            found.append(OpenJob(job, status, job.input.size // BYTES_PER_TOKEN if left is None else left))
        self._jobs = jobs
        return OpenJobs(found, more)
