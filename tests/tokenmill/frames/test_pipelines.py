"""`tokenmill.pipeline`: columns from columns, in one run that is killed, stopped, watched and retried."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pyarrow.parquet as pq
import pytest
import structlog

import tokenmill as tm
from tests.tokenmill.chaos.watching import digests, parts
from tests.tokenmill.command_processes import ROOT
from tests.waiting import wait_for
from tokenmill.errors import InvalidCall
from tokenmill.frames.data.kinds import open_frame
from tokenmill.frames.pipelines.bound import bind
from workers.model.loaded_model import LoadedModel

PROGRAM = Path(__file__).with_name("pipeline_program.py")
FRAME = pl.DataFrame({"id": range(8), "item": [f"number {n}" for n in range(8)]})
STEPS = ("answer", "grade", "short")
Choice = Literal["yes", "no"]


@pytest.fixture
def model(folder: Path, model_folder: Path) -> Iterator[str]:
    """The name of the model, in a working folder of its own."""
    yield f"tiny={model_folder}"
    structlog.reset_defaults()  # as the fixture `tokenmill` does


def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_PLAN__FIRST_SEGMENT_ROWS", "3")
    monkeypatch.setenv("TOKENMILL_PLAN__SEGMENT_ROWS", "3")


def shard_rows(step: Path) -> list[int]:
    """The rows that a worker has computed: those of planned shards."""
    shards = step.glob("plans/*/shards/*.parquet")
    return sorted(row for shard in shards for row in pq.read_table(shard, columns=["row"])["row"].to_pylist())


def usage(step: Path) -> Any:
    return json.loads((step / "manifest.json").read_text())["usage"]


@pytest.mark.slow
def test_given_steps_and_a_filter_when_run_then_the_columns_are_those_of_single_calls(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_segments(monkeypatch)
    loads: list[str] = []
    load = LoadedModel.load
    monkeypatch.setattr(LoadedModel, "load", lambda *args, **options: loads.append("one") or load(*args, **options))
    answer: Any = {"prompt": "{{ item }}?", "max_tokens": 6, "temperature": 0}
    grade: Any = {"prompt": "{{ answer }} good?", "output": Choice, "max_tokens": 9, "temperature": 0}
    short: Any = {"prompt": "{{ item }}: {{ grade }}", "max_tokens": 3, "temperature": 0}
    made = tm.pipeline(
        [
            tm.step("answer", **answer),
            tm.step("grade", **grade),
            tm.filter(lambda row: row["id"] % 2 == 0 and row["grade"] in ("yes", "no")),
            tm.step("short", **short),
        ],
        model=model,
    )

    found = made.run(FRAME, output_dir=folder / "out")

    assert loads == ["one"]
    single = tm.map(FRAME, model=model, **answer)
    single = tm.map(single, model=model, output_column="grade", **grade)
    single = tm.map(single, model=model, output_column="short", **short)
    names = ["answer", "grade", "answer_key", "grade_key", "answer_finish_reason", "grade_error"]
    assert found.select(FRAME.columns + names).equals(single.select(FRAME.columns + names))
    assert found.columns == single.columns
    assert found.schema == single.schema
    dropped = found.filter(pl.col("id") % 2 == 1)
    assert all(dropped[name].is_null().all() for name in dropped.columns if name.startswith("short"))
    kept = ["id", "short", "short_key", "short_error"]
    assert found.filter(pl.col("id") % 2 == 0).select(kept).equals(single.filter(pl.col("id") % 2 == 0).select(kept))
    assert shard_rows(folder / "out/steps/short") == [0, 2, 4, 6]
    progress = tm.watch(folder / "out")
    assert [(step.name, step.done) for step in progress.steps] == [("answer", 8), ("grade", 8), ("short", 4)]
    assert progress.has_ended


@pytest.mark.slow
def test_given_failed_rows_when_retried_then_only_they_and_what_depends_on_them_is_computed(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_segments(monkeypatch)
    is_strict = True

    def validate(_: str, row: dict[str, Any]) -> bool:
        return not (is_strict and row["id"] in (2, 5))

    made = tm.pipeline(
        [
            tm.step("answer", prompt="{{ item }}?", max_tokens=4, validate=validate, max_tries=1),
            tm.step("grade", prompt="{{ answer }}", output=Choice, max_tokens=9),
            tm.step("other", prompt="{{ id }}", max_tokens=2),
        ],
        model=model,
    )
    first = made.run(FRAME, output_dir=folder / "out")

    failed = first.filter(pl.col("id").is_in([2, 5]))
    assert failed["answer"].null_count() == failed["grade"].null_count() == 2
    assert set(failed["grade_error"]) == {
        f"input_failed: row {row}: the column 'answer' has no value in this row, see answer_error" for row in (2, 5)
    }
    assert first["other_error"].null_count() == 8
    assert shard_rows(folder / "out/steps/grade") == [0, 1, 3, 4, 6, 7]
    is_strict = False

    second = made.retry_failed(FRAME, output_dir=folder / "out")

    errors = ["answer_error", "grade_error", "other_error"]
    assert all(second[name].null_count() == 8 for name in errors)
    again = folder / "out/retries/0001/steps"
    assert [shard_rows(again / name) for name in ("answer", "grade", "other")] == [[2, 5], [2, 5], []]
    same = ["id", "answer", "grade", "other"]
    untouched = ~pl.col("id").is_in([2, 5])
    assert second.filter(untouched).select(same).equals(first.filter(untouched).select(same))
    assert made.run(FRAME, output_dir=folder / "out").equals(second)
    assert made.retry_failed(FRAME, output_dir=folder / "out").equals(second), "nothing has failed"
    assert not (folder / "out/retries/0002").exists()


def test_given_steps_when_bound_then_each_needs_those_whose_columns_it_may_read() -> None:
    steps = [
        tm.step("a", prompt="{{ item }}"),
        tm.step("b", prompt="{{ item }}{{ a_error }}"),
        tm.step("c", prompt="{{ id }}"),
        tm.filter("b"),
        tm.step("d", prompt="{{ a }}"),
        tm.filter(lambda row: row["id"] > 1),
        tm.step("e", prompt="x{{ id }}"),
    ]

    bound = bind(steps, open_frame(FRAME))

    assert [one.needs for one in bound] == [(), ("a",), (), ("a", "b"), ("a", "b", "c", "d")]
    assert [one.inputs for one in bound] == [(), (), (), ("a",), ()]
    assert [one.columns for one in bound] == [("item",), ("item",), ("id",), (), ("id", "item")]


def test_given_wrong_arguments_when_made_or_run_then_the_message_names_the_step(model: str, folder: Path) -> None:
    answer = tm.step("answer", prompt="{{ item }}")
    cases: list[tuple[Any, str]] = [
        (lambda: tm.step("../x", prompt="a"), "can't be its name"),
        (lambda: tm.step("a", prompt="{{ "), "step 'a': prompt, line 1"),
        (lambda: tm.step("a"), "step 'a': .*prompt"),
        (lambda: tm.step("a", prompt="x", output_dir="b"), "output_dir: is no argument of a step"),
        (lambda: tm.step("a", prompt="x", temprature=1), "did you mean temperature"),
        (lambda: tm.filter(3), "filter: must be the name of a column"),  # type: ignore[arg-type]
        (lambda: tm.pipeline([]), "there is none"),
        (lambda: tm.pipeline([answer]), "step 'answer': has no model"),
        (lambda: tm.pipeline([answer, answer], model=model), "two have the name 'answer'"),
        (lambda: tm.pipeline([answer], model=model, quantise="int8"), "did you mean quantize"),  # type: ignore[call-arg]
    ]
    runs: list[tuple[list[Any], str]] = [
        ([tm.step("a", prompt="{{ itm }}")], "step 'a': prompt: the data has no column 'itm'; did you mean 'item'"),
        (
            [tm.step("a", prompt="{{ answer }}"), answer],
            "step 'a': .* no column 'answer'.* which comes later, makes",
        ),
        ([tm.filter("answer_tries"), answer], "filter: .* The step 'answer', which comes later, makes 'answer_tries'"),
        ([tm.step("item", prompt="{{ id }}")], "step 'item': output_column: the data has a column 'item' already"),
        ([tm.filter("good"), answer], "filter: there is no one column 'good'"),
        ([tm.step("v", tm.embed, column="item")], "step 'v': model: .* makes no embeddings"),
    ]
    cases.append((lambda: tm.pipeline([answer], model=model).plan(), "data: is missing.*plan\\(data\\)"))
    for steps, message in runs:
        made = tm.pipeline(steps, model=model)
        cases.append((lambda made=made: made.run(FRAME, output_dir=folder / "out"), message))
    for call, message in cases:
        with pytest.raises(InvalidCall, match=message):
            call()
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_given_another_pipeline_when_run_in_the_same_folder_then_the_message_says_what_differs(
    model: str, folder: Path
) -> None:
    def run(frame: Any = FRAME, **changes: Any) -> Any:
        arguments: Any = {"prompt": "{{ item }}", "max_tokens": 2, **changes}
        return tm.pipeline([tm.step("answer", **arguments)], model=model).run(frame, output_dir=folder / "out")

    run()
    other = FRAME.with_columns(item=pl.lit("other"))
    for call, message in (
        (lambda: run(max_tokens=3), "its step 'answer' has other texts, output or parameters"),
        (lambda: run(validate=bool), "its step 'answer' has other function that judges"),
        (lambda: run(FRAME.head(3)), "it is over another table, of 8 rows"),
        (lambda: run(other), "it is over other cells"),
        (lambda: run(dtype="bfloat16"), "holds another job: model.dtype was"),
    ):
        with pytest.raises(InvalidCall, match=message):
            call()
    assert run(FRAME.with_columns(id=0))["answer_error"].null_count() == 8, "no text uses this column"
    with pytest.raises(InvalidCall, match="is the output_dir itself"):
        tm.pipeline([tm.step("answer", prompt="{{ item }}", max_tokens=2)], model=model).run(
            FRAME, output_dir=folder / "out", reuse=folder / "out"
        )


@pytest.mark.slow
def test_given_a_plan_and_a_table_without_rows_when_made_then_nothing_is_computed(model: str) -> None:
    made = tm.pipeline(
        [
            tm.step("answer", prompt="{{ item }}", max_tokens=10),
            tm.step("grade", prompt="{{ answer }}{{ answer.score }}", output=Choice),
        ],
        model=model,
    )

    plan = made.plan(FRAME)

    assert plan.assumed == ("grade",)
    answer, grade = plan.steps["answer"], plan.steps["grade"]
    assert answer is not None
    assert grade is not None
    assert (answer.rows, grade.rows, answer.max_tokens) == (8, 8, 80)
    assert grade.prompt_tokens > 8 * 2 * answer.expected_tokens / 8
    assert "grade (with assumed answers" in str(plan)
    empty = made.run(FRAME.head(0))
    assert empty.columns[2] == "answer"
    assert empty.schema["grade"] == pl.Enum(["yes", "no"])


@pytest.mark.slow
def test_given_two_models_and_pooled_steps_when_run_then_each_model_is_loaded_once(
    model: str, model_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_segments(monkeypatch)
    loads: list[str] = []
    load = LoadedModel.load

    def record(*args: Any, **options: Any) -> LoadedModel:
        loads.append(options["name"])
        return load(*args, **options)

    monkeypatch.setattr(LoadedModel, "load", record)
    other = f"other={model_folder}"
    made = tm.pipeline(
        [
            tm.step("answer", prompt="{{ item }}", max_tokens=2),
            tm.step("label", tm.classify, text="{{ answer }}", labels=["yes", "no"], model=other, dtype="bfloat16"),
            tm.step("last", prompt="{{ label }} {{ label_probability }}", max_tokens=2),
        ],
        model=model,
        dtype="float32",
    )  # fmt: skip

    found = made.run(FRAME)

    assert loads == ["tiny", "other", "tiny"]
    assert set(found["label"]) <= {"yes", "no"}
    assert found["last_error"].null_count() == found["label_error"].null_count() == 8


@pytest.mark.slow
def test_given_ctrl_c_when_run_again_as_the_message_says_then_nothing_is_computed_twice(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", "8")
    frame = pl.DataFrame({"item": [f"number {n}" for n in range(160)]})
    made = tm.pipeline(
        [tm.step("answer", prompt="{{ item }}", max_tokens=20), tm.step("short", prompt="{{ answer }}", max_tokens=9)],
        model=model,
    )
    out = folder / "out"

    def interrupt() -> None:
        wait_for(lambda: len(parts(out / "steps/answer")) > 3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt) as raised:
        made.run(frame, output_dir=out)

    said = re.match(r"stopped: answer (\d+)/160, short \d+/\d+\+? are committed; ", str(raised.value))
    assert said is not None, raised.value
    progress = tm.watch(out)
    assert (progress.is_running, progress.has_ended) == (False, False)
    assert progress.steps[0].done == int(said[1])
    committed = digests(out / "steps/answer")
    found = made.run(frame, output_dir=out)
    assert found["short_error"].null_count() == 160
    assert committed.items() <= digests(out / "steps/answer").items()
    assert [usage(out / "steps" / name)["repeated"] for name in ("answer", "short")] == [0, 0]


def committed(job: Path) -> dict[tuple[str, str], str]:
    return {(name, part): digest for name in STEPS for part, digest in digests(job / "steps" / name).items()}


@pytest.mark.parametrize(
    "kills", [pytest.param(2, marks=pytest.mark.slow), pytest.param(25, marks=pytest.mark.exhaustive)]
)
def test_given_a_script_killed_at_random_moments_when_started_again_then_each_row_of_a_column_is_computed_once(
    folder: Path, model_folder: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, job, chance = 32 * kills, folder / "job", random.Random(kills)
    settings = {
        "TOKENMILL_PLAN__MAX_SHARD_ROWS": "8", "TOKENMILL_PLAN__FIRST_SEGMENT_ROWS": "32",
        "TOKENMILL_PLAN__SEGMENT_ROWS": "64",
    }  # fmt: skip
    argv = [str(PROGRAM), str(model_folder), str(job), str(rows), str(folder / "out.parquet")]
    before: dict[tuple[str, str], str] = {}
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, *argv], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **settings},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        until = len(before) + chance.randint(0, 6)
        wait_for(lambda at=until, one=process: len(committed(job)) > at or one.poll() is not None)  # type: ignore[misc]
        assert process.poll() is None, process.communicate()
        process.kill()
        process.wait()
        assert before.items() <= committed(job).items()
        before = committed(job)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(PROGRAM))  # the last start is in this process

    assert before.items() <= committed(job).items()
    found = pl.read_parquet(folder / "out.parquet").with_row_index("row")
    dropped = pl.col("grade").is_null() | (pl.col("grade") != "yes")
    wanted = {
        "answer": found["row"].to_list(),
        "grade": found["row"].to_list(),
        "short": found.filter(~dropped)["row"].to_list(),
    }
    for name, expected in wanted.items():
        step = job / "steps" / name
        assert sorted(pq.read_table(step / "results", columns=["row"])["row"].to_pylist()) == expected
        assert usage(step)["repeated"] == 0, "no token that was logged is sampled again"
        assert found[f"{name}_completion_tokens"].sum() == usage(step)["completion"]
    failed = found.filter(pl.col("answer").is_null())
    assert set(found["answer_tries"]) == {1, 2, 3}
    assert failed["grade_error"].str.starts_with("input_failed: ").all()
    assert found.filter(~dropped)["short_error"].null_count() == len(wanted["short"])
