"""Serialization of a job as OpenAI's batch object, for every interface that shows a job."""

from __future__ import annotations

from datetime import datetime

from pipeline.jobs.cost import per_million
from pipeline.jobs.summaries import JobSummary, summarize_job
from pipeline.ledger.ledger import RESULTS, JobLedger
from schemas.jobs.batch import (
    Batch,
    BatchErrors,
    BatchExtension,
    BatchUsage,
    CachedTokens,
    RequestCounts,
    ShardProgress,
    unix_time,
)
from schemas.jobs.job import Closing, Job
from schemas.jobs.outcome import Counts, JobStatus, Manifest, Usage

_ENDED_AT = {
    JobStatus.COMPLETED: "completed_at",
    JobStatus.FAILED: "failed_at",
    JobStatus.EXPIRED: "expired_at",
    JobStatus.CANCELLED: "cancelled_at",
}


def serialize_job(ledger: JobLedger, summary: JobSummary | None = None) -> Batch:
    """The job's current state, without the fields that only batches over HTTP have.

    Args:
        summary: of the job; None: it is read, from cached progress where there is some.

    Raises:
        JobNotFound: there is no job.  LedgerError: it can't be read.
    """
    summary = summary or summarize_job(ledger, exact=False)
    job, manifest = summary.job or ledger.job(), summary.manifest
    progress = None if manifest is not None else ledger.progress()
    counts, usage = summary.counts or Counts(), summary.usage or Usage()
    status = summary.status or JobStatus.VALIDATING
    tokens = usage.prompt + usage.completion
    batch = Batch(
        id=ledger.name or job.id,
        status=status,
        endpoint=job.settings.url,
        model=job.only_model,
        created_at=int(job.created_at.timestamp()),
        in_progress_at=unix_time(progress.started_at if progress is not None else None),
        expires_at=unix_time(job.deadline),
        # Failed, expired and cancelled rows are all in OpenAI's error file.
        request_counts=RequestCounts(
            total=counts.total,
            completed=counts.succeeded,
            failed=counts.failed + counts.expired + counts.cancelled,
        ),
        usage=BatchUsage(
            input_tokens=usage.prompt,
            input_tokens_details=CachedTokens(cached_tokens=usage.cached),
            output_tokens=usage.completion,
            total_tokens=tokens,
        ),
        errors=None if manifest is None or not manifest.errors else BatchErrors(data=list(manifest.errors)),
        metadata=dict(job.metadata),
        tokenmill=BatchExtension(
            tier=job.tier,
            deadline=job.deadline,
            counts=counts,
            progress=ShardProgress(shards_done=summary.shards_done, shards_total=summary.shards_total),
            attention=summary.attention,
            as_of=summary.as_of,
            eta=summary.eta,
            cost=summary.cost,
            max_cost=job.max_cost,
            cost_per_million_tokens=per_million(summary.cost, tokens),
            repeated_tokens=usage.repeated,
            results=ledger.location(RESULTS),
            results_expire_at=_expiry(job, manifest),
            results_removed_at=summary.results_removed_at,
            retry_of=job.retry_of,
        ),
    )
    return batch.model_copy(update=_ends(status, manifest, ledger.closing()))


def _expiry(job: Job, manifest: Manifest | None) -> datetime | None:
    """When the results expire, if the job itself sets a retention; the installation's retention is not included."""
    if manifest is None or job.output_expires_after is None:
        return None
    return manifest.finished_at + job.output_expires_after


def _ends(status: JobStatus, manifest: Manifest | None, closing: Closing | None) -> dict[str, int | None]:
    ends: dict[str, int | None] = {}
    if closing is not None and closing.kind != "expire":
        ends["cancelling_at"] = unix_time(closing.at)
    if manifest is not None:
        ends[_ENDED_AT[status]] = unix_time(manifest.finished_at)
    return ends
