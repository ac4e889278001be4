"""10,000 rows and 1,000 more, without a model: exactly the new rows are computed, from a table of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
import structlog

import tokenmill as tm
from benchmarks.columns import NullModel
from tests.tokenmill.frames.test_reuse import computed, manifest
from tokenmill.frames.data.kinds import open_frame

PROMPT = "{{ text }} on {{ day }}: {{ pair }}, {{ tags }}, {{ grade }}{{ nothing }}"
GRADES = ["low", "high"]


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": n, "text": f"number {n}", "day": date(1960, 1, 1) + timedelta(n) if n % 7 else None,
            "pair": {"a": n, "b": ["x"] * (n % 3)} if n % 5 else None, "tags": [f"tag {n % 9}", "ü"] if n % 4 else None,
            "grade": GRADES[n % 2] if n % 3 else None, "nothing": None,
        }
        for n in range(count)
    ]  # fmt: skip


def arrow(given: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(
        given,
        pa.schema({
            "id": pa.int64(), "text": pa.string(), "day": pa.date32(),
            "pair": pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())}), "tags": pa.list_(pa.string()),
            "grade": pa.dictionary(pa.int32(), pa.string()), "nothing": pa.null(),
        }),
    )  # fmt: skip


def polars_frame(given: list[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(pl.from_arrow(arrow(given))).with_columns(pl.col("grade").cast(pl.Enum(GRADES)))


def relation(given: list[dict[str, Any]]) -> Any:
    connection = duckdb.connect()
    connection.register("data", arrow(given).drop_columns("grade"))
    return connection.sql(
        "select *, case when id % 3 = 0 then null when id % 2 = 0 then 'low' else 'high' end::ENUM('low', 'high') "
        "as grade from data order by id"
    )


def dataset(given: list[dict[str, Any]]) -> Any:
    import datasets  # noqa: PLC0415  # takes seconds

    features = datasets.Features.from_arrow_schema(arrow(given[:1]).drop_columns("grade").schema)
    features["grade"] = datasets.ClassLabel(names=GRADES)
    return datasets.Dataset.from_list(given, features)


def dataset_of(table: pa.Table) -> Any:
    import datasets  # noqa: PLC0415  # likewise

    return datasets.Dataset(table)


Make = Callable[[list[dict[str, Any]]], Any]
KINDS: dict[str, tuple[Make, Callable[[pl.DataFrame], Any]]] = {
    # How a table is made, and a table of answers that a former call returned.
    "pandas": (lambda given: arrow(given).to_pandas(), lambda former: former.to_pandas()),
    "polars": (polars_frame, lambda former: former),
    "duckdb": (relation, lambda former: duckdb.from_arrow(former.to_arrow())),
    "datasets": (dataset, lambda former: dataset_of(former.to_arrow())),
}


@pytest.fixture
def model(model_folder: Path) -> Iterator[NullModel]:
    """A model without weights, which writes random tokens."""
    with NullModel(f"null={model_folder}", {"threads": 1}) as made:
        yield made
    structlog.reset_defaults()


@pytest.mark.exhaustive
def test_given_a_finished_table_when_rows_are_appended_to_any_kind_then_exactly_these_are_computed(
    model: NullModel, folder: Path
) -> None:
    old, all_rows = 10_000, rows(11_000)
    arguments: Any = {"model": model, "max_tokens": 2, "temperature": 0}
    first = tm.map(polars_frame(all_rows[:old]), prompt=PROMPT, **arguments, output_dir=folder / "first")
    assert computed(folder / "first") == list(range(old))
    assert first["answer"].null_count() == 0
    answers = first.select(pl.col("^answer.*$"))

    for name, (make, former) in KINDS.items():
        given, job = make(all_rows), folder / name
        found = tm.map(given, prompt=PROMPT, **arguments, output_dir=job, reuse=former(answers))

        assert computed(job) == list(range(old, len(all_rows))), name
        assert (manifest(job)["reused"], manifest(job)["counts"]["succeeded"]) == (old, len(all_rows)), name
        assert type(found) is type(given)
        assert list(open_frame(found).cells(list(all_rows[0]))) == all_rows, "its own columns are as they were"
        taken = list(open_frame(found).cells(["answer", "answer_finish_reason", "answer_key", "answer_reused"]))
        assert [row.pop("answer_reused") for row in taken] == [True] * old + [False] * (len(all_rows) - old)
        assert taken[:old] == answers.select("answer", "answer_finish_reason", "answer_key").to_dicts()

    changed = PROMPT.replace(" on ", " at ")
    tm.map(polars_frame(all_rows), prompt=changed, **arguments, output_dir=folder / "changed", reuse=folder / "polars")
    assert computed(folder / "changed") == list(range(len(all_rows)))
