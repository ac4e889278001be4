"""The open jobs of a root and their remaining tokens, for status reports and autoscaling.

Estimated, and some seconds old. Orders never change, so each is read once; what changes is a small object for each job.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from pipeline.ledger.active_index import is_open, marked_jobs
from pipeline.ledger.ledger import JOB, JobLedger, JobNotFound, LedgerError
from pipeline.ports import ObjectStore
from pipeline.runtime.inline_executor import InlineExecutor
from pipeline.scaling.tenant_backlog import BYTES_PER_TOKEN
from schemas.jobs.job import Job
from schemas.jobs.outcome import JobStatus

MAX_JOBS: Final = 1_000
"""Maximum number of open jobs in a status report, the newest first; `OpenJobs.more` says that there are others."""

PAGE_JOBS: Final = 256
"""Open jobs that are read concurrently."""


class OpenJobSummary(NamedTuple):
    """A job (without the lists of its files and rows, which may be long), its status, and its remaining tokens."""

    job: Job
    status: JobStatus
    left: int


@dataclass(frozen=True, slots=True)
class OpenJobs:
    """The open jobs of one read.

    Attributes:
        jobs: the newest first.  more: there are further jobs.
    """

    jobs: list[OpenJobSummary]
    more: bool


class OpenJobsIndex:
    """Looks at the jobs of the root that `store` is. Not for threads.

    Args:
        max_jobs: that a look reads, the newest; None: all that are open. A few kilobytes of memory for each.
        executor: reads the jobs of a page, where that saves time; None: one after the other.
    """

    def __init__(self, store: ObjectStore, max_jobs: int | None = MAX_JOBS, executor: Executor | None = None) -> None:
        self._store = store
        self._max_jobs = max_jobs
        self._executor = executor or InlineExecutor()
        self._jobs: dict[str, Job] = {}  # by prefix: their orders never change

    def read(self) -> OpenJobs:
        """The open jobs, the newest first. Raises `PipelineError` when the store can't be read."""
        wanted = None if self._max_jobs is None else self._max_jobs + 1
        found = list(islice(self._open(), wanted))
        more = self._max_jobs is not None and len(found) > self._max_jobs
        newest = found[: self._max_jobs]
        self._jobs = {ledger.prefix: one.job for ledger, one in newest}
        return OpenJobs([one for _, one in newest], more)

    def _open(self) -> Iterator[tuple[JobLedger, OpenJobSummary]]:
        alone = self._store.info(JOB) is not None
        marked = iter([JobLedger(self._store)]) if alone else marked_jobs(self._store)
        while page := list(islice(marked, PAGE_JOBS)):
            for ledger, one in zip(page, self._executor.map(self._read, page), strict=True):
                if one is not None:
                    yield ledger, one

    def _read(self, ledger: JobLedger) -> OpenJobSummary | None:
        """Read one job; None: it has ended, is damaged, or was just removed. A request for that job reports the
        error."""
        try:
            if not is_open(ledger):
                return None
            known = self._jobs.get(ledger.prefix)
            job = _without_lists(ledger.job()) if known is None else known
            progress = ledger.progress()
        except (JobNotFound, LedgerError):
            return None
        left = None if progress is None else progress.tokens_left
        status = JobStatus.VALIDATING if progress is None else progress.status
        return OpenJobSummary(job, status, job.input.size // BYTES_PER_TOKEN if left is None else left)


def _without_lists(job: Job) -> Job:
    """The order without its lists of files and rows: one file represents all, with the total size."""
    whole = job.input.files[0].model_copy(update={"size": job.input.size})
    source = job.input.model_copy(update={"files": (whole,)})
    return job.model_copy(update={"input": source, "settings": job.settings.model_copy(update={"rows": None})})
