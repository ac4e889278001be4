"""A job as a JSON document: OpenAI's batch object, the same for HTTP and for the command line. Fields that OpenAI's
object lacks are under `tokenmill`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pipeline.jobs.cost import per_million
from pipeline.jobs.summaries import summarize_job
from pipeline.ledger.ledger import RESULTS, JobLedger
from schemas.jobs.job import Closing, Job
from schemas.jobs.outcome import Counts, JobStatus, Manifest, Usage

_ENDED_AT = {
    JobStatus.COMPLETED: "completed_at",
    JobStatus.FAILED: "failed_at",
    JobStatus.EXPIRED: "expired_at",
    JobStatus.CANCELLED: "cancelled_at",
}


def job_document(ledger: JobLedger) -> dict[str, Any]:
    """The job's current state, in JSON's own types. Times are whole seconds since 1970, as OpenAI's are; a field that
    is not known, or has not happened, is None.

    Raises:
        JobNotFound: there is no job.  LedgerError: it can't be read.
    """
    summary = summarize_job(ledger, exact=False)
    job, manifest = ledger.job(), summary.manifest
    closing = ledger.closing()
    progress = None if manifest is not None else ledger.progress()
    counts, usage = summary.counts or Counts(), summary.usage or Usage()
    status = summary.status or JobStatus.VALIDATING
    return {
        "id": ledger.name or job.id,
        "object": "batch",
        "status": status.value,
        "created_at": _seconds(job.created_at),
        "in_progress_at": _seconds(progress.started_at if progress is not None else None),
        "expires_at": _seconds(job.deadline),
        **_ends(status, manifest, closing),
        # Failed, expired and cancelled rows are all in OpenAI's error file.
        "request_counts": {
            "total": counts.total,
            "completed": counts.succeeded,
            "failed": counts.failed + counts.expired + counts.cancelled,
        },
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
        },
        "errors": _errors(manifest),
        "metadata": dict(job.metadata),
        "tokenmill": {
            "tier": job.tier.value,
            "deadline": None if job.deadline is None else job.deadline.isoformat(),
            "counts": counts.model_dump(),
            "progress": {"shards_done": summary.shards_done, "shards_total": summary.shards_total},
            "attention": summary.attention,
            "as_of": None if summary.as_of is None else summary.as_of.isoformat(),
            "eta": None if summary.eta is None else summary.eta.isoformat(),
            "cost": summary.cost,
            "max_cost": job.max_cost,
            "cost_per_million_tokens": per_million(summary.cost, usage.prompt + usage.completion),
            "repeated_tokens": usage.repeated,
            "results": ledger.place(RESULTS),
            "results_expire_at": _expiry(job, manifest),
            "results_removed_at": (
                None if summary.results_removed_at is None else summary.results_removed_at.isoformat()
            ),
            "retry_of": job.retry_of,
        },
    }


def _expiry(job: Job, manifest: Manifest | None) -> str | None:
    """When the results expire, if the job itself sets a retention; the installation's retention is not included."""
    if manifest is None or job.output_expires_after is None:
        return None
    return (manifest.finished_at + job.output_expires_after).isoformat()


def _ends(status: JobStatus, manifest: Manifest | None, closing: Closing | None) -> dict[str, int | None]:
    moments: dict[str, int | None] = dict.fromkeys(("cancelling_at", *_ENDED_AT.values()))
    if closing is not None and closing.kind != "expire":
        moments["cancelling_at"] = _seconds(closing.at)
    if manifest is not None:
        moments[_ENDED_AT[status]] = _seconds(manifest.finished_at)
    return moments


def _errors(manifest: Manifest | None) -> dict[str, Any] | None:
    if manifest is None or not manifest.errors:
        return None
    data = [{"code": one.code, "line": one.line, "message": one.message, "param": one.param} for one in manifest.errors]
    return {"object": "list", "data": data}


def _seconds(at: datetime | None) -> int | None:
    return None if at is None else int(at.timestamp())
