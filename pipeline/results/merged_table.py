"""The results of a cascade's steps as one Parquet file: each row once, in input order, with the model that answered.

The parts are merged in batches; of each part one batch is in memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.ledger.ledger import REJECTS, JobLedger, part_key
from pipeline.ports import failure_type
from pipeline.results.part_files import COMPRESSION
from schemas.jobs.results import RowStatus

_BATCH_ROWS = 1_024
_Row = tuple[int, bool, int, dict[str, Any]]
"""Row, whether it succeeded, index of its step, and the result."""


def write_merged(steps: Sequence[JobLedger], to: Path) -> int:
    """Write the latest succeeded result of each row, else the latest one; returns the number of rows. The file appears
    complete.

    Args:
        steps: the jobs of a cascade in their order; all have ended.

    Raises:
        StoreError: it can't be written.
    """
    with steps[0].store.open(steps[0].prefix + part_key(REJECTS)) as stream:
        schema = pq.read_schema(stream)
    sources = [_rows(ledger, number, at) for at, ledger in enumerate(steps) for number, _ in ledger.parts()]
    merged = heapq.merge(*sources, key=itemgetter(0))
    best = (max(found, key=itemgetter(1, 2))[3] for _, found in groupby(merged, key=itemgetter(0)))
    temporary, count = to.with_name(f".{to.name}.part"), 0
    try:
        with pq.ParquetWriter(temporary, schema, compression=COMPRESSION) as writer:
            while batch := [row for _, row in zip(range(_BATCH_ROWS), best, strict=False)]:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                count += len(batch)
        temporary.replace(to)
    except OSError as error:
        raise failure_type(error)(f"{to}: can't be written: {error.strerror or error}; free some space") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _rows(ledger: JobLedger, number: int, step: int) -> Iterator[_Row]:
    """A part's rows; parts are sorted by row."""
    with ledger.store.open(ledger.prefix + part_key(number)) as stream:
        for batch in pq.ParquetFile(stream, pre_buffer=False).iter_batches(_BATCH_ROWS):
            for row in batch.to_pylist():
                yield row["row"], row["status"] == RowStatus.SUCCEEDED, step, row
