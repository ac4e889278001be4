"""Parquet as input: rows become lines, other columns travel through to the results with their types."""

from __future__ import annotations

import io
import json
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.planner import InputError, SourceFile, open_source
from schemas.jobs.arrow_schemas import SHARD_FIELDS
from schemas.jobs.inputs import InputFormat
from schemas.requests.limits import Limits

MESSAGES = [{"role": "user", "content": "hi"}]


def parquet(table: pa.Table, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **options)
    return buffer.getvalue()


def source(*tables: pa.Table | bytes, model: str | None = "demo", limits: Limits | None = None) -> Any:
    datas = [table if isinstance(table, bytes) else parquet(table, row_group_size=3) for table in tables]
    files = [SourceFile(f"{number}.parquet", lambda data=data: io.BytesIO(data)) for number, data in enumerate(datas)]
    return open_source(files, InputFormat.PARQUET, limits or Limits(), model)


def test_prompts_become_completions_and_other_columns_are_carried(tools: Any) -> None:
    count = 10
    table = pa.table(
        {
            "split": pa.array(["train", "test"] * 5).dictionary_encode(),
            "custom_id": [f"id {n}" for n in range(count)],
            "prompt": [f"question {n}" if n != 4 else None for n in range(count)],
            "day": [date(2026, 1, 1 + n) for n in range(count)],
            "text": [[n] for n in range(count)],
        }
    )
    planned = tools.plan(source(table), tools.job(plan={"segment_rows": 4}))
    assert planned.error_of == {4: ("invalid_request", "line 5 of the input: the column prompt is null; fill it")}
    for row in planned.rows:
        number = row["row"]
        assert json.loads(row["body"]) == {"model": "demo", "prompt": f"question {number}"}
        assert row["url"] == "/v1/completions"
        assert (row["split"], row["day"], row["input_text"]) == (
            ("train", "test")[number % 2],
            date(2026, 1, 1 + number),
            [number],
        )
    assert sorted(row["row"] for row in planned.rows) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    refused = planned.rejected[0]
    assert (refused["split"], refused["day"], refused["input_text"]) == ("train", date(2026, 1, 5), [4])
    assert planned.sink.shards[1].schema.field("split").type == pa.string()


@pytest.mark.slow
def test_categories_that_differ_between_row_groups_are_carried_by_value(tools: Any) -> None:
    """Given columns of dictionaries, the ids and prompts too, and another dictionary in each row group, when the rows
    fill more than one batch, then each row has its own value."""
    count = 10_000
    values = {
        "custom_id": [f"id {n}" for n in range(count)],
        "prompt": [f"prompt {n // 4000}" for n in range(count)],
        "topic": [f"{n // 4000}-{n % 7}" for n in range(count)],
    }
    columns = {
        name: pa.chunked_array([pa.array(texts[at : at + 4000]).dictionary_encode() for at in range(0, count, 4000)])
        for name, texts in values.items()
    }
    columns["nested"] = pa.chunked_array(
        [pa.StructArray.from_arrays([chunk], names=["topic"]) for chunk in columns["topic"].chunks]
    )
    planned = tools.plan(source(parquet(pa.table(columns), row_group_size=4000)))
    assert len(planned.rows) == count
    for row in planned.rows:
        assert (row["topic"], row["nested"]) == (values["topic"][row["row"]], {"topic": values["topic"][row["row"]]})


@pytest.mark.parametrize("name", [field.name for field in SHARD_FIELDS if field.name not in ("custom_id", "body")])
def test_a_column_named_like_one_of_a_shard_is_carried_under_another_name(tools: Any, name: str) -> None:
    table = pa.table({"custom_id": ["a", "b"], name: ["theirs 0", "theirs 1"], "prompt": ["x", None]})
    planned = tools.plan(source(table))
    assert planned.rows[0]["input_" + name] == "theirs 0"
    assert planned.rejected[0]["input_" + name] == "theirs 1"
    names = planned.sink.shards[1].column_names
    assert len(names) == len(set(names))


def test_token_prompts_and_messages(tools: Any) -> None:
    planned = tools.plan(source(pa.table({"custom_id": ["a"], "prompt": [[1, 2, 3]]})))
    assert json.loads(planned.rows[0]["body"])["prompt"] == [1, 2, 3]
    # A struct column gives every message the union of all fields.
    named = [[{"role": "user", "content": "hi", "name": None}], [{"role": "user", "content": "ho", "name": "me"}]]
    planned = tools.plan(source(pa.table({"custom_id": ["a", "b"], "messages": named})))
    bodies = {row["custom_id"]: json.loads(row["body"]) for row in planned.rows}
    assert bodies["a"]["messages"] == MESSAGES
    assert bodies["b"]["messages"] == [{"role": "user", "content": "ho", "name": "me"}]
    planned = tools.plan(source(pa.table({"custom_id": ["a"], "messages": [json.dumps(MESSAGES)]})))
    assert json.loads(planned.rows[0]["body"])["messages"] == MESSAGES


def test_bodies_say_everything(tools: Any) -> None:
    bodies = [
        json.dumps({"model": "demo", "messages": MESSAGES, "temperature": 0}),
        json.dumps({"model": "demo", "prompt": "hi"}),
        json.dumps({"model": "gpt", "prompt": "hi"}),
        "{",
        " ",
        "[" * 100,
        json.dumps({"model": "demo", "prompt": "x" * 500}),
        "[]",
        None,
    ]
    table = pa.table({"custom_id": [str(n) for n in range(9)], "body": bodies})
    planned = tools.plan(source(table, model=None, limits=Limits(max_line_bytes=400)))
    assert {row["row"]: row["url"] for row in planned.rows} == {0: "/v1/chat/completions", 1: "/v1/completions"}
    assert {row: code for row, (code, _) in planned.error_of.items()} == {
        2: "model_not_found",
        3: "invalid_json",
        4: "invalid_json",
        5: "invalid_json",
        6: "invalid_json",
        7: "invalid_request",
        8: "invalid_request",
    }


def test_url_and_method_columns_are_understood(tools: Any) -> None:
    body = json.dumps({"model": "demo", "prompt": "hi"})
    table = pa.table({"custom_id": ["a", "b"], "url": ["/v1/completions", "/v1/images"], "body": [body, body]})
    planned = tools.plan(source(table))
    assert [row["row"] for row in planned.rows] == [0]
    assert planned.error_of[1][0] == "unsupported_url"
    assert "url" in planned.sink.shards[1].column_names
    assert len(planned.sink.shards[1].column_names) == len(set(planned.sink.shards[1].column_names))


def test_several_files_of_one_schema(tools: Any) -> None:
    first = pa.table({"custom_id": ["a", "b"], "prompt": ["x", "y"], "tag": [1, 2]})
    second = pa.table({"custom_id": ["c", "a"], "prompt": ["z", "w"], "tag": [3, 4]})
    planned = tools.plan(source(first, second))
    assert {row["row"]: row["tag"] for row in planned.rows} == {0: 1, 1: 2, 2: 3}
    assert planned.error_of[3][1].startswith("line 2: 1.parquet: custom_id 'a' was used before, in row 0")
    with pytest.raises(InputError, match=r"1\.parquet has other columns than 0\.parquet"):
        source(first, second.rename_columns(["custom_id", "prompt", "label"]))


def test_an_empty_table_is_a_job_without_rows(tools: Any) -> None:
    table = pa.table({"custom_id": pa.array([], pa.string()), "prompt": pa.array([], pa.string())})
    assert tools.plan(source(table)).summary.total == 0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"id": ["a"], "prompt": ["x"]}), r"lacks the column custom_id \(it has: id, prompt\)"),
        (
            pa.table({"custom_id": ["a"], "question": ["x"]}),
            "lacks one of the columns body, messages, prompt and input",
        ),
        (pa.table({"custom_id": ["a"], "prompt": ["x"], "body": ["{}"]}), "has more than one of"),
        (pa.table({"custom_id": [1], "prompt": ["x"]}), "custom_id is int64; make it a string"),
        (pa.table([["a"], ["x"], ["y"]], names=["custom_id", "prompt", "prompt"]), "columns of the same name"),
        (b"custom_id,prompt\na,x\n", "is not a Parquet file"),
    ],
)
def test_columns_that_make_no_request_stop_the_job(table: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        source(table)


def test_prompts_need_a_model(tools: Any) -> None:
    with pytest.raises(InputError, match="names no model"):
        source(pa.table({"custom_id": ["a"], "prompt": ["x"]}), model=None)


def test_a_truncated_file_is_a_clear_error(tools: Any) -> None:
    whole = parquet(pa.table({"custom_id": ["a"] * 1000, "prompt": [str(n) * 50 for n in range(1000)]}))
    with pytest.raises(InputError, match=r"0\.parquet"):
        tools.plan(source(whole[:4000] + bytes(500) + whole[4500:]))


@pytest.mark.parametrize("texts", [["a", "b"], [["a", "b"], ["c"]]])
def test_a_column_of_inputs_is_embedded(tools: Any, texts: list[Any]) -> None:
    planned = tools.plan(source(pa.table({"custom_id": ["x", "y"], "input": texts})))
    (rows,) = [table.to_pylist() for table in planned.sink.shards.values()]
    assert {row["url"] for row in rows} == {"/v1/embeddings"}
    wanted = [[text] if isinstance(text, str) else text for text in texts]
    assert [json.loads(row["body"])["input"] for row in sorted(rows, key=lambda row: row["row"])] == wanted


def test_a_column_called_input_next_to_prompts_is_carried(tools: Any) -> None:
    planned = tools.plan(source(pa.table({"custom_id": ["x"], "prompt": ["a"], "input": ["b"]})))
    (table,) = planned.sink.shards.values()
    assert table.column("url").to_pylist() == ["/v1/completions"]
    assert table.column("input").to_pylist() == ["b"]


def test_a_body_with_an_input_and_no_url_is_embedded(tools: Any) -> None:
    body = json.dumps({"model": "demo", "input": "a"})
    planned = tools.plan(source(pa.table({"custom_id": ["x"], "body": [body]})))
    (table,) = planned.sink.shards.values()
    assert table.column("url").to_pylist() == ["/v1/embeddings"]
