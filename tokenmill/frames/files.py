"""Readers of the files of tables, which are read whole: regular files, checked as the inputs of jobs are.

What a small file could do to this process is refused: Parquet that decodes to more than fits into memory, and JSON that
is nested so deep that Arrow's parser would overflow the stack.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

from pipeline.inputs.regular_files import open_regular
from pipeline.planner.ports import BrokenInput, SourceFile
from schemas.requests.errors import RowError
from schemas.requests.limits import Limits

MAX_MEMORY_SHARE: Final = 0.5
"""Of this machine's memory, for the files of one table, decoded."""

BLOCK_BYTES: Final = 32 << 20
"""Arrow's parsers want whole rows in a block."""


def _read_parquet(path: str, before: int) -> pa.Table:
    import pyarrow.parquet as pq

    from pipeline.planner.readers.parquet import ParquetColumns

    file, left = _source(path), _max_bytes() - before
    columns = ParquetColumns(file)
    with file.open() as stream:
        schema = pq.read_schema(stream)
    tables = [schema.empty_table()]
    for piece in columns.pieces():
        tables.append(piece.table.cast(schema))
        left -= tables[-1].nbytes
        if left < 0:
            raise BrokenInput(f"{path}: decodes to more than half of this machine's memory; divide the table")
    return pa.concat_tables(tables)


def _read_csv(path: str, _before: int) -> pa.Table:
    from pyarrow import csv

    # On one thread, errors name their row.
    read = csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    with _source(path).open() as stream:
        table = csv.read_csv(stream, read, csv.ParseOptions(newlines_in_values=True))
    for field in table.schema:
        if pa.types.is_binary(field.type):
            raise BrokenInput(f"{path}: the column {field.name} is not UTF-8; save the file as UTF-8")
    return table


def _read_jsonl(path: str, _before: int) -> pa.Table:
    from pyarrow import json

    from pipeline.planner.readers.jsonl import BLANK, parse_json
    from pipeline.planner.readers.lines import BOM, lines_of

    file, limits = _source(path), Limits()
    for number, line in enumerate(lines_of(file, limits.max_line_bytes), start=1):
        if line is None:
            raise BrokenInput(f"{path}: line {number}: is longer than {limits.max_line_bytes} bytes; shorten it")
        value = parse_json(line.removeprefix(BOM) if number == 1 else line, limits)
        if isinstance(value, RowError):
            raise BrokenInput(f"{path}: line {number}: {value.message}")
        if value is not BLANK and not isinstance(value, dict):
            raise BrokenInput(f"{path}: line {number}: must be a JSON object, with a value for each column")
    with file.open() as stream:
        return json.read_json(stream, json.ReadOptions(block_size=BLOCK_BYTES))


READERS: Final[dict[str, Callable[[str, int], pa.Table]]] = {
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
}
"""By suffix. They take the path, and the bytes of the table's files before; they raise `PipelineError`, `OSError` and
what Arrow raises."""


def _source(path: str) -> SourceFile:
    return SourceFile(path, partial(open_regular, Path(path)))


def _max_bytes() -> int:
    return int(MAX_MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
