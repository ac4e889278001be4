"""Readers of the files of tables, which are read whole: regular files or objects in S3, checked as the inputs of jobs
are.

What a small file could do to this process is refused: Parquet that decodes to more than fits into memory, and JSON that
is nested so deep that Arrow's parser would overflow the stack.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePath
from typing import Final

import pyarrow as pa

from pipeline.inputs.regular_files import open_regular
from pipeline.planner.ports import BrokenInput, SourceFile
from pipeline.ports import PipelineError
from schemas.requests.errors import RowError
from schemas.requests.limits import Limits
from tokenmill.errors import InvalidCall

MAX_MEMORY_SHARE: Final = 0.5
"""Of this machine's memory, for the files of one table, decoded."""

BLOCK_BYTES: Final = 32 << 20
"""Arrow's parsers want whole rows in a block."""


def _read_parquet(file: SourceFile, before: int) -> pa.Table:
    import pyarrow.parquet as pq

    from pipeline.planner.readers.parquet import ParquetColumns

    left = _max_bytes() - before
    columns = ParquetColumns(file)
    with file.open() as stream:
        schema = pq.read_schema(stream)
    tables = [schema.empty_table()]
    for piece in columns.pieces():
        tables.append(piece.table.cast(schema))
        left -= tables[-1].nbytes
        if left < 0:
            raise BrokenInput(f"{file.name}: decodes to more than half of this machine's memory; divide the table")
    return pa.concat_tables(tables)


def _read_csv(file: SourceFile, _before: int) -> pa.Table:
    from pyarrow import csv

    # On one thread, errors name their row.
    read = csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    with file.open() as stream:
        table = csv.read_csv(stream, read, csv.ParseOptions(newlines_in_values=True))
    for field in table.schema:
        if pa.types.is_binary(field.type):
            raise BrokenInput(f"{file.name}: the column {field.name} is not UTF-8; save the file as UTF-8")
    return table


def _read_jsonl(file: SourceFile, _before: int) -> pa.Table:
    from pyarrow import json

    from pipeline.planner.readers.jsonl import BLANK, parse_json
    from pipeline.planner.readers.lines import BOM, lines_of

    limits = Limits()
    for number, line in enumerate(lines_of(file, limits.max_line_bytes), start=1):
        if line is None:
            raise BrokenInput(f"{file.name}: line {number}: is longer than {limits.max_line_bytes} bytes; shorten it")
        value = parse_json(line.removeprefix(BOM) if number == 1 else line, limits)
        if isinstance(value, RowError):
            raise BrokenInput(f"{file.name}: line {number}: {value.message}")
        if value is not BLANK and not isinstance(value, dict):
            raise BrokenInput(f"{file.name}: line {number}: must be a JSON object, with a value for each column")
    with file.open() as stream:
        return json.read_json(stream, json.ReadOptions(block_size=BLOCK_BYTES))


READERS: Final[dict[str, Callable[[SourceFile, int], pa.Table]]] = {
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
}
"""By suffix. They take the file, and the bytes of the table's files before; they raise `PipelineError`, `OSError` and
what Arrow raises."""


def read_files(given: str) -> pa.Table:
    """The files of one format at a path, a glob or an s3:// URL, in the order of their names, as one table. Raises
    `InvalidCall`."""
    from tokenmill.config.inputs import in_s3, s3_files

    try:
        files = s3_files(given) if in_s3(given) else _local_files(given)
    except PipelineError as error:
        raise InvalidCall(f"data: {error}") from error
    if not files:
        raise InvalidCall(f"data: no file matches {given}")
    formats = {PurePath(file.name).suffix.lower() for file in files}
    if len(formats) > 1 or not formats <= READERS.keys():
        hint = f"; give {given.rstrip('/')}/*.parquet" if Path(given).is_dir() else ""
        raise InvalidCall(f"data: {given}: must be files of one format: {', '.join(READERS)}{hint}")
    read = READERS[formats.pop()]
    tables: list[pa.Table] = []
    for file in files:
        try:
            tables.append(read(file, sum(table.nbytes for table in tables)))
        except (OSError, pa.ArrowException) as error:
            raise InvalidCall(f"data: {file.name}: can't be read: {error}") from error
        except PipelineError as error:
            raise InvalidCall(f"data: {error}") from error
        if tables[-1].schema != tables[0].schema:
            raise InvalidCall(f"data: {file.name}: has other columns or types than {files[0].name}; read them yourself")
    return pa.concat_tables(tables)


def _local_files(given: str) -> list[SourceFile]:
    if "://" in given:
        address = f"{given.partition('://')[0]}://…"  # what follows may hold a secret
        raise InvalidCall(f"data: {address}: must be a path on this machine, or s3://bucket/key; fetch the table first")
    path = os.path.expanduser(given)
    is_pattern = glob.has_magic(path) and not os.path.exists(path)
    paths = sorted(glob.glob(path, recursive=True)) if is_pattern else [path]
    return [SourceFile(one, partial(open_regular, Path(one))) for one in paths]


def _max_bytes() -> int:
    return int(MAX_MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
