"""Jobs cut by hand, and results for their shards: for tests of what comes after planning."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.jobs.planning import LedgerPlanSink
from pipeline.jobs.submit import JobOrder, submit
from pipeline.ledger.ledger import REJECTS, JobLedger, shard_key
from pipeline.ledger.records import ShardReport
from pipeline.ports import Heartbeats, World, queue_name
from pipeline.worker_client.ports import ShardWork
from schemas.jobs.arrow_schemas import result_schema, shard_schema
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from schemas.jobs.job import Job, Tier
from schemas.jobs.outcome import Counts, JobStatus, Manifest, Usage
from schemas.jobs.plan import PlanSegment, RejectsRef, ShardRef
from schemas.jobs.results import ResultRow, RowStatus, results_table
from schemas.models import ModelPin
from schemas.requests.errors import RowError, RowErrorCode

MODEL = "tiny"
PIN = ModelPin(name=MODEL, source="/models/tiny", digest="sha256:1", dtype="float32")
MODELS = (PIN.key,)
QUEUE = queue_name(PIN.key, Tier.STANDARD)
JobEnd = Literal[JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED]
EXPOSED = 150
"""Tokens that a worker's death may cost, as reports say."""


def held(heartbeats: Heartbeats) -> set[tuple[str, int]]:
    """Shards that live workers hold."""
    return {shard for worker in heartbeats.workers() for shard in worker.held}


def order(**changes: Any) -> JobOrder:
    """An order for some input; `changes` replace its parts."""
    files = (InputFile(uri="/data/in.jsonl", size=10, sha256="0" * 64),)
    values: dict[str, Any] = {
        "input": InputRef(uri="/data/in.jsonl", format=InputFormat.JSONL, files=files),
        "models": (PIN,),
    }
    return JobOrder(**(values | changes))


def shard_table(rows: Sequence[int], carried: pa.Table | None = None) -> pa.Table:
    """A shard of these rows, in this order; `carried` holds their extra columns."""
    count = len(rows)
    columns = {
        "row": rows,
        "compute_row": rows,
        "custom_id": [f"id-{row}" for row in rows],
        "url": ["/v1/completions"] * count,
        "body": ['{"prompt": "x"}'] * count,
        "model": [MODEL] * count,
        "request_hash": [row.to_bytes(16, "big") for row in rows],
        "prefix_group": [None] * count,
        "prefix_readers": [None] * count,
        "estimated_prompt_tokens": [5] * count,
        "expected_tokens": [7] * count,
    }
    table = pa.table(columns, schema=shard_schema())
    for name in carried.column_names if carried is not None else []:
        table = table.append_column(name, carried[name])
    return table


def plan_by_hand(
    ledger: JobLedger, world: World, shards: Sequence[Sequence[int]], rejected: Sequence[int] = (), **changes: Any
) -> Job:
    """Submit an order and plan it with the given shards, in one segment. In a root the job's id is its name there."""
    job = submit(order(**changes), ledger, world, job_id=ledger.name or None).job
    sink = LedgerPlanSink(ledger, job, world, None, lambda: None)
    refs = []
    for number, rows in enumerate(shards, start=1):
        buffer = io.BytesIO()
        pq.write_table(shard_table(rows), buffer)
        data = buffer.getvalue()
        key = shard_key(sink.attempt, number)
        assert ledger.create(key, data)
        refs.append(
            ShardRef(
                number=number, key=key, sha256=hashlib.sha256(data).hexdigest(), size=len(data), rows=len(rows),
                computed_rows=len(rows), model=MODEL, prompt_tokens=5 * len(rows), expected_tokens=7 * len(rows),
            )
        )  # fmt: skip
    error = RowError(RowErrorCode.INVALID_JSON, "not JSON")
    sink.write_results(results_table(ResultRow.from_error(row, None, error) for row in rejected).cast(result_schema()))
    stored = sink.store_results(REJECTS)
    rejects = RejectsRef(number=REJECTS, key=stored.key, sha256=stored.sha256, size=stored.size, rows=len(rejected))
    total = sum(map(len, shards)) + len(rejected)
    segment = PlanSegment(
        job=job.id, index=0, attempt=sink.attempt, first_row=0, end_row=total, rejected=len(rejected),
        rejects=rejects, unique=total - len(rejected), shards=tuple(refs), last=True,
    )  # fmt: skip
    assert sink.commit_segment(segment) == segment
    sink.close()
    return job


def answers(work: ShardWork, *, mark: str = "") -> list[ResultRow]:
    """A result for each row of the shard, every fifth row failed, in another order than the shard's."""
    rows = []
    for row, custom_id in zip(work.table["row"].to_pylist(), work.table["custom_id"].to_pylist(), strict=True):
        if row % 5 == 4:
            error = RowError(RowErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long")
            rows.append(ResultRow.from_error(row, custom_id, error, model=MODEL, attempt=work.attempt))
            continue
        rows.append(
            ResultRow(
                custom_id=custom_id, row=row, status=RowStatus.SUCCEEDED, status_code=200, text=f"answer {row}{mark}",
                finish_reason="stop", response=f'{{"id": "r{row}"}}', model=MODEL, prompt_tokens=5, cached_tokens=1,
                completion_tokens=7, created_at=work.job.created_at, started_at=work.started_at, attempt=work.attempt,
            )
        )  # fmt: skip
    return rows[::-1]


def computed(work: ShardWork, *, mark: str = "") -> FinishedRows:
    """The answers, with what each cost: 5 prompt tokens (1 of them cached) and 7 answered."""
    rows = answers(work, mark=mark)
    return FinishedRows(rows, [Usage(prompt=5, cached=1, completion=7)] * len(rows))


def report(work: ShardWork, seconds: float = 1.0) -> ShardReport:
    """The report of a computed shard: 7 tokens for each row."""
    return ShardReport(
        generated=7 * work.table.num_rows,
        exposed=EXPOSED,
        busy_seconds=seconds,
        engine_started_at=work.started_at,
        engine_finished_at=work.started_at + timedelta(seconds=seconds),
        engine={"block_size": 16},
        versions={"torch": "2.13.0"},
    )


def end_job(
    ledger: JobLedger, at: datetime, status: JobEnd = JobStatus.CANCELLED, counts: Counts | None = None
) -> None:
    """The job ends at that moment, without any clean-up, as if the process that ended it died."""
    job = ledger.job()
    ledger.create_manifest(
        Manifest(
            job=job.id,
            status=status,
            counts=counts or Counts(),
            created_at=job.created_at,
            finished_at=at,
            wall_seconds=0.0,
        )
    )


def all_rows(ledger: JobLedger) -> list[dict[str, Any]]:
    """Every result that stands."""
    found: list[dict[str, Any]] = []
    for _, info in ledger.parts():
        found += pq.read_table(pa.BufferReader(ledger.store.read(ledger.prefix + info.key))).to_pylist()
    return found
