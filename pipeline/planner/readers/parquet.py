"""Reader of Parquet: row groups are streamed in bounded memory; data that can't be decoded is an error of the job.

A Parquet file of a few kilobytes can decode to gigabytes: a dictionary value is stored once and repeated in every row.
So the bytes of a row are bounded before rows are decoded, from the longest value of each dictionary, the widths of
fixed types and the sizes that the footer declares, and few rows are decoded at once. The footer may lie, and nested
columns hide their dictionaries: beyond these bounds the memory limit of the planner process applies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.planner.ports import BrokenInput, SourceFile
from pipeline.planner.readers.columns import Piece
from pipeline.planner.readers.expansion import MAX_DECODED_ROWS, MAX_ROW_BYTES, ExpansionLimit, decoding
from pipeline.planner.readers.jsonl import BATCH_BYTES
from pipeline.planner.readers.lines import READ_BYTES
from pipeline.planner.readers.plain_types import plain_schema


class ParquetColumns:
    """A Parquet file as `ColumnFile`. If its footer contradicts itself, the largest number of rows counts.

    Args:
        advice: what to do with rows that decode to too much.

    Raises:
        InputError: the file can't be read.  BrokenInput: it is not Parquet.
    """

    def __init__(self, file: SourceFile, advice: str = "submit such rows as JSONL") -> None:
        self.name = file.name
        self._file = file
        self._advice = advice
        with decoding(f"{file.name} is not a Parquet file"), file.open() as stream:
            parquet = pq.ParquetFile(stream)
            found = parquet.metadata
            in_groups = sum(max(0, found.row_group(group).num_rows) for group in range(found.num_row_groups))
            self.schema = plain_schema(parquet.schema.to_arrow_schema().remove_metadata())
            self.declared_rows = max(found.num_rows, in_groups)

    def pieces(self) -> Iterator[Piece]:
        """See `ColumnFile`."""
        with self._file.open() as stream:
            with decoding(self.name):
                limit = ExpansionLimit(stream.seek(0, os.SEEK_END), "Parquet", self._advice)
                parquet = pq.ParquetFile(stream, buffer_size=READ_BYTES)
                groups = parquet.num_row_groups
            for group in range(groups):  # Arrow can't read nested dictionaries across groups
                where = f"{self.name}: row group {group + 1} of {groups}"
                with decoding(where):
                    rows = _rows_at_once(where, parquet, stream, group)
                    batches = parquet.iter_batches(batch_size=rows, row_groups=[group], use_threads=False)
                while True:
                    with decoding(where):
                        batch = next(batches, None)
                        if batch is None:
                            break
                        table = pa.Table.from_batches([batch]).cast(self.schema)
                    limit.add(table.nbytes, where)
                    yield Piece(table)


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
