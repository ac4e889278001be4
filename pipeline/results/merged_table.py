"""The results of a cascade's steps as one Parquet file: each row once, in input order, with the model that answered.

Parts are sorted by row. At most `FAN_IN` of them are open at a time, with a batch of each in memory: more are merged in
rounds, over files beside the result.
"""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.ledger.ledger import REJECTS, JobLedger, part_key
from pipeline.ports import failure_type
from pipeline.results.part_files import COMPRESSION
from schemas.jobs.results import RowStatus

FAN_IN: Final = 32
_BATCH_ROWS: Final = 256
_STEP: Final = "cascade_step"
"""Column of intermediate files."""

_Row = tuple[int, bool, int, dict[str, Any]]
"""Row, whether it succeeded, index of its step, and the result."""


def write_merged(steps: Sequence[JobLedger], to: Path, *, fan_in: int = FAN_IN) -> int:
    """Write the latest succeeded result of each row, else the latest one; returns the number of rows. The file appears
    complete, in place of an older one.

    Args:
        steps: the jobs of a cascade in their order; all have ended.
        fan_in: maximum number of sorted files that are merged, and so open, at a time.

    Raises:
        StoreError: it can't be written.
    """
    with steps[0].store.open(steps[0].prefix + part_key(REJECTS)) as stream:
        schema = pq.read_schema(stream)
    inner = schema.append(pa.field(_STEP, pa.int32()))
    runs: list[Callable[[], Iterator[_Row]]] = [
        partial(_rows, ledger, number, at) for at, ledger in enumerate(steps) for number, _ in ledger.parts()
    ]
    temporary = to.with_name(f".{to.name}.part")
    try:
        with tempfile.TemporaryDirectory(prefix=".merge-", dir=to.parent) as folder:
            files = (Path(folder) / f"{number}.parquet" for number in range(len(runs)))  # more than are needed
            while len(runs) > fan_in:
                some, runs = runs[:fan_in], runs[fan_in:]
                path = next(files)
                _write((row | {_STEP: step} for _, _, step, row in _best(some)), path, inner)
                runs.append(partial(_intermediate_rows, path))
            count = _write((row for *_, row in _best(runs)), temporary, schema)
        temporary.replace(to)
    except OSError as error:
        raise failure_type(error)(f"{to}: can't be written: {error.strerror or error}; free some space") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _best(runs: Sequence[Callable[[], Iterator[_Row]]]) -> Iterator[_Row]:
    """The best result of each row, by row."""
    merged = heapq.merge(*[run() for run in runs], key=itemgetter(0))
    for _, found in groupby(merged, key=itemgetter(0)):
        yield max(found, key=itemgetter(1, 2))


def _write(rows: Iterable[dict[str, Any]], to: Path, schema: pa.Schema) -> int:
    count, left = 0, iter(rows)
    with pq.ParquetWriter(to, schema, compression=COMPRESSION) as writer:
        while batch := [row for _, row in zip(range(_BATCH_ROWS), left, strict=False)]:
            writer.write_table(pa.Table.from_pylist(batch, schema))
            count += len(batch)
    return count


def _rows(ledger: JobLedger, number: int, step: int) -> Iterator[_Row]:
    """A part's rows."""
    with ledger.store.open(ledger.prefix + part_key(number)) as stream:
        for batch in pq.ParquetFile(stream, pre_buffer=False).iter_batches(_BATCH_ROWS):
            for row in batch.to_pylist():
                yield row["row"], row["status"] == RowStatus.SUCCEEDED, step, row


def _intermediate_rows(path: Path) -> Iterator[_Row]:
    with path.open("rb") as stream:
        for batch in pq.ParquetFile(stream, pre_buffer=False).iter_batches(_BATCH_ROWS):
            for row in batch.to_pylist():
                step = row.pop(_STEP)
                yield row["row"], row["status"] == RowStatus.SUCCEEDED, step, row
