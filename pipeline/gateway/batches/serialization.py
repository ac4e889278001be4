"""Serialization of jobs as OpenAI batch objects: the common job document, and the fields that only HTTP batches
have."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from pipeline.gateway.records import BATCHES, BatchOrder, BatchOutcome, seconds
from pipeline.jobs.serialization import job_document
from pipeline.ledger.ledger import REJECTS, JobLedger, SomeRecord, parse_stored
from pipeline.ports import ObjectNotFound, ObjectStore
from pipeline.results.parts import read_part
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


def batch_document(ledger: JobLedger) -> dict[str, Any]:
    """The batch object, of plain JSON types. A job that wasn't submitted over HTTP has no files.

    Raises:
        JobNotFound: there is no such job.  LedgerError: its records can't be read.
    """
    store, job = ledger.store, ledger.job()
    order, outcome = find_order(store, job.id), find_outcome(store, job.id)
    document = job_document(ledger)
    manifest = ledger.manifest()
    if order is not None and outcome is None and manifest is not None:
        # It has ended since the outcome was read: the files are known only after the next read.
        document = _unfinished(document, manifest)
    document["in_progress_at"] = seconds(work_began(ledger) if outcome is None else outcome.in_progress_at)
    document |= _finalizing(document, ledger, manifest, order, outcome)
    document["usage"] |= {"output_tokens_details": {"reasoning_tokens": 0}}
    return document | {
        "endpoint": order.endpoint if order is not None else job.settings.url,
        "input_file_id": None if order is None else order.input_file_id,
        "completion_window": None if order is None else order.completion_window,
        "output_file_id": None if outcome is None else outcome.output_file_id,
        "error_file_id": None if outcome is None else outcome.error_file_id,
        "model": job.models[0].name if len(job.models) == 1 else None,
    }


def work_began(ledger: JobLedger) -> datetime | None:
    """When the plan's first segment was committed, so that work could begin. It is read from that segment's part, so it
    doesn't change."""
    if not ledger.has_part(REJECTS):
        return None
    try:
        return read_part(ledger, REJECTS).summary.committed_at
    except ObjectNotFound:  # results have just been removed
        return None


def _unfinished(document: dict[str, Any], manifest: Manifest) -> dict[str, Any]:
    """The document of a batch whose rows have all ended, and whose files aren't committed yet."""
    if manifest.status is JobStatus.FAILED:  # a failed batch has no files
        return document
    cancelled = manifest.status is JobStatus.CANCELLED
    status = JobStatus.CANCELLING if cancelled else JobStatus.FINALIZING
    return document | {"status": status.value} | dict.fromkeys(_ENDS.values())


def _finalizing(
    document: dict[str, Any],
    ledger: JobLedger,
    manifest: Manifest | None,
    order: BatchOrder | None,
    outcome: BatchOutcome | None,
) -> dict[str, Any]:
    """The fields of the batch's end: status and timestamps."""
    closing = ledger.closing()
    if manifest is None:
        if document["status"] != JobStatus.FINALIZING:
            return {"finalizing_at": None}
        if closing is None:  # all parts are committed; the manifest is about to be written
            return {"status": JobStatus.IN_PROGRESS.value, "finalizing_at": None}
        return {"finalizing_at": seconds(closing.at)}
    if manifest.status not in _OF_FINALIZING:
        found: dict[str, Any] = {"finalizing_at": None}
    else:
        expired = manifest.status is JobStatus.EXPIRED and closing is not None
        found = {"finalizing_at": seconds(closing.at if expired and closing else manifest.finished_at)}
    if order is not None and outcome is not None and manifest.status in _ENDS:
        found[_ENDS[manifest.status]] = seconds(outcome.at)
    return found


def _find(store: ObjectStore, key: str, kind: type[SomeRecord]) -> SomeRecord | None:
    try:
        data = store.read(key)
    except ObjectNotFound:
        return None
    return parse_stored(store.locate(key), data, kind)
