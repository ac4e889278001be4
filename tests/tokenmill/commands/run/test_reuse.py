"""`run --reuse`: rows with an answer in former results are not computed again; all others are."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Results = Callable[[Path], list[dict[str, Any]]]
Write = Callable[..., Path]

SAME = ("text", "finish_reason", "status", "status_code", "request_key", "reasoning")
"""Columns of a result that are the same where it is reused."""


class Runs:
    """Runs of requests on the tiny model, each in a folder of its own."""

    def __init__(self, tokenmill: Cli, folder: Path, model: Path, write: Write, results: Results) -> None:
        self._tokenmill, self._folder, self._model = tokenmill, folder, model
        self._write, self._results = write, results
        self._number = 0

    def start(self, lines: list[Any], *options: object, model: object = None, out: Path | None = None) -> Any:
        self._number += 1
        self.out = out or self._folder / f"out-{self._number}"
        path = self._write(*lines, name=f"{self.out.name}.jsonl")
        return self._tokenmill(
            "run", path, "--model", model or f"tiny={self._model}", "-o", self.out, *options, "--json"
        )

    def run(self, lines: list[Any], *options: object, **more: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The results and the manifest."""
        ended = self.start(lines, *options, **more)
        assert ended.code == 0, ended.err
        self.err: str = ended.err
        return self._results(self.out), json.loads((self.out / "manifest.json").read_text())


@pytest.fixture
def runs(tokenmill: Cli, folder: Path, model_folder: Path, write_lines: Write, results: Results) -> Runs:
    return Runs(tokenmill, folder, model_folder, write_lines, results)


def computed(out: Path) -> list[int]:
    """The rows that a worker has computed: those of planned shards."""
    shards = out.glob("plans/*/shards/*.parquet")
    return sorted(row for shard in shards for row in pq.read_table(shard, columns=["row"])["row"].to_pylist())


def questions(chat: Chat, count: int, **body: Any) -> list[dict[str, Any]]:
    return [chat(f"id {n}", text=f"number {n}", **body) for n in range(count)]


@pytest.mark.slow
def test_given_a_former_run_when_rows_are_appended_then_exactly_these_are_computed(
    runs: Runs, chat: Chat, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, _ = runs.run(questions(chat, 20))
    folder, job = runs.out, json.loads((runs.out / "job.json").read_text())["id"]
    lines = questions(chat, 22, model="renamed")
    random.Random(1).shuffle(lines)

    found, manifest = runs.run(["no JSON", *lines], "--reuse", folder, model=f"renamed={model_folder}")

    rows = {row["custom_id"]: row for row in found}
    assert [row["custom_id"] for row in found] == [None, *(line["custom_id"] for line in lines)]
    new = [rows["id 20"], rows["id 21"]]
    assert computed(runs.out) == sorted(row["row"] for row in new)
    assert (manifest["reused"], manifest["counts"]["succeeded"], manifest["counts"]["failed"]) == (20, 22, 1)
    assert runs.err.splitlines().count("reused 20 of 23 rows") == 1
    assert manifest["usage"]["completion"] == sum(row["completion_tokens"] for row in new)
    assert [row["reused_from"] for row in new] == [None, None]
    for before in former:
        row = rows[before["custom_id"]]
        assert [row[name] for name in SAME] == [before[name] for name in SAME]
        assert json.loads(row["response"]) == json.loads(before["response"]) | {"model": "renamed"}
        assert row["reused_from"] == job
        assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (0, 0, 0)

    monkeypatch.setenv("TOKENMILL_PLAN__FIRST_SEGMENT_ROWS", "10")
    again, manifest = runs.run(questions(chat, 22), "--reuse", runs.out)
    assert [line for line in runs.err.splitlines() if line.startswith("reused")] == [
        "reused 10 of the first 10 rows", "reused 22 of 22 rows",
    ]  # fmt: skip
    assert computed(runs.out) == []
    assert (manifest["reused"], manifest["usage"]["completion"]) == (22, 0)
    assert {row["reused_from"] for row in again[:20]} == {job}, "it is the run that computed them"
    assert again[20]["reused_from"] not in (None, job)


@pytest.mark.slow
def test_given_a_former_run_when_what_enters_the_answers_is_changed_then_all_are_computed(
    runs: Runs, chat: Chat, folder: Path, tiny_models: Any, model_folder: Path
) -> None:
    runs.run(questions(chat, 3))
    former = runs.out
    other = folder / "other"
    tiny_models.make_tiny_model("llama", other, vocab_size=300, seed=5)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_folder / name, other / name)

    for lines, options, model in (
        (questions(chat, 3, max_tokens=5), (), None),
        ([chat(f"id {n}", text=f"number {n}!") for n in range(3)], (), None),
        (questions(chat, 3), ("--kv-dtype", "int8"), None),
        (questions(chat, 3), (), f"tiny={other}"),
    ):
        _, manifest = runs.run(lines, "--reuse", former, *options, model=model)
        assert (manifest["reused"], computed(runs.out)) == (0, [0, 1, 2])
        assert runs.err.count("reused 0 of 3 rows") == 1


@pytest.mark.slow
def test_given_a_former_run_with_rows_that_were_cancelled_when_reused_then_these_are_computed(
    runs: Runs, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", "2")
    former, _ = runs.run(questions(chat, 4), "--price-per-hour", "36", "--max-cost", "1e-9")
    cancelled = [row["row"] for row in former if row["status"] == "cancelled"]
    assert 0 < len(cancelled) < 4

    found, manifest = runs.run(questions(chat, 4), "--reuse", runs.out)

    assert computed(runs.out) == cancelled
    assert manifest["counts"]["succeeded"] == 4
    assert [row["reused_from"] is None for row in found] == [row["status"] == "cancelled" for row in former]


@pytest.mark.slow
def test_given_a_parquet_file_of_results_when_reused_then_its_rows_are_not_computed(
    runs: Runs, chat: Chat, folder: Path, results: Results
) -> None:
    runs.run(questions(chat, 3))
    whole = pq.read_table(runs.out / "results")
    pq.write_table(whole.filter(pa.array([True, False, True])), folder / "some.parquet")

    ended = runs.start(questions(chat, 3), "--reuse", folder / "some.parquet")

    assert ended.error.startswith(f"error: {folder / 'some.parquet'}: its column reused_from has no job's id; give the")
    origin = whole.set_column(whole.column_names.index("reused_from"), "reused_from", pa.array(["job-a"] * 3))
    pq.write_table(origin.filter(pa.array([True, False, True])), folder / "some.parquet")
    _, manifest = runs.run(questions(chat, 3), "--reuse", folder / "some.parquet")
    assert (manifest["reused"], computed(runs.out)) == (2, [1])
