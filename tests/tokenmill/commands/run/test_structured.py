"""Rows with a form or tools as a user meets them: in the results, and in the error of a row whose form is too large."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow.parquet as pq
import pytest

from schemas.settings.settings import load_settings
from tests.workers.structured import tool_templates
from tokenmill.models.sources import find

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Write = Callable[..., Path]
Results = Callable[[Path], list[dict[str, Any]]]

SCHEMA = {
    "type": "object",
    "properties": {
        "item": {"type": "string", "maxLength": 30},
        "quantity": {"type": "integer", "minimum": 0, "maximum": 1000},
        "due": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    },
    "required": ["item", "quantity", "due"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA, "strict": True}}
BROKEN = {"type": "json_schema", "json_schema": {"name": "order", "schema": {"properties": {"a": {"not": {}}}}}}
COUNT = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
COUNT |= {"additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": COUNT}}


def lines_of(chat: Chat, count: int, **body: Any) -> list[dict[str, Any]]:
    """Rows with a schema, two of them alike, one that can't be compiled, and rows with tools."""
    notes = ["80 notebooks, before 14 October 2025", "Two hammers. No rush.", "Two hammers. No rush."]
    rule = {"role": "system", "content": "Read the note and answer with a JSON object: item, quantity, due."}
    conversations = [[rule, {"role": "user", "content": note}] for note in notes]
    formed = [chat(f"formed-{n}", messages=conversations[n % 3], response_format=FORMAT, **body) for n in range(count)]
    called = [
        chat(
            f"called-{n}",
            text=notes[n],
            tools=[TOOL],
            tool_choice="required",
            max_tokens=100,
            parallel_tool_calls=False,
        )
        for n in range(2)
    ]
    return [*formed, chat("broken", response_format=BROKEN, **body), *called, chat("plain", max_tokens=4)]


def check(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Each row's outcome; how many answers ended, by kind."""
    ended = {"formed": 0, "called": 0}
    for row in rows:
        kind = row["custom_id"].split("-")[0]
        if kind == "broken":
            assert (row["status"], row["error_code"]) == ("failed", "invalid_request")
            assert "response_format.json_schema.schema.properties.a" in row["error_message"]
            continue
        assert row["status"] == "succeeded", row["error_message"]
        message = json.loads(row["response"])["choices"][0]["message"]
        if kind == "formed" and row["finish_reason"] == "stop":
            jsonschema.validate(json.loads(row["text"]), SCHEMA)
            ended[kind] += 1
        if kind == "called" and row["finish_reason"] == "tool_calls":
            for call in message["tool_calls"]:
                jsonschema.validate(json.loads(call["function"]["arguments"]), COUNT)
            assert message["content"] is None
            ended[kind] += 1
    return ended


@pytest.mark.slow
def test_given_formats_and_tools_when_run_then_answers_follow_them_and_a_bad_schema_fails_its_row_only(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, results: Results
) -> None:
    path = write_lines(*lines_of(chat, 4, max_tokens=250))
    template = folder / "tools.jinja"
    template.write_text(tool_templates.HERMES, encoding="utf-8")
    run = ("run", path, "--model", f"tiny={model_folder}", "--dtype", "float32", "--chat-template", template)

    ended = tokenmill(*run, "--output", folder / "out")

    assert ended.code == 0, ended.err
    rows = results(folder / "out")
    assert check(rows)["formed"] >= 3
    # and equal requests are computed once
    assert rows[1]["text"] == rows[2]["text"]
    assert rows[2]["cached_tokens"] == rows[2]["prompt_tokens"]


@pytest.fixture(scope="module")
def demo() -> Path:
    source = find("demo", load_settings().model_cache)
    if source is None:
        pytest.skip("NOT TESTED HERE: the demo model, which is not in the cache: tokenmill models pull demo")
    return source.path


@pytest.mark.slow
def test_given_the_demo_model_when_it_must_answer_in_a_form_then_it_does(
    demo: Path, tokenmill: Cli, folder: Path, chat: Chat, write_lines: Write, results: Results
) -> None:
    template = folder / "tools.jinja"
    chatml = tool_templates.HERMES.replace("<turn>", "<|im_start|>").replace("<end>", "<|im_end|>")
    template.write_text(chatml, encoding="utf-8")
    path = write_lines(*lines_of(chat, 9, max_tokens=200))
    run = ("run", path, "--model", f"tiny={demo}", "--output", folder / "out", "--chat-template", template)

    ended = tokenmill(*run)

    assert ended.code == 0, ended.err
    assert check(results(folder / "out")) == {"formed": 9, "called": 2}


@pytest.mark.slow
def test_given_max_tries_when_answers_are_cut_off_then_those_rows_are_asked_again(
    tokenmill: Cli, model_folder: Path, folder: Path
) -> None:
    bodies = [{"response_format": FORMAT}, {}]
    lines = [
        {
            "custom_id": f"id-{row}", "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, **body},
        }
        for row, body in enumerate(bodies)
    ]  # fmt: skip
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("run", "in.jsonl", "--model", f"tiny={model_folder}", "--max-tries", 2)

    ended = tokenmill(*command, "--output", "out")

    assert ended.code == 0, ended.err
    rows = sorted(pq.read_table(folder / "out/results").to_pylist(), key=lambda row: row["row"])
    assert [(row["tries"], row["error_code"], row["completion_tokens"]) for row in rows] == [
        (2, "incomplete_answer", 6), (1, None, 3),
    ]  # fmt: skip
    assert json.loads((folder / "out/manifest.json").read_text())["usage"]["completion"] == 9
    wrong = tokenmill(*command, "--output", "other", "--then", "tiny")
    assert "is not for cascades: --accept judges their answers" in wrong.err.replace("\n", " ")
