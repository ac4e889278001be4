"""Reader of CSV (RFC 4180): UTF-8, commas, a header with the names of the columns, and double quotes around texts that
contain commas, quotes or line ends. All cells are text, and an empty one is null.

A row whose cells can't be told apart is that row's error, as long as it is clear where the next row begins. A quote
that isn't closed properly leaves that open, so it is the job's error.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Final, NamedTuple

import pyarrow as pa

from pipeline.planner.ports import BrokenInput, InputError, SourceFile
from pipeline.planner.readers.columns import Piece, check_columns
from pipeline.planner.readers.decompression import decompressed
from pipeline.planner.readers.expansion import MAX_DECODED_ROWS, ExpansionLimit
from pipeline.planner.readers.jsonl import BATCH_BYTES, refuse_other_formats
from pipeline.planner.readers.lines import BOM, lines_of
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.limits import Limits

MAX_ROW_LINES: Final = 4
"""The bytes of a row, as a multiple of the longest line of JSONL. Beyond it a missing quote is likely."""

MAX_HEADER_BYTES: Final = 1 << 20
"""Maximum bytes of the header: a hundred for each of `MAX_COLUMNS`."""

MAX_REFUSED_CELLS: Final = 10_000_000
"""Maximum cells of refused rows, beyond one for each byte that was read. Such a row is null in all columns, which takes
as long as the cells of a whole row; but a whole row has a byte for each of them."""


class CsvColumns:
    """A CSV file, which may be compressed, as `ColumnFile`.

    Raises:
        InputError: the file can't be read, or is in another format.  BrokenInput: it has no usable header.
    """

    declared_rows = 0

    def __init__(self, file: SourceFile, limits: Limits) -> None:
        self.name = file.name
        self._stored = file
        self._file = decompressed(file)
        self._max_bytes = MAX_ROW_LINES * limits.max_line_bytes
        refuse_other_formats(self._file)
        with closing(self._rows(min(MAX_HEADER_BYTES, self._max_bytes))) as rows:
            header = next(rows, None)
        if header is None:
            raise BrokenInput(f"{self.name} is empty; begin it with a header: the names of the columns, with commas")
        if header.error is not None:
            raise BrokenInput(f"{self.name}: line {header.line}: the header can't be read: {header.error.message}")
        if len(header.cells) == 1 and (other := [mark for mark in ";\t|" if mark in header.cells[0]]):
            raise InputError(f"{self.name}: the header has {other[0]!r} between names; separate the columns by commas")
        check_columns(self.name, len(header.cells))  # fields are larger than the commas that ask for them
        self.schema = pa.schema([(name, pa.string()) for name in header.cells])

    def pieces(self) -> Iterator[Piece]:
        """See `ColumnFile`."""
        with self._stored.open() as stream:
            limit = ExpansionLimit(stream.seek(0, os.SEEK_END), "CSV", "leave out rows without all cells, or columns")
        with closing(self._rows(self._max_bytes)) as rows:
            next(rows, None)
            found: list[_Row] = []
            size = refused = read = 0
            for row in rows:
                found.append(self._checked(row))
                size += row.size
                read += row.size
                if found[-1].error is not None:
                    refused += len(self.schema)
                    self._check_refused(refused, read, row.line)
                if len(found) == MAX_DECODED_ROWS or size >= BATCH_BYTES:
                    yield self._piece(found, limit)
                    found, size = [], 0
            if found:
                yield self._piece(found, limit)

    def _checked(self, row: _Row) -> _Row:
        if row.error is None and len(row.cells) != len(self.schema):
            message = (
                f"the row has {len(row.cells)} cells, but the header has {len(self.schema)}; give one for each column, "
                "and put texts with commas in double quotes"
            )
            return row._replace(cells=[], error=_invalid(message))
        return row

    def _check_refused(self, cells: int, read: int, line: int) -> None:
        if cells > MAX_REFUSED_CELLS + read:
            raise BrokenInput(
                f"{self.name}: line {line}: too many rows lack cells, or can't be read: {cells // len(self.schema)} up "
                f"to here, with {len(self.schema)} columns each; give each row a cell for each column, or leave out "
                "columns"
            )

    def _piece(self, rows: list[_Row], limit: ExpansionLimit) -> Piece:
        errors = {index: row.error for index, row in enumerate(rows) if row.error is not None}
        nulls = [None] * len(self.schema)
        columns = zip(*(nulls if row.error is not None else row.cells for row in rows), strict=True)
        arrays = [pa.array([cell or None for cell in column], pa.string()) for column in columns]
        table = pa.Table.from_arrays(arrays, schema=self.schema)
        # A row of a few bytes becomes nulls in all columns.
        limit.add(table.nbytes, f"{self.name}: line {rows[0].line}")
        return Piece(table, errors, [row.line for row in rows])

    def _rows(self, max_bytes: int) -> Generator[_Row]:
        """The rows of up to so many bytes, the header first; empty lines are none."""
        csv.field_size_limit(sys.maxsize)  # of the whole process; `_Lines` bounds rows, so the fields in them
        with closing(_Lines(self._file, max_bytes)) as lines:
            reader = csv.reader(lines, strict=True)
            while True:
                lines.begin_row()
                try:
                    cells = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    if lines.number != lines.first or "unexpected end" in str(error):
                        raise BrokenInput(
                            f"{self.name}: line {lines.first}: a quote that is open at the end of this line isn't "
                            f"closed properly up to line {lines.number} ({error}); double the quotes inside of texts"
                        ) from error
                    yield _Row(lines.first, [], lines.size, lines.error or _invalid(_explain(error)))
                    continue
                if cells or lines.error is not None:
                    yield _Row(lines.first, cells, lines.size, lines.error)


class _Row(NamedTuple):
    line: int
    cells: list[str]
    size: int
    error: RowError | None


class _Lines:
    """The lines of a file as text with their ends, for `csv.reader`; and which of them are the current row's.

    Attributes:
        first, number: of the row's first and latest line, from 1.  size: bytes of the row.
        error: the row's first line that is not UTF-8.
    """

    def __init__(self, file: SourceFile, max_bytes: int) -> None:
        self.first = self.number = self.size = 0
        self.error: RowError | None = None
        self._name = file.name
        self._max_bytes = max_bytes
        self._lines = lines_of(file, max_bytes)

    def begin_row(self) -> None:
        self.first, self.size, self.error = self.number + 1, 0, None

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        self.size += len(line or b"") + 1  # a row may be little else than line ends
        if line is None or self.size > self._max_bytes:
            raise BrokenInput(
                f"{self._name}: line {self.first}: the row is longer than {self._max_bytes} bytes; close its quotes, "
                "shorten it, or submit such rows as JSONL"
            )
        if self.number == 1:
            line = line.removeprefix(BOM)
        try:
            text = line.decode()
        except UnicodeDecodeError as bad:
            text = line.decode(errors="replace")
            where = f"byte {bad.start + 1} of line {self.number} is 0x{line[bad.start]:02x}"
            self.error = self.error or _invalid(f"the row is not UTF-8: {where}; save the file as UTF-8")
        return text + "\n"

    def close(self) -> None:
        self._lines.close()


def _invalid(message: str) -> RowError:
    return RowError(RowErrorCode.INVALID_REQUEST, message)


def _explain(error: csv.Error) -> str:
    if "new-line character" in str(error):
        return "the row contains a carriage return outside of quotes; end lines with \\n or \\r\\n"
    return f"the row can't be divided into cells ({error}); double the quotes inside of texts"
