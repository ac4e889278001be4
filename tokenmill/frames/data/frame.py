"""The seam of tables: what every kind of table gives and takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import pyarrow as pa

BATCH_ROWS: Final = 1_000


class Frame(Protocol):
    """A table of any kind.

    Attributes:
        columns: the names of its columns, in their order.
    """

    columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def cells(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Each row's cells of these columns, as Python values."""
        ...

    def null_counts(self, columns: Sequence[str]) -> dict[str, int]:
        """How many cells of each column are null."""
        ...

    def with_columns(self, added: pa.Table) -> Any:
        """A table of the same kind with these columns behind its own."""
        ...

    def slice(self, start: int, rows: int) -> Frame:
        """These rows, as many as there are."""
        ...

    def to_arrow(self) -> pa.Table:
        """The whole table, with texts in place of enums. Raises `InvalidCall` if its columns have no Arrow types."""
        ...


def rows_of(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
        yield from batch.to_pylist()


def enums(table: pa.Table) -> dict[str, list[str]]:
    """The values of each column that is an enum, in their order."""
    return {
        name: column.chunk(0).dictionary.to_pylist() if column.num_chunks else []
        for name, column in zip(table.column_names, table.columns, strict=True)
        if pa.types.is_dictionary(column.type)
    }


def without_enums(table: pa.Table) -> pa.Table:
    """The table with the values of enums in their place."""
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields, table.schema.metadata))
