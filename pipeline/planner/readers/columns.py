"""Files of columns (Parquet, Arrow, CSV) as one input: each row becomes an input line.

The request consists of `custom_id` and one of `body` (JSON), `messages` or `prompt`, or, without any of these, `input`
(to be embedded); with `body`, `url` and `method` are read too. Every other column is carried through to the results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Protocol

import pyarrow as pa

from pipeline.planner.ports import InputError, SourceBatch, SourceRow, TooManyRows
from pipeline.planner.readers.cells import cells_of, row_bytes
from pipeline.planner.readers.expansion import decoding
from pipeline.planner.readers.jsonl import BATCH_BYTES, BATCH_ROWS, BLANK, parse_json
from pipeline.planner.readers.plain_types import shown
from pipeline.planner.segment_sizes import SegmentSizes
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.limits import Limits
from schemas.requests.parsing import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL

CONTENT = ("body", "messages", "prompt")
TO_EMBED = "input"


MAX_COLUMNS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive rows of a file.

    Attributes:
        errors: rows of the table that couldn't be read, and why.
        lines: the line of each row in its file, from 1; None: rows have no lines, and are numbered.
    """

    table: pa.Table
    errors: Mapping[int, RowError] = field(default_factory=dict)
    lines: Sequence[int] | None = None

    def slice(self, start: int, rows: int) -> Piece:
        """Up to so many rows from `start` on."""
        errors = {row - start: error for row, error in self.errors.items() if 0 <= row - start < rows}
        lines = None if self.lines is None else self.lines[start : start + rows]
        return Piece(self.table.slice(start, rows), errors, lines)


class ColumnFile(Protocol):
    """A file of named columns.

    Attributes:
        schema: plain, see `plain_schema`.  declared_rows: a lower bound of the number of rows, known before reading.
    """

    name: str
    schema: pa.Schema
    declared_rows: int

    def pieces(self) -> Iterator[Piece]:
        """The rows in order, a few at a time, as `schema`.

        Raises:
            InputError: the file can't be read.  BrokenInput: it can't be decoded, or decodes to far more than its size.
        """
        ...


class ColumnSource:
    """Files of the same columns, concatenated, as one input.

    Args:
        model: the model of rows with `messages` or `prompt`.
    Raises:
        InputError: columns are missing or ambiguous, or differ between the files.
        TooManyRows: the files declare more rows than a job may have.
    """

    def __init__(self, files: Sequence[ColumnFile], limits: Limits, model: str | None) -> None:
        self._files = tuple(files)
        self._limits = limits
        self._model = model
        for file, declared in zip(self._files, accumulate(file.declared_rows for file in self._files), strict=True):
            if declared > limits.max_rows:
                raise TooManyRows(file.name, limits.max_rows)
        name, schema = self._files[0].name, self._files[0].schema
        for file in self._files:
            if not file.schema.equals(schema):
                raise InputError(f"{file.name} has other columns than {name}; submit them as two jobs")
        self._content = _content_column(name, schema)
        if self._content != "body" and model is None:
            raise InputError(f"{name}: the column {self._content} names no model; give one model, or a body column")
        own = {"custom_id", self._content} | ({"url", "method"} if self._content == "body" else set())
        self._own = [name for name in schema.names if name in own]
        names = [name for name in schema.names if name not in own]
        self._carried = pa.schema([schema.field(name) for name in names]) if names else None

    @property
    def carried(self) -> pa.Schema | None:
        return self._carried

    def batches(self, sizes: SegmentSizes) -> Iterator[SourceBatch]:
        row = 0
        for file in self._files:
            file_start = first = row
            pieces: list[Piece] = []
            size = 0
            for whole in file.pieces():
                start = 0
                while start < whole.table.num_rows:
                    piece = whole.slice(start, sizes.end(row) - row)
                    start += piece.table.num_rows
                    row += piece.table.num_rows
                    if row > self._limits.max_rows:  # there may be more than the file declares
                        raise TooManyRows(file.name, self._limits.max_rows)
                    size += piece.table.nbytes
                    pieces.append(piece)
                    if row - first >= BATCH_ROWS or size >= BATCH_BYTES or row == sizes.end(row - 1):
                        yield self._batch(file, pieces, first, first - file_start + 1)
                        pieces, first, size = [], row, 0
            if pieces:
                yield self._batch(file, pieces, first, first - file_start + 1)

    def _batch(self, file: ColumnFile, pieces: Sequence[Piece], row: int, number: int) -> SourceBatch:
        """The batch of some rows; `number` is the first one's in its file, from 1."""
        table = pa.concat_tables([piece.table for piece in pieces])
        where = f"{file.name}: rows {number} to {number + table.num_rows - 1}"
        columns = {}
        for name in self._own:
            with decoding(f"{where}, column {name}"):
                columns[name] = cells_of(table.column(name), name, self._limits.max_line_bytes)
        values = [
            self._line({name: cells[index] for name, cells in columns.items()}) for index in range(table.num_rows)
        ]
        lines: list[int] = []
        for piece in pieces:
            start = len(lines)
            for index, error in piece.errors.items():
                values[start + index] = error
            lines += piece.lines or range(number + start, number + start + piece.table.num_rows)
        carried = None
        if self._carried is not None:
            with decoding(f"{where}, columns carried through"):
                carried = self._refuse_large(table.select(self._carried.names), values)
                carried.validate(full=True)
        rows = [SourceRow(row + index, line, values[index]) for index, line in enumerate(lines)]
        return SourceBatch(row, row + table.num_rows, rows, carried, file.name if len(self._files) > 1 else "")

    def _refuse_large(self, carried: pa.Table, values: list[object]) -> pa.Table:
        """The columns to carry, with nulls in rows that are too large; the `values` of these rows become errors."""
        limit = self._limits.max_carried_bytes
        if carried.nbytes <= limit:
            return carried
        sizes = row_bytes(carried, limit)
        large = sizes > limit
        if not large.any():
            return carried
        for index in large.nonzero()[0].tolist():
            values[index] = _error(
                RowErrorCode.INVALID_REQUEST,
                f"the columns that are carried through hold {sizes[index]} bytes, but {limit} are allowed; shorten "
                "them, or leave them out (limits.max_carried_bytes)",
                shown(carried.column_names[0]),
            )
        return carried.take(pa.array(range(len(values)), pa.int64(), mask=large))

    def _line(self, cells: dict[str, Any]) -> object:
        """The input line of a row, or the error of a row without one."""
        for cell in cells.values():
            if isinstance(cell, RowError):
                return cell
        content = cells[self._content]
        if content is None:
            return _error(RowErrorCode.INVALID_REQUEST, f"the column {self._content} is null; fill it", self._content)
        line: dict[str, Any] = {}
        if cells["custom_id"] is not None:
            line["custom_id"] = cells["custom_id"]
        if self._content == "prompt":
            return line | {"method": "POST", "url": COMPLETIONS_URL, "body": {"model": self._model, "prompt": content}}
        if self._content == TO_EMBED:
            return line | {"method": "POST", "url": EMBEDDINGS_URL, "body": {"model": self._model, "input": content}}
        value = self._parsed(content) if isinstance(content, str | bytes) else content
        if isinstance(value, RowError):
            return value
        if self._content == "messages":
            if isinstance(value, list):  # a struct column has null for fields that a message lacks
                value = [_without_nulls(message) for message in value]
            return line | {"method": "POST", "url": CHAT_URL, "body": {"model": self._model, "messages": value}}
        url = _url_of(value)
        given = {name: cells[name] for name in ("url", "method") if cells.get(name) is not None}
        return {"method": "POST", "url": url, "body": value} | line | given

    def _parsed(self, content: str | bytes) -> object:
        value = parse_json(content.encode() if isinstance(content, str) else content, self._limits)
        if value is BLANK:
            return _error(RowErrorCode.INVALID_JSON, f"the column {self._content} is empty; fill it", self._content)
        return value


def check_columns(name: str, count: int) -> None:
    """Raise `InputError` for a file of more than `MAX_COLUMNS` columns."""
    if count > MAX_COLUMNS:
        raise InputError(f"{name} has {count} columns, but {MAX_COLUMNS} are allowed; leave some out")


def _url_of(body: object) -> str:
    """The default url of a body."""
    if not isinstance(body, dict):
        return CHAT_URL
    if "prompt" in body:
        return COMPLETIONS_URL
    return EMBEDDINGS_URL if TO_EMBED in body and "messages" not in body else CHAT_URL


def _content_column(name: str, schema: pa.Schema) -> str:
    check_columns(name, len(schema.names))
    columns = _listed(schema.names) or "none"
    doubled = sorted(column for column, count in Counter(schema.names).items() if count > 1)
    if doubled:
        raise InputError(f"{name} has columns of the same name ({_listed(doubled)}); rename them")
    if "custom_id" not in schema.names:
        raise InputError(
            f"{name} lacks the column custom_id (it has: {columns}); add it, or give 'tokenmill run' a --prompt "
            "FILE, which makes a request of each row"
        )
    found = [column for column in CONTENT if column in schema.names] or [TO_EMBED] * (TO_EMBED in schema.names)
    if len(found) != 1:
        what = "has more than one of" if found else "lacks one of"
        raise InputError(
            f"{name} {what} the columns {', '.join(CONTENT)} and {TO_EMBED} (it has: {columns}); keep exactly one"
        )
    if not pa.types.is_string(schema.field("custom_id").type) and not pa.types.is_large_string(
        schema.field("custom_id").type
    ):
        kind = shown(str(schema.field("custom_id").type))
        raise InputError(f"{name}: the column custom_id is {kind}; make it a string")
    return found[0]


def _listed(names: Sequence[str]) -> str:
    """The names for messages, as far as they fit."""
    return ", ".join(shown(name) for name in names[:100])[:1000]


def _without_nulls(message: object) -> object:
    if isinstance(message, dict):
        return {name: value for name, value in message.items() if value is not None}
    return message


def _error(code: RowErrorCode, message: str, param: str) -> RowError:
    return RowError(code, message, param=param)
