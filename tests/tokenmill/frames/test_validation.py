"""Answers that are judged by a function, a pydantic model or a schema: rows are asked again, and reused ones judged."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import structlog
from pydantic import BaseModel, field_validator

import tokenmill as tm
from tests.tokenmill.chaos.watching import digests, parts
from tests.tokenmill.command_processes import ROOT
from tests.waiting import wait_for
from tokenmill.errors import InvalidCall
from tokenmill.frames.answers import answer_form
from tokenmill.frames.clusters.blocks import BlockMapper
from tokenmill.frames.data.kinds import open_frame
from tokenmill.frames.tasks.validation import judging
from workers.settings import WrongVerdict

PROGRAM = Path(__file__).with_name("judged_table_program.py")
FRAME = pl.DataFrame({"id": range(6), "item": [f"number {n}" for n in range(6)]})
Choice = Literal["yes", "no"]


@pytest.fixture
def model(folder: Path, model_folder: Path) -> Iterator[str]:
    """The name of the model, in a working folder of its own."""
    yield f"tiny={model_folder}"
    structlog.reset_defaults()  # as the fixture `tokenmill` does


def manifest(job: Path) -> Any:
    return json.loads((job / "manifest.json").read_text())


@pytest.mark.slow
def test_given_a_function_when_it_refuses_answers_then_rows_are_asked_again_and_tries_are_counted(
    model: str, folder: Path
) -> None:
    seen: list[tuple[int, str]] = []

    def validate(answer: str, row: dict[str, Any]) -> str | bool:
        seen.append((row["id"], answer))
        tries = sum(one == row["id"] for one, _ in seen)
        return True if tries > row["id"] % 3 else f"try {tries} of {row['item']} is bad"

    found = tm.map(
        FRAME, prompt="{{ item }}?", model=model, output=Choice, max_tokens=9, output_dir=folder / "job",
        validate=validate, max_tries=2,
    )  # fmt: skip

    assert found["answer_tries"].to_list() == [1, 2, 2] * 2
    assert found["answer_error"].is_null().to_list() == [True, True, False] * 2
    assert found["answer_error"][2] == "invalid_answer: row 2: try 2 of number 2 is bad"
    assert found["answer_error"][5].startswith("invalid_answer: row 5: "), "its copy has its own position"
    assert {answer for _, answer in seen} <= {"yes", "no"}
    assert found["answer_completion_tokens"].sum() == manifest(folder / "job")["usage"]["completion"]
    assert found["answer_prompt_tokens"].sum() == manifest(folder / "job")["usage"]["prompt"]
    again = {"prompt": "{{ item }}?", "model": model, "output": Choice, "max_tokens": 9, "output_dir": folder / "job"}
    with pytest.raises(InvalidCall, match="max_tries was 2, now 3"):
        tm.map(FRAME, **again, validate=validate, max_tries=3)
    with pytest.raises(InvalidCall, match="in this process only; leave out replicas"):
        tm.map(FRAME, prompt="{{ item }}?", model=model, validate=validate, replicas=2, output_dir=folder / "many")
    assert not (folder / "many").exists()


@pytest.mark.slow
def test_given_blocks_and_a_model_that_stays_loaded_when_answers_are_judged_then_each_gets_the_row_of_its_block(
    model: str,
) -> None:
    seen: list[tuple[int, str]] = []
    keywords = {
        "prompt": "{{ item }}?", "model": model, "max_tokens": 2, "max_tries": 2, "kv_cache_memory": 50_000_000,
        "validate": lambda _, row: seen.append((row["id"], row["item"])) or row["id"] != 4,
    }  # fmt: skip
    mapper, table = BlockMapper(tm.map, keywords), FRAME.to_arrow()

    blocks = [mapper(table.slice(at, 3)) for at in (0, 3)]

    assert [block["answer_tries"].to_pylist() for block in blocks] == [[1, 1, 1], [1, 2, 1]]
    assert sorted(seen) == sorted([*FRAME.rows(), (4, "number 4")])


class Rating(BaseModel):
    stars: int

    @field_validator("stars")
    @classmethod
    def _is_small(cls, value: int) -> int:
        if value == 7:
            raise KeyError("no seven")
        if value > 5:
            raise ValueError("must be at most 5")
        return value


def reason_of(output: Any, text: str, validate: Any = None, frame: Any = FRAME) -> str | None:
    check = judging(answer_form(output), validate, None if validate else 2).check_of(open_frame(frame))
    assert check is not None
    return check(1, text)


def test_given_what_functions_return_or_raise_when_judged_then_the_reason_is_what_the_model_is_told() -> None:
    def raises(_: Any) -> None:
        raise ValueError("too long")

    def by_row(answer: str, row: dict[str, Any]) -> str:
        return f"{answer} of {row['id']} and {row['item']}"

    accepted: tuple[Any, ...] = (True, None, np.True_)
    assert [reason_of(str, "x", lambda _, one=one: one) for one in accepted] == [None] * 3
    assert [reason_of(str, "x", lambda _, one=one: one) for one in (False, np.False_)] == ["it is not valid"] * 2
    assert reason_of(str, "x", raises) == "too long"
    assert reason_of(str, "x", by_row, FRAME.to_dicts()) == reason_of(str, "x", by_row) == "x of 1 and number 1"
    assert reason_of(str, "x", by_row, FRAME.to_pandas()) == "x of 1 and number 1"
    assert reason_of(Rating, '{"stars": 6}') == "stars: Value error, must be at most 5"
    assert reason_of(Rating, '{"stars": 5}', lambda rating: rating.stars == 5) is None
    assert reason_of(Rating, '{"stars": ') is not None
    for wrong, kind in ((lambda _: 1, TypeError), (lambda _: {}["a"], KeyError)):
        with pytest.raises(kind):
            reason_of(str, "x", wrong)
    with pytest.raises(KeyError):
        reason_of(Rating, '{"stars": 7}')
    for function in (by_number, partial(by_number)):
        with pytest.raises(WrongVerdict) as raised:
            reason_of(str, "x", function)
        assert raised.value.place == f"test_validation.py:{by_number.__code__.co_firstlineno}", "the function's"


def by_number(_: str) -> int:
    return 1


async def _later(_: Any) -> bool:
    return True


def test_given_wrong_arguments_when_judging_then_the_message_has_the_fix() -> None:
    form = answer_form(str)
    cases: list[tuple[Any, Any, str]] = [
        (None, 2, "max_tries: any text is an answer here; give validate"),
        (None, 0, "max_tries: is 0, but must be from 1 to 100"),
        (None, True, "max_tries: must be a whole number from 1 to 100, not True"),
        ("x", None, "validate: is a str, but must be a function of the answer"),
        (_later, None, "validate: is a coroutine function; give a plain one"),
        (lambda: True, None, "validate: must take the answer, or the answer and the row"),
        (lambda a, b, c: a, None, "validate: must take the answer, or the answer and the row"),
    ]
    for validate, max_tries, message in cases:
        with pytest.raises(InvalidCall) as raised:
            judging(form, validate, max_tries)
        assert str(raised.value).startswith(message)


@pytest.mark.slow
def test_given_former_answers_when_a_function_judges_then_those_that_it_refuses_are_computed(
    model: str, folder: Path
) -> None:
    arguments: Any = {"prompt": "{{ item }}?", "model": model, "output": Choice, "max_tokens": 9, "temperature": 0}
    tm.map(FRAME, **arguments, output_dir=folder / "first")

    def validate(_: str, row: dict[str, Any]) -> bool:
        if row["id"] == 5:
            raise KeyError("a mistake")
        return row["id"] % 2 == 0

    found = tm.map(FRAME, **arguments, reuse=folder / "first", validate=validate, max_tries=2)

    assert found["answer_reused"].to_list() == [True, False, True, False, True, False]
    assert found["answer_tries"].to_list() == [None, 2, None, 2, None, 1]
    assert "KeyError" in found["answer_error"][5]


@pytest.mark.slow
def test_given_a_dry_run_or_preview_when_answers_are_judged_then_they_say_so(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: Any = {"prompt": "{{ item }}?", "model": model, "max_tokens": 2, "validate": lambda _: False}
    assert "tries            1 a row in these numbers, 3 at most" in str(tm.map(FRAME, **arguments, dry_run=True))
    tm.preview(FRAME, **arguments, rows=1)
    assert re.search(r"answer_error: invalid_answer: .* \(asked 3 times\)", capsys.readouterr().out)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_given_a_script_killed_in_the_middle_of_tries_when_started_again_then_no_committed_row_is_asked_again(
    folder: Path, model_folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, rows, chance, committed = folder / "job", 160, random.Random(seed), dict[str, str]()
    argv = [str(PROGRAM), str(model_folder), str(job), str(rows), str(folder / "out.parquet")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENMILL_PLAN__MAX_SHARD_ROWS": "8"}
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, *argv], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        until = len(committed) + chance.randint(1, 5)
        wait_for(lambda at=until, one=process: len(parts(job)) > at or one.poll() is not None)  # type: ignore[misc]
        assert process.poll() is None, process.communicate()
        process.kill()
        process.wait()
        assert committed.items() <= digests(job).items()
        committed = digests(job)

    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", "8")
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(PROGRAM))  # the last start is in this process

    assert committed.items() <= digests(job).items()
    assert manifest(job)["usage"]["repeated"] == 0, "no token that was logged is sampled again"
    found = pl.read_parquet(folder / "out.parquet")
    assert set(found["answer_tries"]) == {1, 2, 3}
    assert found["answer_completion_tokens"].sum() == manifest(job)["usage"]["completion"]
    assert sorted(pq.read_table(job / "results", columns=["row"])["row"].to_pylist()) == list(range(rows))
