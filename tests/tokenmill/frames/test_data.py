"""Every kind of table comes back as it went in, with the new columns behind its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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
from tokenmill.frames import files
from tokenmill.frames.data import open_frame

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


def test_given_an_arrow_table_when_columns_are_added_then_the_others_are_as_they_were() -> None:
    answered = open_frame(TABLE).with_columns(ADDED)

    assert answered.select(TABLE.column_names).equals(TABLE)
    assert answered.select(ADDED.column_names).equals(ADDED)


def test_given_a_polars_frame_when_columns_are_added_then_types_and_values_stay() -> None:
    frame = pl.DataFrame(pl.from_arrow(TABLE)).with_columns(pl.col("grade").cast(pl.Enum(["low", "mid", "high"])))

    answered = open_frame(frame).with_columns(ADDED)

    assert answered.select(frame.columns).equals(frame)
    assert answered.schema["grade"] == pl.Enum(["low", "mid", "high"])
    assert answered.schema["answer"] == pl.Enum(["no", "yes", "it's"])
    assert answered.schema["parsed"] == pl.Struct({"n": pl.Int64, "l": pl.List(pl.String)})
    assert answered.select(ADDED.column_names).to_dicts() == ANSWERS


def test_given_a_pandas_frame_when_columns_are_added_then_index_types_and_values_stay() -> None:
    frame = TABLE.to_pandas().set_axis([5, 5, 1])
    before = frame.copy(deep=True)

    answered = open_frame(frame).with_columns(ADDED)

    pd.testing.assert_frame_equal(answered[frame.columns], before)
    pd.testing.assert_frame_equal(frame, before)
    assert answered["grade"].dtype == before["grade"].dtype
    assert list(answered["answer"].cat.categories) == ["no", "yes", "it's"]
    assert answered["tokens"].dtype == pd.Int32Dtype()
    assert answered["is_true"].dtype == pd.BooleanDtype()
    found = [
        {name: None if value is pd.NA or value != value else value for name, value in row.items()}
        for row in answered[ADDED.column_names].astype(object).to_dict("records")
    ]
    assert found == ANSWERS


def test_given_a_relation_when_columns_are_added_then_it_is_one_of_the_same_connection_and_types() -> None:
    given = relation()

    answered = open_frame(given).with_columns(ADDED)

    types = dict(zip(answered.columns, map(str, answered.types), strict=True))
    assert [types[name] for name in given.columns] == [str(kind) for kind in given.types]
    assert types["answer"] == "ENUM('no', 'yes', 'it''s')"
    assert types["parsed"] == "STRUCT(n BIGINT, l VARCHAR[])"
    assert answered.select(*given.columns).fetchall() == given.fetchall()
    found = [dict(zip(ADDED.column_names, row, strict=True)) for row in answered.select(*ADDED.column_names).fetchall()]
    assert found == ANSWERS


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
    assert (len(frame), len(frame.head(2)), len(frame.head(9))) == (3, 2, 3)
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
        "from tokenmill.frames.data import open_frame; open_frame([{'a': 1}]); "
        "assert not {'pandas', 'polars', 'duckdb', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
