"""Closing a job before its time: cancelled by its user, expired at its deadline, or stopped at its spending limit.

A closing is one object, created if absent; the first one counts. From then on no shard is handed out. Each missing part
is built from the finished rows that the shard's attempts logged; every other row ends with an error that gives the
reason. The closer competes for the part's key like any worker: the first to commit wins, and each row has one result.
So a job's final status follows from its parts alone: a job without closed rows is completed, however late the closing
came.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.jobs.lost_shards import read_or_recover_table
from pipeline.ledger.ledger import JobLedger
from pipeline.ledger.records import ShardReport
from pipeline.ports import World
from pipeline.results.part_builder import PartMaker, commit_part
from pipeline.results.shard_history import read_history
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.job import Closing, Job
from schemas.jobs.outcome import Counts, JobStatus, Usage
from schemas.jobs.plan import PlanSegment, ShardRef
from schemas.jobs.results import ResultRow
from schemas.requests.errors import RowError, RowErrorCode

CLOSER: Final = "closer"

_REASONS: Final[dict[str, tuple[RowErrorCode, str]]] = {
    "cancel": (
        RowErrorCode.BATCH_CANCELLED,
        "the job was cancelled before this row was answered; retry the job to have it answered",
    ),
    "expire": (
        RowErrorCode.BATCH_EXPIRED,
        "the job's deadline passed before this row was answered; retry the job with more time to have it answered",
    ),
    "spend": (
        RowErrorCode.SPEND_LIMIT,
        "the job's spending limit was reached before this row was answered; retry the job with a higher one to have it "
        "answered",
    ),
}
Ending = Literal[JobStatus.COMPLETED, JobStatus.EXPIRED, JobStatus.CANCELLED]


def find_closing(ledger: JobLedger, job: Job, now: datetime) -> Closing | None:
    """The job's closing, if there is one. At the job's deadline one is created, which counts unless another was
    first."""
    closing = ledger.closing()
    if closing is None and job.deadline is not None and now >= job.deadline:
        ledger.create_closing(Closing(kind="expire", at=now))
        closing = ledger.closing()
    return closing


def close_shard(
    ledger: JobLedger, job: Job, segment: PlanSegment, shard: ShardRef, closing: Closing, world: World
) -> bool:
    """Build the shard's part from its attempts' finished rows, and close its other rows; False when a part exists
    already.

    Raises:
        RowsUnknown: the shard's rows can't be determined.  StoreError: the part can't be written.
    """
    code, reason = _REASONS[closing.kind]
    why = RowError(code, reason if closing.reason is None else f"{reason} ({closing.reason})")
    return end_shard(ledger, job, segment, shard, why, world)


def give_up_shard(
    ledger: JobLedger, job: Job, segment: PlanSegment, shard: ShardRef, reason: str, world: World
) -> bool:
    """Build the part of a shard that no attempt could continue with: its finished rows, and failed rows with the
    reason. Raises as `close_shard`."""
    message = f"the row's shard could not be computed by any attempt: {reason}; retry the job to have the row answered"
    return end_shard(ledger, job, segment, shard, RowError(RowErrorCode.ENGINE_ERROR, message), world)


def end_shard(
    ledger: JobLedger, job: Job, segment: PlanSegment, shard: ShardRef, error: RowError, world: World
) -> bool:
    """Build the shard's part from its attempts' finished rows; all other rows end with `error`. Raises as
    `close_shard`.

    Args:
        segment: the plan segment that contains the shard.
    """
    now = world.clock.now()
    history = read_history(ledger, shard.number)
    table = read_or_recover_table(ledger, segment, shard, history.finished)
    done = history.finished_rows
    requested = zip(*(table[name].to_pylist() for name in ("row", "custom_id", "model")), strict=True)
    unfinished = [
        ResultRow.from_error(row, custom_id, error, model=model, created_at=job.created_at, finished_at=now)
        for row, custom_id, model in requested
        if row not in done
    ]
    rows = pa.concat_tables([history.finished, FinishedRows(unfinished, [Usage()] * len(unfinished)).table()])
    # The engine's start and end times come from the finished rows: no other record has them.
    began, ended = pc.min(history.finished["started_at"]).as_py(), pc.max(history.finished["finished_at"]).as_py()
    maker = PartMaker(
        attempt=max(1, len(history.attempts)),
        attempt_id=world.random.token(8).hex(),
        worker=CLOSER,
        started_at=now,
        report=ShardReport(
            engine_started_at=began if ended is not None else None,
            engine_finished_at=ended if began is not None else None,
        ),
    )
    won = commit_part(ledger, world, job.id, shard.number, table, rows, history, maker)
    if won:
        for keys in history.keys.values():
            for key in keys:
                ledger.store.delete(ledger.prefix + key)
    return won


def status_while(closing: Closing) -> JobStatus:
    """The status of a job that is being closed and has no outcome yet, by the kind of its closing."""
    return JobStatus.FINALIZING if closing.kind == "expire" else JobStatus.CANCELLING


def ending(counts: Counts) -> Ending:
    """The final status of a job, from the row counts of all of its parts."""
    if counts.cancelled:
        return JobStatus.CANCELLED
    return JobStatus.EXPIRED if counts.expired else JobStatus.COMPLETED
