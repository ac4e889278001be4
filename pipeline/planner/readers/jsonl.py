"""Reader of JSONL as a byte stream, in bounded memory: no broken line stops the reading of the next one.

A line is checked in this order: length, UTF-8, nesting, JSON; so nothing large or deep ever reaches a parser. If an
object repeats a key, the last one counts, as in every common JSON parser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import orjson

from pipeline.planner.ports import InputError, SourceBatch, SourceFile, SourceRow, TooManyRows
from pipeline.planner.readers.lines import BOM, lines_of
from pipeline.planner.segment_sizes import SegmentSizes
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.limits import Limits

BATCH_ROWS = 4096
BATCH_BYTES = 8 << 20
OTHER_FORMATS = {
    b"\x1f\x8b": "is compressed twice; decompress it once",
    b"\x28\xb5\x2f\xfd": "is compressed twice; decompress it once",
    b"PAR1": "is a Parquet file; rename it to .parquet",
    b"ARRO": "is an Arrow file; rename it to .arrow",
    b"\xff\xff\xff\xff": "is an Arrow stream; rename it to .arrow",
    b"\xff\xfe": "is UTF-16; save it as UTF-8",
    b"\xfe\xff": "is UTF-16; save it as UTF-8",
}
"""First bytes of files that hold no text, or text in another encoding -> the problem and its remedy."""
WHITESPACE = b" \t\r\v\f"

# Possessive: linear in the line's length for any content, and an unterminated string runs to the end.
STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class JsonlSource:
    """JSONL files, concatenated, as one input."""

    def __init__(self, files: Sequence[SourceFile], limits: Limits) -> None:
        self._files = tuple(files)
        self._limits = limits

    @property
    def carried(self) -> None:
        return None

    def batches(self, sizes: SegmentSizes) -> Iterator[SourceBatch]:
        row = 0
        for file in self._files:
            for batch in self._file_batches(file, row, sizes):
                row = batch.end_row
                yield batch

    def _file_batches(self, file: SourceFile, first_row: int, sizes: SegmentSizes) -> Iterator[SourceBatch]:
        """The batches of a file. Their boundaries depend on the file's content alone, not on the sizes of reads."""
        name = file.name if len(self._files) > 1 else ""
        file_start = start = row = first_row
        end = sizes.end(row)
        rows: list[SourceRow] = []
        size = 0
        longest = self._limits.max_line_bytes
        for line in lines_of(file, longest + 1):  # one more for the \r of a line end
            if row >= self._limits.max_rows:
                raise TooManyRows(f"{file.name}: line {row - file_start + 1}", self._limits.max_rows)
            data = _without_end(line, longest)
            if data and row == file_start:
                data = data.removeprefix(BOM)
            value = parse_json(data, self._limits) if data is not None else _too_long(self._limits)
            if value is not BLANK:
                rows.append(SourceRow(row, row - file_start + 1, value))
                size += len(data or b"")
            row += 1
            if row - start >= BATCH_ROWS or size >= BATCH_BYTES or row == end:
                yield SourceBatch(start, row, rows, name=name)
                start, rows, size, end = row, [], 0, sizes.end(row)
        if row > start:
            yield SourceBatch(start, row, rows, name=name)


BLANK = object()
"""The result of `parse_json` for a line of whitespace only."""


def parse_json(data: bytes, limits: Limits) -> object:
    """The parsed line, `BLANK`, or the parse error as a `RowError` (returned, not raised)."""
    data = data.strip(WHITESPACE)
    if not data:
        return BLANK
    if nested_deeper(data, limits.max_json_depth):
        return _invalid(f"the line nests brackets deeper than {limits.max_json_depth}; flatten it")
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return _explain(data, error)


def nested_deeper(data: bytes, limit: int) -> bool:
    """Whether brackets outside of strings nest deeper than `limit`; time linear in the line for any content."""
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    depth = 0
    for bracket in STRINGS.sub(b"", data).translate(None, NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > limit:
            return True
    return False


def refuse_other_formats(file: SourceFile) -> None:
    """Raise one `InputError` for a file of another format, of which every line would be an error."""
    with file.open() as stream:
        start = stream.read(4)
    for signature, what in OTHER_FORMATS.items():
        if start.startswith(signature):
            raise InputError(f"{file.name} {what}")


def _without_end(line: bytes | None, max_bytes: int) -> bytes | None:
    """The line without its `\\r`; None if it is longer than `max_bytes`."""
    line = None if line is None else line.removesuffix(b"\r")
    return line if line is not None and len(line) <= max_bytes else None


def _too_long(limits: Limits) -> RowError:
    return _invalid(f"the line is longer than {limits.max_line_bytes} bytes; shorten it")


def _invalid(message: str) -> RowError:
    return RowError(RowErrorCode.INVALID_JSON, message)


def _explain(data: bytes, error: orjson.JSONDecodeError) -> RowError:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as bad:
        return _invalid(
            f"the line is not UTF-8: byte {bad.start + 1} is 0x{data[bad.start]:02x}; save the file as UTF-8"
        )
    return _invalid(f"the line is not JSON: {error.msg} at column {error.pos + 1}")
