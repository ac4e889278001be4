"""Arrow as input: its columns mean what they mean in Parquet, from files and streams of several writers."""

from __future__ import annotations

import io
import json
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planner import InputError, RowSource, SourceBatch, SourceFile, open_source
from pipeline.planner.segment_sizes import SegmentSizes
from schemas.jobs.inputs import InputFormat
from schemas.requests.limits import Limits
from tests.pipeline.planner.readers.arrow_files import FORMS, arrow

SIZES = SegmentSizes(3, 7)
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a text of more than twelve bytes"}]


def source(data: bytes, kind: InputFormat = InputFormat.ARROW, limits: Limits | None = None) -> RowSource:
    return open_source([SourceFile("in", lambda: io.BytesIO(data))], kind, limits or Limits(), "demo")


def read(data: bytes, kind: InputFormat = InputFormat.ARROW) -> list[SourceBatch]:
    return list(source(data, kind).batches(SIZES))


def assert_reads_as_parquet(table: pa.Table, data: bytes) -> None:
    parquet = io.BytesIO()
    pq.write_table(table, parquet)
    for batch, expected in zip(read(data), read(parquet.getvalue(), InputFormat.PARQUET), strict=True):
        assert repr(batch.rows) == repr(expected.rows)
        assert batch.carried == expected.carried


texts = st.text(max_size=30) | st.none()
rows = st.lists(
    st.fixed_dictionaries(
        {
            "custom_id": texts,
            "messages": st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=3) | st.none(),
            "category": st.sampled_from(["a", "b", None]),
            "numbers": st.lists(st.integers(-9, 9), max_size=3) | st.none(),
            "score": st.floats(allow_nan=False) | st.none(),
        }
    ),
    min_size=1,
    max_size=20,
)
SCHEMA = pa.schema(
    {
        "custom_id": pa.string(),
        "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "category": pa.string(),
        "numbers": pa.list_(pa.int8()),
        "score": pa.float64(),
    }
)
MESSAGES_TYPES = [
    SCHEMA.field("messages").type,
    pa.large_list(pa.struct({"role": pa.large_string(), "content": pa.string_view()})),
    pa.list_(pa.struct({"role": pa.dictionary(pa.int32(), pa.string()), "content": pa.string()})),
]


@given(rows, st.sampled_from(FORMS), st.sampled_from([None, "lz4", "zstd"]), st.integers(1, 8), st.booleans())
@pytest.mark.slow
def test_any_arrow_is_read_as_the_same_columns_of_parquet(
    values: list[dict[str, Any]], form: str, compression: str | None, batch_rows: int, coded: bool
) -> None:
    table = pa.Table.from_pylist(values, SCHEMA)
    if coded:
        table = table.set_column(2, "category", table.column("category").dictionary_encode())
    assert_reads_as_parquet(table, arrow(table, form, batch_rows, compression=compression))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", MESSAGES_TYPES, ids=["plain", "views", "dictionaries"])
def test_messages_of_any_layout_are_read(kind: pa.DataType, compression: str | None, form: str) -> None:
    values = [MESSAGES, None, [], MESSAGES[:1], [{"role": "user", "content": None}]] * 100
    ids = pa.array([str(number) for number in range(len(values))])
    plain = pa.table({"custom_id": ids, "messages": pa.array(values, MESSAGES_TYPES[0])})
    roles = pa.array([message["role"] for value in values for message in value or []])
    if pa.types.is_dictionary(kind.value_field.type.field(0).type):
        column = plain.column("messages").combine_chunks()
        coded = pa.StructArray.from_arrays(
            [roles.dictionary_encode(), column.values.field(1)], fields=list(kind.value_type)
        )
        messages = pa.ListArray.from_arrays(column.offsets, coded, type=kind, mask=column.is_null())
    else:
        messages = plain.column("messages").combine_chunks().cast(kind)
    table = pa.table({"custom_id": ids, "messages": messages})
    data = arrow(table, form, 300, compression=compression)
    expected = read(arrow(plain, "file", 300))
    assert repr([batch.rows for batch in read(data)]) == repr([batch.rows for batch in expected])


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_files_of_other_writers_are_read(compression: Any, tools: Any) -> None:
    columns = {"custom_id": ["a", "b"], "prompt": ["one", "a text of more than twelve bytes"], "kind": ["x", "y"]}
    polars = pl.DataFrame(columns).with_columns(
        pl.col("kind").cast(pl.Categorical), tags=pl.Series([["p"], ["q" * 20]])
    )
    file, stream, feather = io.BytesIO(), io.BytesIO(), io.BytesIO()
    polars.write_ipc(file, compression=compression)
    polars.write_ipc_stream(stream, compression=compression)
    pandas = pd.DataFrame(columns | {"tags": [["p"], ["q" * 20]]}).astype({"kind": "category"})
    pandas.to_feather(feather, compression=compression)
    for data in (file, stream, feather):
        planned = tools.plan(source(data.getvalue()))
        bodies = {row["custom_id"]: json.loads(row["body"])["prompt"] for row in planned.rows}
        assert bodies == dict(zip(columns["custom_id"], columns["prompt"], strict=True))
        assert {row["custom_id"]: (row["kind"], row["tags"]) for row in planned.rows} == {
            "a": ("x", ["p"]),
            "b": ("y", ["q" * 20]),
        }


@pytest.mark.parametrize("form", FORMS)
def test_dictionaries_that_differ_between_record_batches_are_read(form: str) -> None:
    """A stream replaces them, and a file adds to them."""
    values = [["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]]
    schema = pa.schema({"custom_id": pa.string(), "prompt": pa.dictionary(pa.int8(), pa.string())})
    codes = [pa.DictionaryArray.from_arrays(pa.array(range(len(each)), pa.int8()), each) for each in values]
    batches = [pa.record_batch([pa.array(each), coded], schema) for each, coded in zip(values, codes, strict=True)]
    buffer = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with (pa.ipc.new_file if form == "file" else pa.ipc.new_stream)(buffer, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    found = [row.value["body"]["prompt"] for batch in read(buffer.getvalue()) for row in batch.rows]  # type: ignore[index]
    assert found == [value for each in values for value in each]


def test_a_body_of_the_json_type_is_parsed() -> None:
    body = {"model": "demo", "prompt": "hi"}
    bodies = pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(body)]))
    (batch,) = read(arrow(pa.table({"custom_id": ["a"], "body": bodies})))
    assert batch.rows[0].value["body"] == body  # type: ignore[index]


@pytest.mark.parametrize("form", FORMS)
def test_a_table_without_rows_is_a_job_without_rows(form: str) -> None:
    assert (
        read(arrow(pa.table({"custom_id": pa.array([], pa.string()), "prompt": pa.array([], pa.string())}), form)) == []
    )


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1]), "the column custom_id is int64; make it a string"),
        (None, "lacks the column custom_id"),
    ],
)
def test_columns_that_make_no_request_stop_the_job(column: Any, message: str) -> None:
    table = pa.table({"prompt": ["x"]} | ({} if column is None else {"custom_id": column}))
    with pytest.raises(InputError, match=message):
        read(arrow(table))


@pytest.mark.parametrize(
    "note",
    [
        pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
        pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]),
        pa.array([[1]], pa.list_view(pa.int8())),
        pa.array([[[1]]], pa.list_(pa.list_view(pa.int8()))),
        pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array(["x"])),
        pa.array([{}], pa.struct([])),
    ],
    ids=lambda note: str(note.type),
)
def test_a_column_that_results_cant_carry_is_refused_by_name(note: pa.Array) -> None:
    data = arrow(pa.table({"custom_id": ["a"], "prompt": ["x"], "note": note}))
    with pytest.raises(InputError, match=r"in: the column note is .*; write it as text or plain lists"):
        read(data)
