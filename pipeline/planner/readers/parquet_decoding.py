"""Decodes Parquet in bounded memory; data that can't be decoded is an error of the job.

A Parquet file of a few kilobytes can decode to gigabytes: a dictionary value is stored once and repeated in every row.
So the bytes of a row are bounded before rows are decoded, from the longest value of each dictionary, the widths of
fixed types and the sizes that the footer declares, and few rows are decoded at once. The footer may lie, and nested
columns hide their dictionaries: beyond these bounds the memory limit of the planner process applies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.planner.ports import BrokenInput, InputError, SourceFile
from pipeline.planner.readers.jsonl import BATCH_BYTES, READ_BYTES

MAX_DECODED_ROWS: Final = 256
"""Rows decoded at once; fewer where they are large."""

MAX_ROW_BYTES: Final = 1 << 28
"""Maximum bytes of a row; a row group with larger rows is refused."""

MAX_EXPANSION: Final = 10_000
"""Maximum decoded size as a multiple of the file's size. Texts that differ only in a number reach about a thousand."""

ALWAYS_DECODED_BYTES: Final = 1 << 30
"""Decoded bytes that are allowed for a file of any size."""


@contextmanager
def decoding(where: str) -> Iterator[None]:
    """Translate errors of reading and decoding Parquet: `BrokenInput` for data that Arrow or Python's codecs can't
    decode, and `InputError` when the system can't read the file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise InputError(f"{where}: can't be read: {error.strerror or error}") from error
        raise _broken(where, error) from error
    except (pa.ArrowException, ValueError, OverflowError, LookupError, TypeError, NotImplementedError) as error:
        raise _broken(where, error) from error


class ParquetFooter(NamedTuple):
    """A file's declared columns, with values in place of dictionary codes, and its number of rows."""

    schema: pa.Schema
    num_rows: int


def read_footer(file: SourceFile) -> ParquetFooter:
    """The footer of a file. If it contradicts itself, the largest number of rows counts."""
    with decoding(f"{file.name} is not a Parquet file"), file.open() as stream:
        parquet = pq.ParquetFile(stream)
        found = parquet.metadata
        in_groups = sum(max(0, found.row_group(group).num_rows) for group in range(found.num_row_groups))
        schema = parquet.schema.to_arrow_schema().remove_metadata()
        return ParquetFooter(_plain(schema), max(found.num_rows, in_groups))


def read_tables(file: SourceFile, schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of a file in order, some at a time, as `schema`, which is the file's own.

    Raises:
        InputError: the file can't be read.  BrokenInput: it can't be decoded, or decodes to far more than its size.
    """
    with file.open() as stream:
        with decoding(file.name):
            size = stream.seek(0, os.SEEK_END)
            parquet = pq.ParquetFile(stream, buffer_size=READ_BYTES)
            groups = parquet.num_row_groups
        bytes_left = max_bytes = max(ALWAYS_DECODED_BYTES, MAX_EXPANSION * size)
        for group in range(groups):  # Arrow can't read nested dictionaries across groups
            where = f"{file.name}: row group {group + 1} of {groups}"
            with decoding(where):
                rows = _rows_at_once(where, parquet, stream, group)
                batches = parquet.iter_batches(batch_size=rows, row_groups=[group], use_threads=False)
            while True:
                with decoding(where):
                    batch = next(batches, None)
                    if batch is None:
                        break
                    table = pa.Table.from_batches([batch]).cast(schema)
                bytes_left -= table.nbytes
                if bytes_left < 0:
                    raise BrokenInput(
                        f"{where}: {size} bytes of Parquet decode to more than {max_bytes} bytes, which is too large; "
                        "submit such rows as JSONL"
                    )
                yield table


def _rows_at_once(where: str, parquet: pq.ParquetFile, stream: BinaryIO, group: int) -> int:
    """Number of rows of the group to decode at once."""
    found = parquet.metadata.row_group(group)
    declared: int = found.total_byte_size // max(1, found.num_rows)
    row_bytes = max(declared, _longest_cells(parquet, stream, group))
    if row_bytes > MAX_ROW_BYTES:
        raise BrokenInput(
            f"{where}: its rows may take {row_bytes} bytes each, but {MAX_ROW_BYTES} are allowed; shorten them"
        )
    return max(1, min(MAX_DECODED_ROWS, BATCH_BYTES // max(1, row_bytes)))


def _longest_cells(parquet: pq.ParquetFile, stream: BinaryIO, group: int) -> int:
    """Maximum bytes of a row's cells in total, of columns that aren't nested and have a fixed width or a dictionary."""
    flat = {
        column.path: column.physical_type
        for column in (parquet.schema.column(index) for index in range(len(parquet.schema)))
        if column.max_repetition_level == 0 and "." not in column.path
    }
    texts = [path for path, kind in flat.items() if kind == "BYTE_ARRAY"]
    fixed: int = sum(kind.byte_width for kind in parquet.schema_arrow.types if pa.types.is_fixed_size_binary(kind))
    if not texts:
        return fixed
    coded = pq.ParquetFile(stream, read_dictionary=texts, metadata=parquet.metadata, buffer_size=READ_BYTES)
    first = next(coded.iter_batches(batch_size=1, row_groups=[group], columns=texts, use_threads=False), None)
    dictionaries = [] if first is None else [column.dictionary for column in first.columns if _is_coded(column.type)]
    longest: list[int] = [pc.max(pc.binary_length(values)).as_py() or 0 for values in dictionaries]
    return fixed + sum(longest)


def _is_coded(kind: pa.DataType) -> bool:
    return pa.types.is_dictionary(kind) and not pa.types.is_nested(kind.value_type)


def _broken(where: str, error: Exception) -> BrokenInput:
    reason = " ".join(str(error).split())[:500]
    return BrokenInput(f"{where}: can't be decoded: {reason or type(error).__name__}; write the file anew")


def _plain(schema: pa.Schema) -> pa.Schema:
    """The schema with values in place of dictionary codes: each row group has a dictionary of its own, so a column from
    several groups can't have one."""
    return pa.schema([pa.field(field.name, _plain_type(field.type)) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain_type(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    if types.is_large_list(kind):
        return pa.large_list(_plain_type(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type), kind.list_size)
    return pa.list_(_plain_type(kind.value_type)) if types.is_list(kind) else kind
