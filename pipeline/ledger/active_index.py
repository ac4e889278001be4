"""Which jobs of a root are open: one marker `active/ID` for each, so that nobody reads through all that ever ran.

A marker errs to one side only. It is made before its job, and goes last of all when the job has ended. So an open job
has one whenever it was interrupted, while a marker without an open job is merely stale: readers pass it over, and
`sweep` removes it. An output folder that is one job has none. Likewise with `close/ID`, the marker of a job that may be
about to end before its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pipeline.ledger.ledger import CLOSE, JOB, JOBS, MANIFEST, JobLedger
from pipeline.ports import ObjectNotFound, ObjectStore

ACTIVE: Final = "active/"


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep has mended: open jobs that had no marker, and markers that were stale."""

    marked: int = 0
    removed: int = 0


def mark(ledger: JobLedger) -> bool:
    """Make the job's marker durable; False when it stood already, or when the job needs none."""
    return ledger.in_root and ledger.store.create(ACTIVE + ledger.name, b"")


def unmark(ledger: JobLedger) -> None:
    """Remove the job's markers, if it has any."""
    if ledger.in_root:
        ledger.store.delete(CLOSE + ledger.name)
        ledger.store.delete(ACTIVE + ledger.name)


def tidy(ledger: JobLedger) -> None:
    """Remove what a job needs no more once its manifest stands durably: what attempts left, then its marker. After an
    interruption the marker still tells that there is something to do; to tidy again does no harm."""
    ledger.clear_work()
    unmark(ledger)


def open_jobs(store: ObjectStore) -> Iterator[JobLedger]:
    """Jobs without an outcome, the newest first. Of a root only the marked ones are looked at."""
    marked = iter([JobLedger(store)]) if store.info(JOB) is not None else marked_jobs(store)
    return (ledger for ledger in marked if is_open(ledger))


def jobs_to_close(store: ObjectStore) -> set[str]:
    """Names of the root's jobs that may have a closing; all that have one, and no outcome yet, are among them."""
    return {info.key.removeprefix(CLOSE) for info in store.list(CLOSE)}


def sweep(store: ObjectStore) -> SweepResult:
    """Mark every open job and remove every stale marker. Looks at all jobs that ever were: slow, and rarely needed.

    A job that is being made at this moment keeps its marker: both its door and the sweep look again, and whoever is
    later makes it.
    """
    marked = removed = 0
    for prefix in store.folders(JOBS):
        ledger = JobLedger(store, prefix)
        if is_open(ledger):
            marked += mark(ledger)
    for name in jobs_to_close(store):
        if not is_open(JobLedger(store, f"{JOBS}{name}/")):  # it ended just when it was to be closed
            store.delete(CLOSE + name)
    for ledger in marked_jobs(store):
        if is_open(ledger):
            continue
        if _stands(ledger, MANIFEST):
            tidy(ledger)
        else:
            unmark(ledger)
            if _stands(ledger, JOB):  # it has just been made
                mark(ledger)
                continue
        removed += 1
    return SweepResult(marked, removed)


def marked_jobs(store: ObjectStore) -> Iterator[JobLedger]:
    """Jobs of a root that have a marker, the newest first; some may have ended."""
    return (JobLedger(store, f"{JOBS}{info.key.removeprefix(ACTIVE)}/") for info in store.list(ACTIVE))


def is_open(ledger: JobLedger) -> bool:
    """Two looks, and nothing read: a damaged job is open too until it has an outcome."""
    looked = (ledger.store.info(ledger.prefix + key) for key in (MANIFEST, JOB))
    return next(looked) is None and next(looked) is not None


def _stands(ledger: JobLedger, key: str) -> bool:
    """Whether the object is there to stay. Opened rather than looked at: what is removed because of it must not go
    before it is durable."""
    try:
        ledger.store.open(ledger.prefix + key).close()
    except ObjectNotFound:
        return False
    return True
