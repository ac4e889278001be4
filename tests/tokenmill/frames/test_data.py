"""Every kind of table comes back as it went in, with the new columns behind its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipeline.planner.readers import expansion
from tokenmill.errors import InvalidCall
from tokenmill.frames.data import files
from tokenmill.frames.data.kinds import open_frame

ROWS: list[dict[str, Any]] = [
    {
        "text": "one", "day": date(2024, 2, 29), "at": datetime(2024, 1, 1, 12, tzinfo=UTC),
        "pair": {"a": 1, "b": ["x"]}, "tags": ["p", "q"], "grade": "low", "nothing": None,
    },
    {"text": None, "day": None, "at": None, "pair": None, "tags": None, "grade": None, "nothing": None},
    {
        "text": "three", "day": date(1969, 12, 31), "at": datetime(2025, 6, 1, tzinfo=UTC),
        "pair": {"a": None, "b": []}, "tags": [], "grade": "high", "nothing": None,
    },
]  # fmt: skip
SCHEMA = pa.schema({
    "text": pa.string(), "day": pa.date32(), "at": pa.timestamp("us", "UTC"),
    "pair": pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())}), "tags": pa.list_(pa.string()),
    "grade": pa.dictionary(pa.int32(), pa.string()), "nothing": pa.null(),
})  # fmt: skip
TABLE = pa.Table.from_pylist(ROWS, SCHEMA)

ADDED = pa.table({
    "answer": pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.int32()), pa.array(["no", "yes", "it's"])),
    "parsed": pa.array([{"n": 1, "l": ["a"]}, None, {"n": None, "l": []}]),
    "listed": pa.array([["a"], None, []], pa.list_(pa.string())),
    "vector": pa.array([[0.5, 1], None, [2, 3]], pa.list_(pa.float32(), 2)),
    "empty": pa.nulls(3),
    "number": pa.array([0.25, None, 1.0]),
    "is_true": pa.array([True, None, False]),
    "tokens": pa.array([7, None, 9], pa.int32()),
})  # fmt: skip
ANSWERS = ADDED.to_pylist()


def relation() -> Any:
    connection = duckdb.connect()
    connection.register("data", TABLE.drop_columns("grade"))
    return connection.sql(
        "select *, case text when 'one' then 'low' when 'three' then 'high' end::ENUM('low', 'high') as grade from data"
    )


def arrow_types(table: pa.Table) -> dict[str, Any]:
    return {field.name: field.type for field in table.schema}


def relation_types(given: Any) -> dict[str, str]:
    return dict(zip(given.columns, map(str, given.types), strict=True))


def dataset() -> Any:
    import datasets  # noqa: PLC0415  # takes seconds

    kinds = datasets.Features.from_arrow_schema(SCHEMA.remove(SCHEMA.get_field_index("grade")))
    kinds["grade"] = datasets.ClassLabel(names=["low", "mid", "high"])
    return datasets.Dataset.from_list(ROWS, kinds)


def polars_frame() -> pl.DataFrame:
    return pl.DataFrame(pl.from_arrow(TABLE)).with_columns(pl.col("grade").cast(pl.Enum(["low", "mid", "high"])))


Kind = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], dict[str, Any]], dict[str, Any]]
KINDS: dict[str, Kind] = {
    # How it is made, a comparable form of it, its types, and those of new columns.
    "arrow": (lambda: TABLE, lambda found: found, arrow_types, arrow_types(ADDED)),
    "pandas": (
        lambda: TABLE.to_pandas().set_axis([5, 5, 1]),
        lambda found: found.astype(object).where(found.notna(), None).to_dict("tight"),
        lambda found: {name: str(found[name].dtype) for name in found},
        {
            "answer": "category", "parsed": "object", "listed": "object", "vector": "object", "empty": "object",
            "number": "float64", "is_true": "boolean", "tokens": "Int32",
        },
    ),
    "polars": (
        polars_frame, lambda found: found.to_dicts(), lambda found: dict(found.schema),
        {
            "answer": pl.Enum(["no", "yes", "it's"]), "parsed": pl.Struct({"n": pl.Int64, "l": pl.List(pl.String)}),
            "listed": pl.List(pl.String), "vector": pl.Array(pl.Float32, 2), "empty": pl.Null, "number": pl.Float64,
            "is_true": pl.Boolean, "tokens": pl.Int32,
        },
    ),
    "duckdb": (
        relation, lambda found: found.fetchall(), relation_types,
        {
            "answer": "ENUM('no', 'yes', 'it''s')", "parsed": "STRUCT(n BIGINT, l VARCHAR[])", "listed": "VARCHAR[]",
            "vector": "FLOAT[2]", "empty": '"NULL"', "number": "DOUBLE", "is_true": "BOOLEAN", "tokens": "INTEGER",
        },
    ),
    "datasets": (
        dataset, lambda found: found.to_list(), lambda found: {name: str(one) for name, one in found.features.items()},
        {
            "answer": "ClassLabel(names=['no', 'yes', \"it's\"])",
            "parsed": "{'n': Value('int64'), 'l': List(Value('string'))}", "listed": "List(Value('string'))",
            "vector": "List(Value('float32'), length=2)", "empty": "Value('null')", "number": "Value('float64')",
            "is_true": "Value('bool')", "tokens": "Value('int32')",
        },
    ),
}  # fmt: skip


def only(frame: Any, names: Sequence[str]) -> Any:
    """The frame's columns of these names."""
    if hasattr(frame, "select_columns"):
        return frame.select_columns(list(names))
    if isinstance(frame, duckdb.DuckDBPyRelation):
        return frame.select(*names)
    return frame[list(names)] if isinstance(frame, pd.DataFrame) else frame.select(list(names))


def test_given_nulls_in_every_kind_of_table_when_counted_then_the_counts_are_the_same() -> None:
    given = pa.table({"a": ["x", None, None], "b": [1.5, 2.5, None], "c": [1, 2, 3]})
    tables = [given, given.to_pylist(), given.to_pandas(), pl.from_arrow(given), duckdb.sql("select * from given")]
    for one in tables:
        assert open_frame(one).null_counts(["a", "b", "c"]) == {"a": 2, "b": 1, "c": 0}


def cells(frame: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    return list(open_frame(frame).cells(names))


@pytest.mark.parametrize("name", [*list(KINDS)[:-1], pytest.param("datasets", marks=pytest.mark.slow)])
def test_given_any_kind_when_columns_are_added_then_its_own_are_as_they_were_and_new_ones_have_its_types(
    name: str,
) -> None:
    make, comparable, types, wanted = KINDS[name]
    given = make()
    before, own = comparable(given), types(given)

    answered = open_frame(given).with_columns(ADDED)

    assert type(answered) is type(given)
    assert types(answered) == {**own, **wanted}
    names = list(own)
    assert comparable(only(answered, names)) == before == comparable(given)
    new = [{key: _plain(value) for key, value in row.items()} for row in cells(answered, ADDED.column_names)]
    assert new == ANSWERS
    assert cells(answered, names) == cells(given, names)
    # And again, with the columns that the first call made,
    again = open_frame(answered).with_columns(ADDED.rename_columns([f"{one}_2" for one in ADDED.column_names]))
    assert types(again) == {**own, **wanted, **{f"{one}_2": kind for one, kind in wanted.items()}}
    assert comparable(only(again, [*names, *wanted])) == comparable(answered)
    # and in Arrow's types, as Parquet stores them.
    stored = open_frame(answered).to_arrow()
    assert (stored.schema.field("day").type, stored.schema.field("number").type) == (pa.date32(), pa.float64())
    assert stored.select(["day", "parsed", "number"]).to_pylist() == [
        {"day": row["day"], "parsed": new["parsed"], "number": new["number"]}
        for row, new in zip(ROWS, ANSWERS, strict=True)
    ]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def test_given_a_list_of_dicts_when_columns_are_added_then_keys_that_a_row_lacks_stay_away() -> None:
    rows = [*ROWS[:2], {"text": "three", 4: object}]

    answered = open_frame(rows).with_columns(ADDED)

    assert answered == [{**row, **new} for row, new in zip(rows, ANSWERS, strict=True)]
    assert list(open_frame(rows).cells(["text", "day"]))[2] == {"text": "three", "day": None}


@pytest.mark.parametrize("make", [lambda: TABLE, lambda: pl.from_arrow(TABLE), TABLE.to_pandas, relation, lambda: ROWS])
def test_given_any_kind_when_cells_are_read_then_they_are_the_same_values(make: Callable[[], Any]) -> None:
    frame = open_frame(make())

    wanted = ["text", "day", "pair", "tags", "grade"]
    assert list(frame.cells(wanted)) == [{name: row[name] for name in wanted} for row in ROWS]
    assert list(frame.cells([])) == [{}] * len(ROWS)
    assert (len(frame), len(frame.slice(0, 2)), len(frame.slice(1, 9))) == (3, 2, 2)
    assert set(SCHEMA.names) == set(frame.columns)


def test_given_files_when_a_glob_is_read_then_rows_are_in_the_order_of_names(tmp_path: Path) -> None:
    for name, start in (("b", 2), ("a", 0), ("[c]", 9)):
        table = pa.table({"n": [start, start + 1]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        pyarrow.csv.write_csv(table, tmp_path / f"{name}.csv")
        (tmp_path / f"{name}.jsonl").write_text(f'{{"n": {start}}}\n{{"n": {start + 1}}}\n')

    for suffix in ("parquet", "csv", "jsonl"):
        found = open_frame(f"{tmp_path}/[ab].{suffix}").with_columns(pa.table({}))
        assert found.to_pydict() == {"n": [0, 1, 2, 3]}
        assert open_frame(tmp_path / f"[c].{suffix}").with_columns(pa.table({})).to_pydict() == {"n": [9, 10]}


def test_given_unusable_data_when_opened_then_the_message_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.csv").write_text("y\n1\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    (tmp_path / "nested.jsonl").write_text('{"a": 1}\n{"a": ' + "[" * 300_000 + "]" * 300_000 + "}\n")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "latin.csv").write_bytes(b"x\n\xff\n")
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.parquet").symlink_to("/dev/zero")
    cases = {
        "call .collect() first": pl.LazyFrame({"a": [1]}),
        "is a set": {1},
        "row 1 is a str": [{}, "a"],
        "no file matches": f"{tmp_path}/*.ndjson",
        "b.csv: has other columns": f"{tmp_path}/*.csv",
        "broken.parquet is not a Parquet file": tmp_path / "broken.parquet",
        "missing.csv: can't be read": tmp_path / "missing.csv",
        "nested.jsonl: line 2: the line nests brackets deeper than 64": tmp_path / "nested.jsonl",
        "list.jsonl: line 1: must be a JSON object": tmp_path / "list.jsonl",
        "latin.csv: the column x is not UTF-8": tmp_path / "latin.csv",
        "pipe.csv: is no regular file": tmp_path / "pipe.csv",
        "zero.parquet: is no regular file": tmp_path / "zero.parquet",
        "must be a path on this machine": "https://host/a.csv",
        "must be files of one format": f"{tmp_path}/*",
        "/*.parquet": str(tmp_path),
    }
    for message, data in cases.items():
        with pytest.raises(InvalidCall) as raised:
            open_frame(data)
        assert message in str(raised.value)


def test_given_parquet_that_decodes_to_too_much_when_opened_then_it_is_refused_before_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"a": ["x" * 10_000] * 4_000}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes())
    assert (tmp_path / "a.parquet").stat().st_size < 1_000
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    monkeypatch.setattr(files, "MAX_MEMORY_SHARE", 60_000_000 / memory)
    assert len(open_frame(tmp_path / "a.parquet")) == 4_000
    with pytest.raises(InvalidCall, match=r"b\.parquet: decodes to more than half of this machine's memory"):
        open_frame(f"{tmp_path}/*.parquet")
    monkeypatch.setattr(expansion, "ALWAYS_DECODED_BYTES", 1 << 20)
    with pytest.raises(InvalidCall, match="decode to more than"):
        open_frame(tmp_path / "a.parquet")


def test_given_parquet_when_read_then_its_types_and_metadata_are_those_that_arrow_reads(tmp_path: Path) -> None:
    views = pa.array(["a", None, "b"], pa.string_view())
    table = TABLE.append_column("views", views).replace_schema_metadata({"a": "b"})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)

    found = open_frame(tmp_path / "a.parquet").with_columns(pa.table({}))

    assert found.schema.equals(pq.ParquetFile(tmp_path / "a.parquet").read().schema, check_metadata=True)
    assert found.to_pylist() == table.to_pylist()
    assert found.schema.field("grade").type == pa.dictionary(pa.int32(), pa.string())


@pytest.mark.slow
def test_importing_tokenmill_imports_nothing_and_opening_a_table_no_other_library() -> None:
    program = (
        "import sys; before = set(sys.modules); import tokenmill; "
        "new = {name for name in set(sys.modules) - before if '.' not in name} - {'typing', 'tokenmill'}; "
        "assert not new - set(sys.stdlib_module_names), new; "
        "from tokenmill.frames.data.kinds import open_frame; open_frame([{'a': 1}]); "
        "assert not {'pandas', 'polars', 'duckdb', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
