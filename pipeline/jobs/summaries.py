"""Finding and summarizing the jobs in a store: an output folder is one job, a root holds many under `jobs/`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from pipeline.jobs.manifest import PartTotals
from pipeline.ledger.active_index import open_jobs
from pipeline.ledger.ledger import JOB, JOBS, JobLedger, JobNotFound, LedgerError
from pipeline.ports import ObjectStore, PipelineError
from pipeline.results.part_files import read_part
from schemas.jobs.job import Job
from schemas.jobs.outcome import Counts, JobStatus, Manifest, Usage
from schemas.jobs.plan import PlanSegment
from schemas.jobs.progress import Progress


@dataclass(frozen=True, slots=True)
class JobSummary:
    """One line of a listing.

    Attributes:
        location: of the job.  id: its name in its root, even when `job` can't be read.
        problem: why the job can't be read; the rest is then empty.
        counts, usage: of the committed parts, as of `as_of`.
        cost: of the committed parts; None: not known.
        shards_done, shards_total: parts that hold computed rows.
        attention: why the job is blocked until it is repaired by hand; None: it is not known to be blocked.
        eta: its dispatcher's latest estimate of when it is done.
        results_removed_at: when the results were removed, if they were.
    """

    id: str
    location: str
    problem: str | None = None
    job: Job | None = None
    status: JobStatus | None = None
    counts: Counts | None = None
    usage: Usage | None = None
    cost: float | None = None
    shards_done: int = 0
    shards_total: int = 0
    manifest: Manifest | None = None
    as_of: datetime | None = None
    eta: datetime | None = None
    attention: str | None = None
    results_removed_at: datetime | None = None


def find_ledgers(store: ObjectStore) -> Iterator[JobLedger]:
    """The store's only job when it is an output folder, else the jobs below `jobs/`, the newest first (ids sort so)."""
    if store.info(JOB) is not None:
        yield JobLedger(store)
        return
    for prefix in store.folders(JOBS):
        yield JobLedger(store, prefix)


def find_ledger(store: ObjectStore, job: str | None = None) -> JobLedger:
    """The ledger of job `job`, or of the store's only job. Raises `JobNotFound`."""
    found = None
    for ledger in find_ledgers(store):
        if job is None:
            if found is not None:
                raise JobNotFound(f"{store.locate('')}: holds several jobs; name one (`jobs list` shows them)")
            found = ledger
        elif ledger.name == job or (not ledger.in_root and ledger.job().id == job):
            return ledger
    if found is None:
        what = "no job" if job is None else f"no job {job}"
        raise JobNotFound(f"{store.locate('')}: holds {what}; name an output folder, or a root with jobs/")
    return found


def list_jobs(store: ObjectStore, *, active: bool = False) -> Iterator[JobSummary]:
    """A summary of each job, the newest first. A job that can't be read is listed with its problem.

    Args:
        active: only jobs that have not ended; in a root, the others aren't read.
    """
    return map(summarize_for_listing, open_jobs(store) if active else find_ledgers(store))


def summarize_for_listing(ledger: JobLedger) -> JobSummary:
    """The summary of a job for listings: from cached progress if there is some, with the problem if it can't be
    read."""
    try:
        return summarize_job(ledger, exact=False)
    except PipelineError as error:
        return JobSummary(id=ledger.name, location=ledger.location(), problem=str(error))


def summarize_job(ledger: JobLedger, *, exact: bool = True) -> JobSummary:
    """The summary of a job: from its outcome, or from its parts.

    Args:
        exact: read the footers of all parts; else use cached progress if there is some.

    Raises:
        JobNotFound: there is no job.  LedgerError: it can't be read.
    """
    job, manifest = ledger.job(), ledger.manifest()
    if manifest is not None:
        done = sum(file.rows > 0 for file in manifest.files[1:])
        tombstone = ledger.tombstone()
        return JobSummary(
            job.id, ledger.location(), job=job, status=manifest.status, counts=manifest.counts, usage=manifest.usage,
            cost=manifest.cost, shards_done=done, shards_total=done, manifest=manifest, as_of=manifest.finished_at,
            results_removed_at=None if tombstone is None else tombstone.at,
        )  # fmt: skip
    cached = ledger.progress()
    if cached is not None and cached.job != job.id:
        cached = None
    try:
        status = ledger.status()
    except LedgerError:
        if cached is None or cached.attention is None:
            raise
        return _summarize_cached(ledger, job, cached.status, cached)
    if status.ended:  # the job has ended since its manifest was read
        return summarize_job(ledger, exact=exact)
    if cached is not None and not exact:
        return _summarize_cached(ledger, job, status, cached)
    segments = list(ledger.segments())
    shards = {shard.number for segment in segments for shard in segment.shards}
    planned = {number for segment in segments for number in segment.parts}
    parts = [number for number, _ in ledger.parts() if number in planned]
    tally = PartTotals(read_part(ledger, number) for number in parts)
    return JobSummary(
        job.id,
        ledger.location(),
        job=job,
        status=status,
        counts=tally.counts(_total(segments)),
        usage=tally.usage(),
        cost=None if cached is None else cached.cost,
        shards_done=sum(number in shards for number in parts),
        shards_total=len(shards),
        eta=None if cached is None else cached.eta,
        attention=None if cached is None else cached.attention,
    )


def _summarize_cached(ledger: JobLedger, job: Job, status: JobStatus, cached: Progress) -> JobSummary:
    return JobSummary(
        job.id, ledger.location(), job=job, status=status, counts=cached.counts, usage=cached.usage, cost=cached.cost,
        shards_done=cached.shards_done, shards_total=cached.shards_total, as_of=cached.as_of, eta=cached.eta,
        attention=cached.attention,
    )  # fmt: skip


def _total(segments: list[PlanSegment]) -> int | None:
    """Planned rows of the job; None when no segment is planned."""
    return sum(segment.total for segment in segments) if segments else None
