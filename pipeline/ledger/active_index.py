"""Index of a root's open jobs: one marker `active/ID` for each, so that no reader scans all jobs that ever ran.

The marker is created before its job and removed last, after the job has ended. So an open job has a marker whatever
interruption happened, while a marker without an open job is merely stale: readers skip it, and `sweep` removes it. An
output folder that holds one job has no marker. The marker `close/ID` works the same way for a job that may be about to
end before its time.
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
    """Repairs of a sweep: open jobs that it marked, and stale markers that it removed."""

    marked: int = 0
    removed: int = 0


def mark(ledger: JobLedger) -> bool:
    """Create the job's marker durably; False when it existed already, or when the job needs none."""
    return ledger.in_root and ledger.store.create(ACTIVE + ledger.name, b"")


def delete_markers(ledger: JobLedger) -> None:
    """Delete the job's markers, if it has any."""
    if ledger.in_root:
        ledger.store.delete(CLOSE + ledger.name)
        ledger.store.delete(ACTIVE + ledger.name)


def clean_up(ledger: JobLedger) -> None:
    """Delete the working objects of a job whose manifest is durable: first the attempts' objects, then the marker.
    After an interruption the marker still refers to the job; the clean-up can be repeated."""
    ledger.clear_work()
    delete_markers(ledger)


def open_jobs(store: ObjectStore) -> Iterator[JobLedger]:
    """Jobs without an outcome, the newest first. In a root, only marked jobs are read."""
    marked = iter([JobLedger(store)]) if store.info(JOB) is not None else marked_jobs(store)
    return (ledger for ledger in marked if is_open(ledger))


def jobs_to_close(store: ObjectStore) -> set[str]:
    """Names of the root's jobs that may have a closing. Every job with a closing and without an outcome is included."""
    return {info.key.removeprefix(CLOSE) for info in store.list(CLOSE)}


def sweep(store: ObjectStore) -> SweepResult:
    """Mark every open job and delete every stale marker. Reads all jobs that ever ran: slow, and rarely needed.

    A job that is being created at this moment keeps its marker: its ingest source and the sweep both check again, and
    the later of the two creates the marker.
    """
    marked = removed = 0
    for prefix in store.folders(JOBS):
        ledger = JobLedger(store, prefix)
        if is_open(ledger):
            marked += mark(ledger)
    for name in jobs_to_close(store):
        if not is_open(JobLedger(store, f"{JOBS}{name}/")):  # the job ended just when it was to be closed
            store.delete(CLOSE + name)
    for ledger in marked_jobs(store):
        if is_open(ledger):
            continue
        if _is_durable(ledger, MANIFEST):
            clean_up(ledger)
        else:
            delete_markers(ledger)
            if _is_durable(ledger, JOB):  # the job has just been created
                mark(ledger)
                continue
        removed += 1
    return SweepResult(marked, removed)


def marked_jobs(store: ObjectStore) -> Iterator[JobLedger]:
    """Jobs of a root that have a marker, the newest first. Some may have ended."""
    return (JobLedger(store, f"{JOBS}{info.key.removeprefix(ACTIVE)}/") for info in store.list(ACTIVE))


def is_open(ledger: JobLedger) -> bool:
    """Whether the job exists and has no outcome. It checks that two objects exist and reads neither: a damaged job is
    open too until it has an outcome."""
    info = ledger.store.info
    return info(ledger.prefix + MANIFEST) is None and info(ledger.prefix + JOB) is not None


def _is_durable(ledger: JobLedger, key: str) -> bool:
    """Whether the object exists durably. It is opened, not only listed: objects that are deleted because of it must not
    go before it is durable."""
    try:
        ledger.store.open(ledger.prefix + key).close()
    except ObjectNotFound:
        return False
    return True
