"""Reader of Arrow: an IPC file (.arrow, .feather) or an IPC stream, decoded in bounded memory.

Codes and views name a value in a few bytes, any number of times. So the bytes of rows are bounded before their values
are put in place of these.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.planner.ports import BrokenInput, InputError, SourceFile
from pipeline.planner.readers.arrow_messages import check_size
from pipeline.planner.readers.arrow_streams import read_batches, read_schema
from pipeline.planner.readers.columns import Piece
from pipeline.planner.readers.expansion import MAX_DECODED_ROWS, MAX_ROW_BYTES, ExpansionLimit, decoding
from pipeline.planner.readers.jsonl import BATCH_BYTES
from pipeline.planner.readers.plain_types import plain_schema, shown

Positions = NDArray[np.int64]

_AS_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


class ArrowColumns:
    """An Arrow file or stream as `ColumnFile`.

    Raises:
        InputError: the file can't be read, or a column's type can't be used.  BrokenInput: it is not Arrow.
    """

    declared_rows = 0

    def __init__(self, file: SourceFile) -> None:
        self.name = file.name
        self._file = file
        with decoding(self.name), file.open() as stream:
            self.schema = plain_schema(read_schema(self.name, stream).remove_metadata())
            for field in self.schema:
                _refuse_unusable(self.name, field)

    def pieces(self) -> Iterator[Piece]:
        """See `ColumnFile`."""
        with self._file.open() as stream:
            size = stream.seek(0, os.SEEK_END)
            limit = ExpansionLimit(size, "Arrow", "submit such rows as JSONL")
            for where, batch in read_batches(self.name, stream):
                with decoding(where):
                    for column in batch.columns:
                        _validate(column)
                    batch = self._sliceable(where, batch)
                for start in range(0, batch.num_rows, MAX_DECODED_ROWS):
                    for table in self._tables(where, batch, start, min(start + MAX_DECODED_ROWS, batch.num_rows)):
                        limit.add(table.nbytes, where)
                        yield Piece(table)

    def _sliceable(self, where: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with plain nested columns and plain dictionaries: Arrow can't convert a few rows of lists without
        all others, and can't look up views. What they become is bounded as the batch itself."""
        columns = list(batch.columns)
        for index, field in enumerate(self.schema):
            column = columns[index]
            if column.type == field.type:
                continue
            if pa.types.is_dictionary(column.type):
                values = _cast_whole(
                    f"{where}: the dictionary of column {shown(field.name)}", column.dictionary, field.type
                )
                columns[index] = pa.DictionaryArray.from_arrays(column.indices, values)
            elif pa.types.is_nested(column.type):
                columns[index] = _cast_whole(f"{where}: the column {shown(field.name)}", column, field.type)
        return pa.RecordBatch.from_arrays(columns, names=self.schema.names)

    def _tables(self, where: str, batch: pa.RecordBatch, start: int, end: int) -> Iterator[pa.Table]:
        """The rows as plain tables of few bytes each."""
        starts = np.arange(start, end, dtype=np.int64)
        with decoding(where):
            row_bytes = sum(int(_plain_bytes(column, starts, starts + 1).max()) for column in batch.columns)
        if row_bytes > MAX_ROW_BYTES:
            raise BrokenInput(
                f"{where}: its rows may take {row_bytes} bytes each, but {MAX_ROW_BYTES} are allowed; shorten them"
            )
        rows = max(1, BATCH_BYTES // max(1, row_bytes))
        for first in range(start, end, rows):
            with decoding(where):
                table = pa.Table.from_batches([batch.slice(first, min(rows, end - first))]).cast(self.schema)
            yield table


def _validate(column: pa.Array) -> None:
    """Check that nothing in the column points outside of it. Texts that are not UTF-8 are left to their rows."""
    as_bytes = _AS_BYTES.get(column.type)
    (column if as_bytes is None else column.view(as_bytes)).validate(full=True)


def _cast_whole(where: str, array: pa.Array, kind: pa.DataType) -> pa.Array:
    ends = np.array([len(array)], np.int64)
    check_size(where, int(_plain_bytes(array, ends * 0, ends)[0]))
    return array.cast(kind)


def _refuse_unusable(name: str, field: pa.Field) -> None:
    """Raise `InputError` for a column that results, which are Parquet, can't carry."""
    try:
        pq.ParquetWriter(io.BytesIO(), pa.schema([field])).close()
        usable = not _contains_list_view(field.type)
    except pa.ArrowException:
        usable = False
    if not usable:
        column, kind = shown(field.name), shown(str(field.type), 200)
        raise InputError(f"{name}: the column {column} is {kind}; write it as text or plain lists")


def _contains_list_view(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return True
    return any(_contains_list_view(kind.field(index).type) for index in range(kind.num_fields))


def _plain_bytes(array: Any, starts: Positions, ends: Positions) -> Positions:
    """The bytes of each range of elements as plain values, or a bound of them, int64 [ranges].

    Args:
        array: a validated `pa.Array` of a whole record batch.  starts, ends: int64 [ranges], of each range.
    """
    kind, types = array.type, pa.types
    counts = ends - starts
    if not len(array):
        return counts * 0
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_bytes(array.storage, starts, ends)
    if types.is_dictionary(kind):
        values = array.dictionary
        single = np.arange(len(values), dtype=np.int64)
        return counts * int(_plain_bytes(values, single, single + 1).max(initial=0))
    if types.is_string_view(kind) or types.is_binary_view(kind):
        lengths = np.frombuffer(array.buffers()[1], np.int32)[::4]
        first, last = int(starts.min()), int(ends.max())
        sums = np.concatenate([[0], np.cumsum(np.maximum(lengths[first:last], 0), dtype=np.int64)])
        spans: Positions = sums[ends - first] - sums[starts - first]
        return spans + 4 * counts
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        starts, ends = _offsets(array, starts), _offsets(array, ends)
        return ends - starts + 8 * counts
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        values = array.values if not types.is_map(kind) else pa.StructArray.from_arrays([array.keys, array.items], "kv")
        return _plain_bytes(values, _offsets(array, starts), _offsets(array, ends)) + 8 * counts
    if types.is_fixed_size_list(kind):
        return _plain_bytes(array.values, starts * kind.list_size, ends * kind.list_size)
    if types.is_struct(kind):
        fields = (_plain_bytes(array.field(index), starts, ends) for index in range(kind.num_fields))
        return sum(fields, start=counts * 0)
    return counts * 0 if types.is_null(kind) else counts * max(1, kind.bit_width // 8)


def _offsets(array: Any, positions: Positions) -> Positions:
    """The offsets of these elements in the array's values, int64."""
    is_large = pa.types.is_large_list(array.type) or pa.types.is_large_string(array.type)
    wide = is_large or pa.types.is_large_binary(array.type)
    offsets = np.frombuffer(array.buffers()[1], np.int64 if wide else np.int32)
    found: Positions = offsets[positions + array.offset].astype(np.int64)
    return found
