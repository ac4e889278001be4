"""The kinds of tables that go in and come out: pandas, polars, Arrow, DuckDB, lists of dicts, and files.

Only the columns that prompts use are read. New columns are added to the given object, so the others come back with
their types and values untouched. No library is imported here that the caller has not imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from tokenmill.errors import InvalidCall
from tokenmill.frames.data.files import read_files
from tokenmill.frames.data.frame import Frame, enums, rows_of, without_enums
from tokenmill.frames.data.hub import DatasetFrame, check_kind


def open_frame(data: Any) -> Frame:
    """The data as a frame; a path, glob or s3:// URL is read whole. Raises `InvalidCall`."""
    if isinstance(data, str | os.PathLike):
        return ArrowFrame(read_files(os.fspath(data)))
    if isinstance(data, pa.Table):
        return ArrowFrame(data)
    if isinstance(data, list):
        return DictsFrame(data)
    if isinstance(data, _imported("pandas", "DataFrame")):
        return PandasFrame(data)
    if isinstance(data, _imported("polars", "DataFrame")):
        return PolarsFrame(data)
    if isinstance(data, _imported("duckdb", "DuckDBPyRelation")):
        return DuckDbFrame(data)
    if isinstance(data, _imported("datasets", "Dataset")):
        return DatasetFrame(data)
    check_kind(data)
    hint = "; call .collect() first" if isinstance(data, _imported("polars", "LazyFrame")) else ""
    raise InvalidCall(
        f"data: is a {type(data).__name__}, but must be a pandas or polars DataFrame, an Arrow table, a DuckDB "
        f"relation, a datasets.Dataset, a list of dicts, or the path of Parquet, CSV or JSONL files{hint}"
    )


def _imported(module: str, name: str) -> type | tuple[()]:
    """The class, if the caller has imported its library; else no class."""
    found = sys.modules.get(module)
    kind = getattr(found, name, None)
    return kind if isinstance(kind, type) else ()


class ArrowFrame:
    """An Arrow table."""

    def __init__(self, table: pa.Table) -> None:
        self.columns = tuple(table.column_names)
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def cells(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        if not columns:
            yield from ({} for _ in range(len(self)))
        else:
            yield from rows_of(self._table.select(list(columns)))

    def null_counts(self, columns: Sequence[str]) -> dict[str, int]:
        return {name: self._table[name].null_count for name in columns}

    def with_columns(self, added: pa.Table) -> pa.Table:
        table = self._table
        for field, column in zip(added.schema, added.columns, strict=True):
            table = table.append_column(field, column)
        return table

    def slice(self, start: int, rows: int) -> ArrowFrame:
        return ArrowFrame(self._table.slice(start, rows))

    def to_arrow(self) -> pa.Table:
        return without_enums(self._table)


class DictsFrame:
    """A list of dicts; a key that a row lacks is null there."""

    def __init__(self, rows: list[Any]) -> None:
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                raise InvalidCall(f"data: row {index} is a {type(row).__name__}, but must be a dict")
        self._rows: list[dict[Any, Any]] = rows
        self.columns = tuple(dict.fromkeys(name for row in rows for name in row if isinstance(name, str)))

    def __len__(self) -> int:
        return len(self._rows)

    def cells(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        for row in self._rows:
            yield {name: row.get(name) for name in columns}

    def null_counts(self, columns: Sequence[str]) -> dict[str, int]:
        return {name: sum(row.get(name) is None for row in self._rows) for name in columns}

    def with_columns(self, added: pa.Table) -> list[dict[Any, Any]]:
        return [{**row, **new} for row, new in zip(self._rows, rows_of(added), strict=True)]

    def slice(self, start: int, rows: int) -> DictsFrame:
        return DictsFrame(self._rows[start : start + rows])

    def to_arrow(self) -> pa.Table:
        try:
            return pa.Table.from_pylist(list(self.cells(self.columns)))
        except (pa.ArrowException, TypeError) as error:
            raise InvalidCall(f"data: a column mixes types: {error}; convert it to text") from error


class PandasFrame:
    """A pandas DataFrame. Integers and truth values with nulls become pandas' own nullable types, enums categories,
    vectors numpy's arrays, other lists and structs Python's lists and dicts."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self.columns = tuple(name for name in frame.columns if isinstance(name, str))

    def __len__(self) -> int:
        return len(self._frame)

    def cells(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        if not columns:
            yield from ({} for _ in range(len(self)))
            return
        yield from rows_of(self._arrow(columns))

    def null_counts(self, columns: Sequence[str]) -> dict[str, int]:
        return {name: int(self._frame[name].isna().sum()) for name in columns}

    def with_columns(self, added: pa.Table) -> Any:
        pandas = sys.modules["pandas"]
        nullable = {pa.int32(): pandas.Int32Dtype(), pa.int64(): pandas.Int64Dtype(), pa.bool_(): pandas.BooleanDtype()}
        new: dict[str, Any] = {}
        for name, column in zip(added.column_names, added.columns, strict=True):
            if pa.types.is_fixed_size_list(column.type):
                values = column.to_pandas()
            elif pa.types.is_nested(column.type):
                values = pandas.Series(column.to_pylist(), dtype=object)
            else:
                values = column.to_pandas(types_mapper=nullable.get)
            new[name] = values.set_axis(self._frame.index)
        return self._frame.assign(**new)

    def slice(self, start: int, rows: int) -> PandasFrame:
        return PandasFrame(self._frame.iloc[start : start + rows])

    def to_arrow(self) -> pa.Table:
        return without_enums(self._arrow(self.columns))

    def _arrow(self, columns: Sequence[str]) -> pa.Table:
        try:
            table = pa.Table.from_pandas(self._frame[list(columns)], preserve_index=False)
        except pa.ArrowException as error:
            raise InvalidCall(f"data: a column mixes types: {error}; convert it to text") from error
        return table.replace_schema_metadata(None)


class PolarsFrame:
    """A polars DataFrame; an enum becomes `polars.Enum`."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self.columns = tuple(frame.columns)

    def __len__(self) -> int:
        return int(self._frame.height)

    def cells(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        yield from self._frame.select(columns).iter_rows(named=True) if columns else ({} for _ in range(len(self)))

    def null_counts(self, columns: Sequence[str]) -> dict[str, int]:
        return {name: self._frame[name].null_count() for name in columns}

    def with_columns(self, added: pa.Table) -> Any:
        polars = sys.modules["polars"]
        new = polars.from_arrow(added)
        typed = [polars.col(name).cast(polars.Enum(values)) for name, values in enums(added).items()]
        return self._frame.hstack(new.with_columns(typed))

    def slice(self, start: int, rows: int) -> PolarsFrame:
        return PolarsFrame(self._frame.slice(start, rows))

    def to_arrow(self) -> pa.Table:
        oldest = sys.modules["polars"].CompatLevel.oldest()  # others' readers don't have views of strings
        return without_enums(self._frame.to_arrow(compat_level=oldest))


class DuckDbFrame:
    """A DuckDB relation, fetched once. The result is a relation of the same connection."""

    def __init__(self, relation: Any, table: pa.Table | None = None) -> None:
        self._relation = relation
        self._table = relation.to_arrow_table() if table is None else table
        self._arrow = ArrowFrame(self._table)
        self.columns = self._arrow.columns

    def __len__(self) -> int:
        return len(self._arrow)

    def cells(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        return self._arrow.cells(columns)

    def null_counts(self, columns: Sequence[str]) -> dict[str, int]:
        return self._arrow.null_counts(columns)

    def with_columns(self, added: pa.Table) -> Any:
        types = dict(zip(self._relation.columns, map(str, self._relation.types), strict=True))
        for name, values in enums(added).items():
            listed = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
            types[name] = f"ENUM({listed})"
        answered = self._arrow.with_columns(added)
        selected = ", ".join(
            f"{quoted}::{types[name]} AS {quoted}" if name in types else quoted
            for name, quoted in ((name, '"' + name.replace('"', '""') + '"') for name in answered.column_names)
        )
        assert answered.num_rows == len(self)  # the query below reads the variable `answered`
        return self._relation.query("input_data", f"SELECT {selected} FROM answered")  # noqa: S608  # quoted above

    def slice(self, start: int, rows: int) -> DuckDbFrame:
        return DuckDbFrame(self._relation, self._table.slice(start, rows))

    def to_arrow(self) -> pa.Table:
        return self._arrow.to_arrow()
