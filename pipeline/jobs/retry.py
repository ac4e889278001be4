"""Retry of an ended job: selection of the rows, and the job that answers them.

A row that expired, was cancelled, or failed may succeed the next time. A row that was refused for the content of its
line will be refused again: it is left out, unless requested. Refusals that also depend on the model are retried when
another model answers.

In a root a retry is a job of its own in the same root, for the root's workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Final

import numpy as np
import pyarrow.parquet as pq

from pipeline.jobs.submit import JobOrder, SubmittedJob, derived_job_id, submit
from pipeline.ledger.active_index import mark
from pipeline.ledger.ledger import JOBS, JobLedger, part_key
from pipeline.ports import PipelineError, World
from schemas.jobs.job import Job, JobSettings, Tier
from schemas.jobs.outcome import JobStatus, Manifest
from schemas.jobs.results import RowStatus
from schemas.jobs.row_selection import RowSelection
from schemas.requests.errors import RowErrorCode

RETRIED: Final = frozenset({RowStatus.FAILED, RowStatus.EXPIRED, RowStatus.CANCELLED})

LINE_REFUSALS: Final = frozenset(
    {
        RowErrorCode.INVALID_JSON,
        RowErrorCode.INVALID_REQUEST,
        RowErrorCode.DUPLICATE_CUSTOM_ID,
        RowErrorCode.UNSUPPORTED_URL,
        RowErrorCode.UNSUPPORTED_PARAMETER,
    }
)
"""Errors that depend on the line alone: the same line is refused again."""

MODEL_REFUSALS: Final = frozenset(
    {RowErrorCode.CONTEXT_LENGTH_EXCEEDED, RowErrorCode.MODEL_NOT_FOUND, RowErrorCode.CONTENT_FILTER}
)
"""Errors that depend on the line and the model: the same model refuses the line again."""

_BATCH_ROWS = 65_536


class NothingToRetry(PipelineError):
    """Raised when a job has not ended, or has no rows to retry."""


@dataclass(frozen=True, slots=True)
class RetryOverrides:
    """Options of a retry that override the first job's. None: as in the first job; for the deadline: none."""

    tier: Tier | None = None
    deadline: timedelta | None = None
    max_output_tokens: int | None = None
    max_cost: float | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """The rows of a job to retry.

    Attributes:
        job: the first job.  rows: the selected rows of its input; None: all its rows, because none was planned.
        left_out: number of rows that would be refused again, by error code.
    """

    job: Job
    rows: RowSelection | None
    left_out: dict[str, int]

    @property
    def count(self) -> int | None:
        """Number of selected rows; None: all."""
        return None if self.rows is None else self.rows.count


def choose_rows(
    ledger: JobLedger,
    only: Collection[RowStatus] = RETRIED,
    *,
    include_invalid: bool = False,
    other_model: bool = False,
) -> Retry:
    """Select the rows of an ended job to retry. Memory is a byte for each row of the input.

    Args:
        only: select rows of these statuses.
        include_invalid: select rows that are refused for their content, too.
        other_model: another model than the first job's will answer.

    Raises:
        NothingToRetry: the job has not ended, was refused as a whole, or has no such row.
        ResultsRemoved: its results, which hold the rows' statuses, are removed.
    """
    job, manifest = ledger.job(), ledger.manifest()
    if manifest is None:
        raise NothingToRetry(
            f"{ledger.location()}: the job has not ended; the command that began it goes on, 'jobs cancel' ends it"
        )
    if manifest.status is JobStatus.FAILED:
        raise NothingToRetry(f"{ledger.location()}: the job was refused as a whole; correct its input and run it")
    if manifest.ended_by is not None and not manifest.counts.total:
        status = RowStatus.EXPIRED if manifest.status is JobStatus.EXPIRED else RowStatus.CANCELLED
        if status not in only:
            raise NothingToRetry(f"{ledger.location()}: no row is worth another try: all of them are {status.value}")
        return Retry(job, None, {})
    ledger.check_results()
    refused = LINE_REFUSALS if other_model else LINE_REFUSALS | MODEL_REFUSALS
    chosen = np.zeros(0, dtype=np.bool_)
    left_out: Counter[str] = Counter()
    for number, _ in ledger.parts():
        with ledger.store.open(ledger.prefix + part_key(number)) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(_BATCH_ROWS, columns=["row", "status", "error_code"]):
                rows = []
                for row, status, code in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    if status not in only:
                        continue
                    if code in refused and not include_invalid:
                        left_out[code] += 1
                    else:
                        rows.append(row)
                if rows:
                    if (end := max(rows) + 1) > len(chosen):
                        chosen = np.concatenate([chosen, np.zeros(end - len(chosen), dtype=np.bool_)])
                    chosen[rows] = True
    selection = RowSelection.of(chosen)
    if selection is None:
        why = ", ".join(f"{number} {code}" for code, number in sorted(left_out.items()))
        raise NothingToRetry(
            f"{ledger.location()}: no row is worth another try"
            + (f" ({why}: refused for what they are; --include-invalid tries them all the same)" if why else "")
        )
    return Retry(job, selection, dict(left_out))


def retried_settings(first: Retry, max_output_tokens: int | None) -> JobSettings:
    """The first job's settings, for the selected rows."""
    settings = first.job.settings
    if first.rows is not None:
        settings = settings.model_copy(update={"rows": first.rows})
    if max_output_tokens is None:
        return settings
    default = min(settings.default_max_tokens, max_output_tokens)
    return settings.model_copy(update={"default_max_tokens": default, "max_output_tokens": max_output_tokens})


def retry_spending_limit(job: Job, overrides: RetryOverrides) -> float | None:
    """The spending limit of the retry alone: the first job's, unless overridden."""
    return job.max_cost if overrides.max_cost is None else overrides.max_cost


def submit_retry(
    first: Retry,
    ended: Manifest,
    overrides: RetryOverrides,
    world: World,
    before: Callable[[str], None] = lambda _: None,
) -> SubmittedJob:
    """The retry as a job in the first one's root, `world.store`: created now, or by the same call before.

    Its id is derived from the first job and from the options. So the same call twice, even concurrently, gives one job;
    a second job is created only if the first retry failed as a whole (its input was missing).

    Args:
        ended: the outcome of the first job.
        before: called with the retry's id before it is created.

    Raises:
        PipelineError: it can't be created now; try again.
    """
    job, settings = first.job, retried_settings(first, overrides.max_output_tokens)
    options = [
        "" if first.rows is None else first.rows.bitmap,
        str(overrides.tier),
        str(overrides.deadline),
        str(overrides.max_output_tokens),
    ]
    if overrides.max_cost is not None:
        options.append(f"max_cost {overrides.max_cost}")
    for number in count():
        job_id = derived_job_id(ended.finished_at, "retry", job.id, *options, str(number))
        ledger = JobLedger(world.store, f"{JOBS}{job_id}/")
        standing = ledger.find_job()
        if standing is None:
            break
        manifest = ledger.manifest()
        if manifest is None:
            mark(ledger)  # its creation may have been interrupted before the marker
        if manifest is None or manifest.status is not JobStatus.FAILED:
            return SubmittedJob(standing, created=False)
    order = JobOrder(
        input=job.input, models=job.models, settings=settings, tenant=job.tenant, tier=overrides.tier or job.tier,
        deadline=overrides.deadline, max_cost=retry_spending_limit(job, overrides),
        output_expires_after=job.output_expires_after, cache=job.cache, retry_of=job.id, metadata=job.metadata,
    )  # fmt: skip
    before(job_id)
    return submit(order, ledger, world, job_id=job_id)
