"""Serialization of batches: the job, and the fields that only batches over HTTP have."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from pipeline.gateway.records import BATCHES, BatchOrder, BatchOutcome
from pipeline.jobs.serialization import serialize_job
from pipeline.jobs.summaries import JobSummary
from pipeline.ledger.ledger import REJECTS, JobLedger, SomeRecord, parse_stored
from pipeline.ports import ObjectNotFound, ObjectStore
from pipeline.results.part_files import read_part
from schemas.jobs.batch import Batch, unix_time
from schemas.jobs.outcome import JobStatus, Manifest

_ENDS: Final = {
    JobStatus.COMPLETED: "completed_at",
    JobStatus.EXPIRED: "expired_at",
    JobStatus.CANCELLED: "cancelled_at",
}
_OF_FINALIZING: Final = (JobStatus.COMPLETED, JobStatus.EXPIRED)


def find_order(store: ObjectStore, job: str) -> BatchOrder | None:
    """The stored batch request; None for a job that wasn't submitted over HTTP."""
    return _find(store, f"{BATCHES}{job}/order.json", BatchOrder)


def find_outcome(store: ObjectStore, job: str) -> BatchOutcome | None:
    """The outcome of the batch; None before its files are committed."""
    return _find(store, f"{BATCHES}{job}/outcome.json", BatchOutcome)


def serialize_batch(ledger: JobLedger, summary: JobSummary | None = None) -> Batch:
    """The batch object. A job that wasn't submitted over HTTP has no files.

    Args:
        summary: of the job; None: it is read.

    Raises:
        JobNotFound: there is no such job.  LedgerError: its records can't be read.
    """
    store, job = ledger.store, ledger.job()
    order, outcome = find_order(store, job.id), find_outcome(store, job.id)
    batch = serialize_job(ledger, summary)
    manifest = ledger.manifest()
    if order is not None and outcome is None and manifest is not None:
        # It has ended since the outcome was read: the files are known only after the next read.
        batch = _unfinished(batch, manifest)
    return batch.model_copy(
        update={
            "in_progress_at": unix_time(work_began(ledger) if outcome is None else outcome.in_progress_at),
            **_finalizing(batch, ledger, manifest, order, outcome),
            "endpoint": batch.endpoint if order is None else order.endpoint,
            "input_file_id": None if order is None else order.input_file_id,
            "completion_window": None if order is None else order.completion_window,
            "output_file_id": None if outcome is None else outcome.output_file_id,
            "error_file_id": None if outcome is None else outcome.error_file_id,
        }
    )


def work_began(ledger: JobLedger) -> datetime | None:
    """When the plan's first segment was committed, so that work could begin. It is read from that segment's part, so it
    doesn't change."""
    if not ledger.has_part(REJECTS):
        return None
    try:
        return read_part(ledger, REJECTS).summary.committed_at
    except ObjectNotFound:  # results have just been removed
        return None


def _unfinished(batch: Batch, manifest: Manifest) -> Batch:
    """A batch whose rows have all ended, and whose files aren't committed yet."""
    if manifest.status is JobStatus.FAILED:  # a failed batch has no files
        return batch
    cancelled = manifest.status is JobStatus.CANCELLED
    status = JobStatus.CANCELLING if cancelled else JobStatus.FINALIZING
    return batch.model_copy(update={"status": status, **dict.fromkeys(_ENDS.values())})


def _finalizing(
    batch: Batch,
    ledger: JobLedger,
    manifest: Manifest | None,
    order: BatchOrder | None,
    outcome: BatchOutcome | None,
) -> dict[str, Any]:
    """The fields of the batch's end: status and timestamps."""
    closing = ledger.closing()
    if manifest is None:
        if batch.status is not JobStatus.FINALIZING:
            return {"finalizing_at": None}
        if closing is None:  # all parts are committed; the manifest is about to be written
            return {"status": JobStatus.IN_PROGRESS, "finalizing_at": None}
        return {"finalizing_at": unix_time(closing.at)}
    if manifest.status not in _OF_FINALIZING:
        found: dict[str, Any] = {"finalizing_at": None}
    else:
        expired = manifest.status is JobStatus.EXPIRED and closing is not None
        found = {"finalizing_at": unix_time(closing.at if expired and closing else manifest.finished_at)}
    if order is not None and outcome is not None and manifest.status in _ENDS:
        found[_ENDS[manifest.status]] = unix_time(outcome.at)
    return found


def _find(store: ObjectStore, key: str, kind: type[SomeRecord]) -> SomeRecord | None:
    try:
        data = store.read(key)
    except ObjectNotFound:
        return None
    return parse_stored(store.locate(key), data, kind)
