"""`tokenmill.map` with former answers: rows are found by key, and only the others are computed."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pyarrow.parquet as pq
import pytest
import structlog
from pydantic import BaseModel

import tokenmill as tm
from tests.tokenmill.chaos.watching import digests, parts
from tests.tokenmill.command_processes import ROOT
from tests.waiting import wait_for
from tokenmill.errors import InvalidCall
from tokenmill.frames.answers import answer_form
from tokenmill.frames.former import former_results
from tokenmill.frames.tasks.chat import ChatAnswers

PROGRAM = Path(__file__).with_name("table_program.py")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture
def model(folder: Path, model_folder: Path) -> Iterator[str]:
    """The name of the model, in a working folder of its own."""
    yield f"tiny={model_folder}"
    structlog.reset_defaults()  # as the fixture `tokenmill` does


def computed(job: Path) -> list[int]:
    """The rows that a worker has computed, or is to compute: those of planned shards."""
    shards = job.glob("plans/*/shards/*.parquet")
    return sorted(row for shard in shards for row in pq.read_table(shard, columns=["row"])["row"].to_pylist())


def manifest(job: Path) -> Any:
    return json.loads((job / "manifest.json").read_text())


@pytest.mark.slow
def test_given_a_former_table_when_rows_are_appended_moved_and_edited_then_only_new_prompts_are_computed(
    model: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pl.DataFrame({"id": range(20), "item": [f"number {n}" for n in range(20)]})
    arguments: Any = {"prompt": "{{ item }}?", "model": model, "output": SCHEMA, "max_tokens": 12, "temperature": 0}
    first = tm.map(frame, **arguments, output_dir=folder / "first")
    assert first["answer_key"].n_unique() == 20
    assert not first["answer_reused"].any()
    assert "reused" not in capsys.readouterr().err
    assert first["answer_error"].null_count() < 20, "some forms are cut off"

    more = pl.DataFrame({"id": [20, 21], "item": ["another", "one more"]})
    edited = pl.concat([frame, more]).with_columns(
        item=pl.when(pl.col("id") == 3).then(pl.lit("number three")).otherwise(pl.col("item"))
    )
    new = [3, 20, 21]
    planned = tm.map(edited.reverse(), **arguments, reuse=folder / "first", dry_run=True)
    left = tm.map(edited.reverse().filter(pl.col("id").is_in(new)), **arguments, dry_run=True)
    assert planned == replace(left, rows=22, reused=19)
    assert "rows             22 (3 computed, 19 reused)\n" in str(planned)
    nothing = tm.map(frame, **arguments, reuse=folder / "first", dry_run=True)
    assert (nothing.rows, nothing.reused, nothing.computed) == (20, 20, 0)
    assert nothing.prompt_tokens == nothing.max_tokens == nothing.seconds == 0
    capsys.readouterr()

    found = tm.map(edited.reverse(), **arguments, output_dir=folder / "second", reuse=folder / "first").reverse()

    assert computed(folder / "second") == sorted(21 - row for row in new)
    assert found.filter(~pl.col("answer_reused"))["id"].to_list() == new
    assert manifest(folder / "second")["reused"] == 19
    assert capsys.readouterr().err.splitlines().count("reused 19 of 22 rows") == 1
    assert manifest(folder / "second")["usage"]["completion"] == found["answer_completion_tokens"].sum() > 0
    same = ["answer", "answer_error", "answer_finish_reason", "answer_key"]
    old = found.filter(pl.col("answer_reused"))
    assert old.select(same).equals(first.filter(pl.col("id") != 3).select(same))
    assert old["answer_prompt_tokens"].sum() == old["answer_completion_tokens"].sum() == 0
    assert found.schema == first.schema

    for change in ({"prompt": "{{ item }}!"}, {"max_tokens": 11}, {"system": "Be brief."}, {"output": str}):
        name = next(iter(change))
        tm.map(frame.head(2), **arguments | change, output_dir=folder / name, reuse=folder / "first")
        assert (computed(folder / name), manifest(folder / name)["reused"]) == ([0, 1], 0)


@pytest.mark.slow
def test_given_former_results_that_can_not_be_used_when_mapped_then_the_message_has_the_fix(
    model: str, folder: Path
) -> None:
    arguments: Any = {"data": [{"item": "a"}], "prompt": "{{ item }}", "model": model, "max_tokens": 1}
    with pytest.raises(InvalidCall, match=r"reuse: .*no: no such folder; give the folder that a former run wrote"):
        tm.map(**arguments, output_dir=folder / "job", reuse=folder / "no")
    assert not (folder / "job/job.json").exists()
    with pytest.raises(InvalidCall, match=r"reuse: .*no: no such folder; give the folder that a former run wrote"):
        tm.map(**arguments, dry_run=True, reuse=folder / "no")
    tm.map(**arguments, output_dir=folder / "job")
    with pytest.raises(InvalidCall, match=r"reuse: .* is the output itself"):
        tm.map(**arguments | {"max_tokens": 2}, output_dir=folder / "other", reuse=folder / "other")


@pytest.mark.exhaustive
def test_given_a_script_that_reuses_answers_when_killed_and_started_again_then_no_row_is_computed_twice(
    folder: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former run is killed in its middle, too. Plans have many segments, of which a process of its own plans all
    but the first."""
    variables = {
        "TOKENMILL_PLAN__MAX_SHARD_ROWS": "4", "TOKENMILL_PLAN__SEGMENT_ROWS": "64",
        "TOKENMILL_PLAN__FIRST_SEGMENT_ROWS": "64",
    }  # fmt: skip

    def arguments(job: str, rows: int, *former: str) -> list[str]:
        return [str(PROGRAM), str(model_folder), str(folder / job), str(rows), str(folder / f"{job}.parquet"), *former]

    def kill(count: int, job: str, rows: int, *former: str) -> dict[str, str]:
        process = subprocess.Popen(
            [sys.executable, *arguments(job, rows, *former)], cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        wait_for(lambda: len(parts(folder / job)) > count or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        process.kill()
        process.wait()
        return digests(folder / job)

    kill(25, "first", 320)
    answered = set(pq.read_table(folder / "first/results", columns=["request_key"])["request_key"].to_pylist())
    assert 0 < len(answered) < 320
    committed = kill(8, "second", 352, str(folder / "first"))

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", arguments("second", 352, str(folder / "first")))
    runpy.run_path(str(PROGRAM))  # the last start is in this process

    job = folder / "second"
    assert committed.items() <= digests(job).items()
    results = pq.read_table(job / "results", columns=["row", "request_key", "reused_from", "status"]).to_pylist()
    assert sorted(row["row"] for row in results) == list(range(352))
    assert Counter(row["status"] for row in results) == {"succeeded": 352}
    reused = {row["row"] for row in results if row["reused_from"] is not None}
    assert reused == {row["row"] for row in results if row["request_key"] in answered}
    assert manifest(job)["reused"] == len(reused) == len(answered)
    assert set(computed(job)) == set(range(352)) - reused
    assert manifest(job)["usage"]["repeated"] == 0, "no token that was logged is sampled again"
    found = pl.read_parquet(folder / "second.parquet")
    assert found["answer_reused"].sum() == len(answered)
    assert found["item"].to_list() == [f"number {n}" for n in range(352)]
    assert found["answer_completion_tokens"].sum() == manifest(job)["usage"]["completion"]


class Review(BaseModel):
    score: int | None
    words: list[Literal["good", "bad"]]


@pytest.mark.slow
def test_given_the_table_of_a_former_call_when_reused_then_answers_are_taken_with_their_types(
    model: str, folder: Path
) -> None:
    frame = pl.DataFrame({"item": [f"number {n}" for n in range(4)]})
    for number, output in enumerate((str, Literal["yes", "no"], Literal[1, 2], Literal[True, False], Review)):
        arguments: Any = {"prompt": "{{ item }}?", "model": model, "output": output, "max_tokens": 40, "temperature": 0}
        first = tm.map(frame, **arguments)
        table: Any = first
        if output is Review:
            table = first.to_pandas()
        elif output is str:
            table = first.to_dicts()

        job = folder / str(number)
        found = tm.map(frame, **arguments, output_dir=job, reuse=table)

        answered = first["answer_error"].is_null()
        assert found["answer_reused"].to_list() == answered.to_list()
        assert manifest(job)["reused"] == answered.sum()
        same = ["answer", "answer_error", "answer_finish_reason", "answer_key"]
        assert found.select(same).equals(first.select(same))


def test_given_a_typed_answer_when_written_as_text_then_it_is_parsed_to_the_same_or_left_out(tmp_path: Path) -> None:
    nested = {
        "type": "object",
        "properties": {
            "n": {"type": "array", "items": {"type": "number"}}, "free": {"type": "object"}, "text": {"type": "string"},
        },
    }  # fmt: skip
    key = "0" * 31

    def texts(output: Any, *values: Any) -> list[str]:
        rows = [
            {"a": value, "a_error": None, "a_finish_reason": "stop", "a_key": f"{key}{n}"}
            for n, value in enumerate(values)
        ]
        rows.append({"a": None, "a_error": None, "a_finish_reason": "stop", "a_key": None})
        found = pq.read_table(former_results(rows, ChatAnswers(answer_form(output)), "a", tmp_path))
        assert [json.loads(one)["choices"][0]["message"]["content"] for one in found["response"].to_pylist()] == (
            found["text"].to_pylist()
        )
        return found["text"].to_pylist()  # type: ignore[no-any-return]

    assert texts(str, "true", "") == ["true", ""]
    assert texts(Literal["a", "b"], "b", "c") == ["b"]
    assert texts(Literal[True, False], True) == ["true"]
    assert texts(Literal[1, 2], 2, 3) == ["2"]
    whole = {"n": [1.5], "free": None, "text": "x"}
    assert texts(nested, whole, whole | {"free": '{"a":1}'}) == ['{"n":[1.5],"free":null,"text":"x"}']
    assert texts(Review, {"score": None, "words": ["bad"]}) == ['{"score":null,"words":["bad"]}']


def test_given_a_table_that_is_no_former_one_when_reused_then_the_message_has_the_fix(tmp_path: Path) -> None:
    row = {"a": "x", "a_error": None, "a_finish_reason": "stop", "a_key": "0" * 32}
    cases: list[tuple[Any, str]] = [
        ({"a_key": "0" * 31}, "reuse: row 0: 'a_key' is no key; give the column as the call returned it"),
        ({"a_key": 5}, "reuse: row 0: 'a_key' is no key"),
        ({"a_finish_reason": 5}, "reuse: row 0: a finish reason must be a text or null"),
    ]
    for change, message in cases:
        with pytest.raises(InvalidCall) as raised:
            former_results([row | change], ChatAnswers(answer_form(str)), "a", tmp_path)
        assert str(raised.value).startswith(message)
    with pytest.raises(
        InvalidCall, match="reuse: the table has no column 'b'; give a table that a former call returned, with the"
    ):
        former_results([row], ChatAnswers(answer_form(str)), "b", tmp_path)
    with pytest.raises(InvalidCall, match=r"^reuse: is a int, but must be a pandas or polars DataFrame"):
        former_results(5, ChatAnswers(answer_form(str)), "b", tmp_path)
