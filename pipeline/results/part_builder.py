"""Building and committing a shard's part, for workers that computed it and for the closer that ends it.

Token counts must add up for every maker of a part: each token that an attempt is known to have sampled is either in an
answer of the part or counted as repeated, attempt by attempt, so that tokens logged later can be distinguished.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from pipeline.ledger.ledger import JobLedger
from pipeline.ledger.records import PartSummary, ShardReport
from pipeline.ports import World
from pipeline.results.part_files import PartWriter, committed_tokens, part_schema, shard_results
from pipeline.results.shard_history import ShardHistory
from schemas.jobs.outcome import WorkerTime


@dataclass(frozen=True, slots=True)
class PartMaker:
    """The maker of a part, and the cost of its work.

    Attributes:
        attempt: its number among the attempts on the shard.  attempt_id: its unique id.  worker: the worker's name.
        started_at: when the shard was taken.
        report: the cost of computing; all zero for a maker that computes nothing.
        price_per_hour: the worker's price; None: unknown.
    """

    attempt: int
    attempt_id: str
    worker: str
    started_at: datetime
    report: ShardReport
    price_per_hour: float | None = None


def commit_part(
    ledger: JobLedger,
    world: World,
    job: str,
    number: int,
    shard: pa.Table,
    rows: pa.Table,
    history: ShardHistory,
    maker: PartMaker,
) -> bool:
    """Build part `number` of `job` from `rows` and commit it; False when another's part exists.

    Args:
        shard: `schemas.jobs.arrow_schemas.shard_schema(...)`.
        rows: `FINISHED_SCHEMA`, exactly one for each row of the shard, those of `history.finished` included.

    Raises:
        RowsMismatch: `rows` are not the shard's.  StoreError: the part can't be written.
    """
    report = maker.report
    path = world.scratch / f"part-{number:05d}-{maker.attempt_id}.parquet"
    writer = PartWriter(path, part_schema(shard.schema))
    usage = committed_tokens(rows)
    sampled = {**history.logged, maker.attempt_id: report.generated}
    worked = WorkerTime(seconds=report.busy_seconds, price_per_hour=maker.price_per_hour)
    repeated = max(0, sum(sampled.values()) - usage.completion)
    try:
        writer.append(shard_results(rows, shard))
        writer.finish(
            PartSummary(
                job=job,
                part=number,
                attempt=maker.attempt,
                attempt_id=maker.attempt_id,
                worker=maker.worker,
                counts=writer.counts(),
                usage=usage.model_copy(update={"repeated": repeated}),
                started_at=maker.started_at,
                committed_at=world.clock.now(),
                engine_started_at=report.engine_started_at,
                engine_finished_at=report.engine_finished_at,
                engine=dict(report.engine),
                versions=dict(report.versions),
                exposed=max([report.exposed, *history.exposed.values()]),
                accounted=sampled,
                worked={**history.worked, maker.attempt_id: worked},
            )
        )
    except BaseException:
        writer.abandon()
        raise
    return ledger.create_part(number, path)
