"""Parquet as an input: row groups streamed, each row made into the line it stands for.

`custom_id` and one of `body` (JSON), `messages` or `prompt` make the request, or `input` (to be embedded) where there
is none of these; beside `body`, `url` and `method` are understood too. Every other column is carried through to the
results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.planner.api import InputError, SourceBatch, SourceFile, SourceRow
from pipeline.planner.reader import BATCH_ROWS, BLANK, parse_json
from pipeline.planner.sizes import SegmentSizes
from schemas.errors import RowError, RowErrorCode
from schemas.limits import Limits
from schemas.requests import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL

CONTENT = ("body", "messages", "prompt")
TO_EMBED = "input"


class ParquetSource:
    """Some Parquet files of one schema, one after the other, as one input.

    Args:
        model: what rows made of `messages` or `prompt` run on.
    Raises:
        InputError: a file is not Parquet, columns are missing or ambiguous, or schemas differ.
    """

    def __init__(self, files: Sequence[SourceFile], limits: Limits, model: str | None) -> None:
        self._files = tuple(files)
        self._limits = limits
        self._model = model
        schemas = [_plain(_schema(file)) for file in self._files]
        for file, schema in zip(self._files, schemas, strict=True):
            if not schema.equals(schemas[0]):
                raise InputError(f"{file.name} has other columns than {self._files[0].name}; submit them as two jobs")
        self._schema = schemas[0]
        self._content = _content_column(self._files[0].name, schemas[0])
        if self._content != "body" and model is None:
            raise InputError(
                f"{self._files[0].name}: the column {self._content} names no model; give one model, or a body column"
            )
        own = {"custom_id", self._content} | ({"url", "method"} if self._content == "body" else set())
        self._own = [name for name in schemas[0].names if name in own]
        names = [name for name in schemas[0].names if name not in own]
        self._carried = pa.schema([schemas[0].field(name) for name in names]) if names else None

    @property
    def carried(self) -> pa.Schema | None:
        return self._carried

    def batches(self, sizes: SegmentSizes) -> Iterator[SourceBatch]:
        row = 0
        for file in self._files:
            file_start = row
            with file.open() as stream:
                for table in _tables(file, stream):
                    table = table.cast(self._schema)
                    start = 0
                    while start < table.num_rows:
                        count = min(table.num_rows - start, sizes.end(row) - row)
                        yield self._batch(file, table.slice(start, count), row, row - file_start + 1)
                        start += count
                        row += count

    def _batch(self, file: SourceFile, table: pa.Table, row: int, line: int) -> SourceBatch:
        columns = {name: table.column(name).to_pylist() for name in self._own}
        rows = [
            SourceRow(row + index, line + index, self._line({name: values[index] for name, values in columns.items()}))
            for index in range(table.num_rows)
        ]
        carried = table.select(self._carried.names) if self._carried is not None else None
        return SourceBatch(row, row + table.num_rows, rows, carried, file.name if len(self._files) > 1 else "")

    def _line(self, cells: dict[str, Any]) -> object:
        """The input line a row stands for, or the error why it stands for none."""
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
            if isinstance(value, list):  # a struct column gives null for what a message does not have
                value = [_without_nulls(message) for message in value]
            return line | {"method": "POST", "url": CHAT_URL, "body": {"model": self._model, "messages": value}}
        url = _url_of(value)
        given = {name: cells[name] for name in ("url", "method") if cells.get(name) is not None}
        return {"method": "POST", "url": url, "body": value} | line | given

    def _parsed(self, content: str | bytes) -> object:
        data = content.encode() if isinstance(content, str) else content
        if len(data) > self._limits.max_line_bytes:
            message = f"the column {self._content} is longer than {self._limits.max_line_bytes} bytes; shorten it"
            return _error(RowErrorCode.INVALID_JSON, message, self._content)
        value = parse_json(data, self._limits)
        if value is BLANK:
            return _error(RowErrorCode.INVALID_JSON, f"the column {self._content} is empty; fill it", self._content)
        return value


def _url_of(body: object) -> str:
    """The url that a body without one is meant for."""
    if not isinstance(body, dict):
        return CHAT_URL
    if "prompt" in body:
        return COMPLETIONS_URL
    return EMBEDDINGS_URL if TO_EMBED in body and "messages" not in body else CHAT_URL


def _tables(file: SourceFile, stream: BinaryIO) -> Iterator[pa.Table]:
    try:
        parquet = pq.ParquetFile(stream)
        for group in range(parquet.num_row_groups):  # Arrow can't read nested dictionaries across groups
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS, row_groups=[group]):
                yield pa.Table.from_batches([batch])
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file.name} can't be read: {error}") from error


def _schema(file: SourceFile) -> pa.Schema:
    try:
        with file.open() as stream:
            return pq.read_schema(stream).remove_metadata()
    except pa.ArrowInvalid as error:
        raise InputError(f"{file.name} is not a Parquet file: {error}") from error


def _plain(schema: pa.Schema) -> pa.Schema:
    """The schema with values in place of dictionary codes: each row group has a dictionary of its own, and a column
    that is taken from several could not have one."""
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


def _content_column(name: str, schema: pa.Schema) -> str:
    columns = ", ".join(schema.names) or "none"
    doubled = {column for column in schema.names if schema.names.count(column) > 1}
    if doubled:
        raise InputError(f"{name} has columns of the same name ({', '.join(sorted(doubled))}); rename them")
    if "custom_id" not in schema.names:
        raise InputError(f"{name} lacks the column custom_id (it has: {columns}); add it")
    found = [column for column in CONTENT if column in schema.names] or [TO_EMBED] * (TO_EMBED in schema.names)
    if len(found) != 1:
        what = "has more than one of" if found else "lacks one of"
        raise InputError(
            f"{name} {what} the columns {', '.join(CONTENT)} and {TO_EMBED} (it has: {columns}); keep exactly one"
        )
    if not pa.types.is_string(schema.field("custom_id").type) and not pa.types.is_large_string(
        schema.field("custom_id").type
    ):
        raise InputError(f"{name}: the column custom_id is {schema.field('custom_id').type}; make it a string")
    return found[0]


def _without_nulls(message: object) -> object:
    if isinstance(message, dict):
        return {name: value for name, value in message.items() if value is not None}
    return message


def _error(code: RowErrorCode, message: str, param: str) -> RowError:
    return RowError(code, message, param=param)
