"""Recovery of the row numbers of a shard whose file can't be read.

A plan segment covers a range of rows, each of which is in one shard, refused, or blank. So the rows of one lost shard
are the rows that the segment's other shards and its refused rows leave over, if their number matches the plan. The
requests of lost rows are unknown: their part has the row numbers without custom_ids and carried columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import structlog
from numpy.typing import NDArray

from pipeline.ledger.ledger import REJECTS, JobLedger, LedgerError, part_key
from pipeline.ports import ObjectNotFound, PipelineError
from schemas.jobs.arrow_schemas import RESULT_FIELDS
from schemas.jobs.plan import PlanSegment, ShardRef

logger = structlog.get_logger(__name__)


class RowsUnknown(PipelineError):
    """Raised when a shard's rows can't be determined: its job can't be completed."""


def read_table(ledger: JobLedger, shard: ShardRef) -> pa.Table:
    """The planned table of the shard; raises `LedgerError` when its file is missing or damaged, and `MemoryError`."""
    try:
        return pq.read_table(pa.BufferReader(ledger.read_shard(shard)))
    except ObjectNotFound as error:
        raise LedgerError(f"{ledger.location(shard.key)}: is missing, but the plan refers to it") from error
    except MemoryError:  # pyarrow's too: it doesn't mean that the file is damaged
        raise
    except (pa.ArrowException, OSError) as error:
        raise LedgerError(f"{ledger.location(shard.key)}: can't be read as Parquet ({error})") from error


def read_or_recover_table(ledger: JobLedger, segment: PlanSegment, shard: ShardRef, finished: pa.Table) -> pa.Table:
    """The shard's table, for building its part. If its file can't be read: its rows, with the custom_ids that
    `finished` (`FINISHED_SCHEMA`) has.

    Raises:
        RowsUnknown: the rows can't be determined either.
    """
    try:
        return read_table(ledger, shard)
    except LedgerError as error:
        logger.error("a shard is lost", shard=shard.number, reason=str(error))
        return _by_elimination(ledger, segment, shard, finished, str(error))


def _by_elimination(
    ledger: JobLedger, segment: PlanSegment, shard: ShardRef, finished: pa.Table, reason: str
) -> pa.Table:
    names = dict(zip(finished["row"].to_pylist(), finished["custom_id"].to_pylist(), strict=True))
    try:
        taken = np.concatenate([np.zeros(0, dtype=np.int64), *_rows_of_others(ledger, segment, shard)])
        rows = np.setdiff1d(np.arange(segment.first_row, segment.end_row, dtype=np.int64), taken)
        carried = _carried(ledger)
    except (LedgerError, ObjectNotFound, pa.ArrowException, OSError) as error:
        raise RowsUnknown(f"{reason}; nor can its rows be distinguished from the others' ({error})") from error
    if len(rows) != shard.rows or not names.keys() <= set(rows.tolist()):
        raise RowsUnknown(
            f"{reason}; nor can its {shard.rows} rows be distinguished from blank lines and other shards' rows"
        )
    table = pa.table(
        {
            "row": pa.array(rows),
            "custom_id": pa.array([names.get(row) for row in rows.tolist()], pa.string()),
            "model": pa.array([shard.model] * len(rows), pa.string()),
        }
    )
    for field in carried:
        table = table.append_column(field, pa.nulls(len(rows), field.type))
    return table


def _rows_of_others(ledger: JobLedger, segment: PlanSegment, lost: ShardRef) -> Iterator[NDArray[np.int64]]:
    """The row numbers of the segment's other shards and refused rows, one array for each part or shard."""
    if segment.rejects is not None:
        yield _rows_of_part(ledger, segment.rejects.number)
    for shard in segment.shards:
        if shard.number == lost.number:
            continue
        if ledger.has_part(shard.number):
            yield _rows_of_part(ledger, shard.number)
        else:
            yield read_table(ledger, shard)["row"].to_numpy()


def _rows_of_part(ledger: JobLedger, number: int) -> NDArray[np.int64]:
    with ledger.store.open(ledger.prefix + part_key(number)) as stream:
        # Not `read_table`: its threads may outlive the call with the Python file, and then the process hangs or aborts
        # when it ends (github.com/apache/arrow, issues 33975 and 34314).
        rows: NDArray[np.int64] = pq.ParquetFile(stream).read(["row"], use_threads=False)["row"].to_numpy()
    return rows


def _carried(ledger: JobLedger) -> list[pa.Field]:
    """The carried columns of the job's parts, read from its first part."""
    own = {field.name for field in RESULT_FIELDS}
    with ledger.store.open(ledger.prefix + part_key(REJECTS)) as stream:
        return [field for field in pq.read_schema(stream) if field.name not in own]
