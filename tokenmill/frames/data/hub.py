"""Datasets of Hugging Face's library: new columns have features of their own, an enum's is a `ClassLabel`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from tokenmill.errors import InvalidCall
from tokenmill.frames.data.frame import BATCH_ROWS, enums

REFUSED = {
    "DatasetDict": 'choose one of its splits, as data["train"]',
    "IterableDataset": "load it without streaming=True, or take rows: datasets.Dataset.from_list(list(data.take(99)))",
    "IterableDatasetDict": 'load it without streaming=True, and choose one of its splits, as data["train"]',
}
"""Classes of the library that are no tables, and what to do."""


def check_kind(data: Any) -> None:
    """Raise `InvalidCall` if the data is several tables or a stream."""
    library = sys.modules.get("datasets")
    for name, fix in REFUSED.items():
        kind = getattr(library, name, None)
        if isinstance(kind, type) and isinstance(data, kind):
            raise InvalidCall(f"data: is a {name}; {fix}")


class DatasetFrame:
    """A `datasets.Dataset`. A cell of a `ClassLabel` is read as its name; no image or sound is decoded."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.columns = tuple(dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def cells(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """See `Frame`."""
        if not columns:
            yield from ({} for _ in range(len(self)))
            return
        kinds = self._dataset.features
        labels = {name: kinds[name] for name in columns if isinstance(kinds[name], _library().ClassLabel)}
        for table in self._dataset.select_columns(list(columns)).with_format("arrow").iter(BATCH_ROWS):
            for row in table.to_pylist():
                for name, label in labels.items():
                    row[name] = None if row[name] is None else label.int2str(row[name])
                yield row

    def null_counts(self, columns: Sequence[str]) -> dict[str, int]:
        """See `Frame`."""
        counts = dict.fromkeys(columns, 0)
        if counts:
            for table in self._dataset.select_columns(list(columns)).with_format("arrow").iter(BATCH_ROWS):
                for name in columns:
                    counts[name] += table[name].null_count
        return counts

    def with_columns(self, added: pa.Table) -> Any:
        """See `Frame`. The dataset keeps its split and format, which shows the new columns as well."""
        library, given = _library(), self._dataset.format
        made = _joined(library, self._dataset.with_format(None), _as_dataset(library, added))
        return made.with_format(
            given["type"], [*given["columns"], *added.column_names], given["output_all_columns"],
            **given["format_kwargs"],
        )  # fmt: skip

    def slice(self, start: int, rows: int) -> DatasetFrame:
        """See `Frame`."""
        return DatasetFrame(self._dataset.select(range(start, min(start + rows, len(self)))))

    def to_arrow(self) -> pa.Table:
        """See `Frame`. The schema's metadata has the features, so that the library reads them from Parquet."""
        return self._dataset.with_format("arrow")[:].cast(self._dataset.features.arrow_schema)


def _as_dataset(library: Any, table: pa.Table) -> Any:
    """The columns as a dataset, an enum as its codes with a `ClassLabel`."""
    known = enums(table)
    for name in known:
        codes = pa.chunked_array([chunk.indices.cast(pa.int64()) for chunk in table[name].chunks], pa.int64())
        table = table.set_column(table.column_names.index(name), name, codes)
    features = library.Features.from_arrow_schema(table.schema)
    features |= {name: library.ClassLabel(names=values) for name, values in known.items()}
    stored = library.table.InMemoryTable(table.cast(features.arrow_schema))
    return library.Dataset(stored, library.DatasetInfo(features=features))


def _joined(library: Any, one: Any, other: Any) -> Any:
    """The columns of both, of as many rows."""
    if len(one):
        return library.concatenate_datasets([one, other], axis=1, split=one.split)
    features = library.Features({**one.features, **other.features})  # without rows the library leaves one out
    empty = library.table.InMemoryTable(features.arrow_schema.empty_table())
    return library.Dataset(empty, library.DatasetInfo(features=features), split=one.split)


def _library() -> Any:
    return sys.modules["datasets"]
