"""`tokenmill.map` and `tokenmill.preview` with a small model of random weights, and a script that is killed."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog

import tokenmill as tm
from tests.tokenmill.chaos.watching import digests, parts
from tests.tokenmill.command_processes import ROOT
from tests.waiting import wait_for
from tokenmill.errors import InvalidCall
from workers.model.loaded_model import LoadedModel

PROGRAM = Path(__file__).with_name("table_program.py")
PROMPT = "{{ item }}?"
ROWS_PER_PART = 4
ITEMS = ["a message", None, "from the user"]
NEW = ("answer", "answer_error", "answer_finish_reason", "answer_prompt_tokens", "answer_cached_tokens",
       "answer_completion_tokens", "answer_key", "answer_reused", "answer_tries")  # fmt: skip
Choice = Literal["yes", "no"]


@pytest.fixture
def model(folder: Path, model_folder: Path) -> Iterator[str]:
    """The name of the model, in a working folder of its own."""
    yield f"tiny={model_folder}"
    structlog.reset_defaults()  # as the fixture `tokenmill` does


@pytest.mark.slow
def test_given_one_table_of_every_kind_when_mapped_then_the_answers_are_the_same(model: str, folder: Path) -> None:
    table = pa.table({"item": ITEMS})
    pq.write_table(table, folder / "items.parquet")
    makes: dict[str, Callable[[], Any]] = {
        "arrow": lambda: table,
        "path": lambda: folder / "items.parquet",
        "dicts": table.to_pylist,
        "pandas": table.to_pandas,
        "polars": lambda: pl.DataFrame({"item": ITEMS}),
        "duckdb": lambda: duckdb.sql("select * from 'items.parquet'"),
    }
    kinds: dict[str, type] = {
        "arrow": pa.Table, "path": pa.Table, "dicts": list, "pandas": pd.DataFrame, "polars": pl.DataFrame,
        "duckdb": duckdb.DuckDBPyRelation,
    }  # fmt: skip
    read: dict[type, Callable[[Any], list[dict[str, Any]]]] = {
        pa.Table: lambda found: found.to_pylist(),
        list: lambda found: found,
        pd.DataFrame: lambda found: pa.Table.from_pandas(found).to_pylist(),
        pl.DataFrame: lambda found: found.to_dicts(),
        duckdb.DuckDBPyRelation: lambda found: found.to_arrow_table().to_pylist(),
    }
    rows = {}
    for name, make in makes.items():  # one job, of which all but the first find the results
        found = tm.map(make(), prompt=PROMPT, model=model, output=Choice, max_tokens=20, output_dir=folder / "job")
        assert isinstance(found, kinds[name])
        rows[name] = read[kinds[name]](found)
    assert [row["item"] for row in rows["arrow"]] == ITEMS
    assert {row["answer"] for row in rows["arrow"]} <= {"yes", "no"}
    assert [row["answer_error"] for row in rows["arrow"]] == [None] * 3
    assert tuple(rows["arrow"][0])[1:] == NEW
    assert all(one == rows["arrow"] for one in rows.values())


def test_given_a_schema_when_answers_are_cut_off_then_they_are_null_with_their_error(model: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "array", "items": {"type": "integer"}}}, "required": ["n"]}

    found = tm.map([{"item": "a"}], prompt=PROMPT, model=model, output=schema, max_tokens=3, output_column="out")

    (row,) = found
    assert row["out"] is None
    assert row["out_error"].startswith("incomplete_answer: ")
    assert (row["out_finish_reason"], row["out_completion_tokens"]) == ("length", 3)


def test_given_a_text_when_cut_off_or_refused_then_only_the_refused_row_has_no_answer(model: str) -> None:
    rows = [{"item": "a"}, {"item": "message " * 4_000}]

    found = tm.map(rows, prompt=PROMPT, system="Be brief.", model=model, max_tokens=4, temperature=0)

    assert isinstance(found[0]["answer"], str)
    assert found[0]["answer_finish_reason"] == "length"
    assert found[1]["answer"] is None
    assert found[1]["answer_error"].startswith("context_length_exceeded: ")


def test_given_a_table_without_rows_when_mapped_then_it_has_the_new_columns(model: str) -> None:
    found = tm.map(pl.DataFrame({"item": pl.Series([], dtype=pl.String)}), prompt=PROMPT, model=model, output=Choice)

    assert found.columns == ["item", *NEW]
    assert found.schema["answer"] == pl.Enum(["yes", "no"])


def test_given_wrong_arguments_when_mapped_then_nothing_runs_and_the_message_has_the_fix(
    model: str, folder: Path
) -> None:
    rows = [{"item": "a", "answer_error": "b", "answer_2": "c"}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"data": rows}, "column 'answer_error' already; give another one, such as 'answer_3'"),
        ({"prompt": "{{ itme }}"}, "did you mean 'item'"),
        ({"system": "{% fields item %}"}, "belongs into the prompt"),
        ({"temprature": 1}, "did you mean temperature"),
        ({"prompt": "Good? {item}"}, "write {{ item }}"),
        ({"output": {"item": "str"}}, "has none of its keywords"),
        ({"temperature": -1}, "temperature"),
        ({"prompt": "{{ item.x.y }}"}, "row 0: prompt: can't be rendered"),
        ({"output": {"not": {"type": "string"}}}, "output schema: response_format can't be compiled"),
    ]
    for given, message in cases:
        arguments: dict[str, Any] = {"data": [{"item": "a"}], "prompt": PROMPT, "model": model, **given}
        with pytest.raises(ValueError) as raised:  # noqa: PT011  # its message is compared here
            tm.map(output_dir=folder / "job", **arguments)
        assert message in str(raised.value)
        assert not (folder / "job" / "job.json").exists()
    with pytest.raises(InvalidCall, match="rows: is 0"):
        tm.preview([{"item": "a"}], prompt=PROMPT, model=model, rows=0)


def test_given_arguments_by_place_or_misnamed_when_called_then_they_are_taken_or_named() -> None:
    rows: Any = [{"item": "a"}]
    cases: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
        (tm.map, (rows,), {"model": "m"}, "map: lacks prompt; give prompt=..."),
        (tm.map, (rows,), {"promt": "a", "model": "m"}, "promt: is no parameter; did you mean prompt?"),
        (tm.map, (rows, "a"), {"prompt": "a", "model": "m"}, "map: prompt is given twice"),
        (tm.map, (rows, "a", "m"), {}, "map: takes data and prompt without a name, and all others by name: model=,"),
        (tm.preview, (rows, "a"), {}, "preview: lacks model"),
        (tm.embed, (rows, "a"), {"model": "m"}, "embed: takes data without a name, and all others by name: model=, te"),
        (tm.classify, (rows,), {"model": "m", "prompt": "a"}, "prompt: is no parameter; did you mean text?"),
    ]
    for call, args, given, message in cases:
        with pytest.raises((TypeError, InvalidCall)) as raised:
            call(*args, **given)
        assert message in str(raised.value)
    with pytest.raises(InvalidCall, match=r"write \{\{ item \}\}"):  # the second one is the prompt
        tm.map(rows, "Good? {item}", model="m")


def test_given_a_folder_with_another_job_when_mapped_then_it_is_refused(model: str, folder: Path) -> None:
    out, arguments = folder / "job", {"prompt": PROMPT, "model": model, "output_dir": folder / "job"}
    tm.map([{"item": "a"}], **arguments, max_tokens=2)
    before = digests(out)

    with pytest.raises(InvalidCall, match="holds a job of other prompts or options"):
        tm.map([{"item": "b"}], **arguments, max_tokens=2)
    with pytest.raises(InvalidCall, match="holds a job of other prompts or options"):
        tm.map([{"item": "a"}], **arguments, max_tokens=3)

    assert tm.map([{"item": "a"}], **arguments, max_tokens=2)[0]["answer_completion_tokens"] == 2
    assert digests(out) == before
    assert not list(out.glob(".tokenmill-*"))


def test_given_options_of_the_engine_when_mapped_then_it_has_them(model: str, folder: Path) -> None:
    arguments: dict[str, Any] = {"prompt": PROMPT, "model": model, "output_dir": folder / "job", "max_tokens": 2}
    tm.map([{"item": "a"}], **arguments, dtype="float32", quantize="int8", max_num_seqs=3, kv_cache_memory=1 << 20)

    manifest = json.loads((folder / "job/manifest.json").read_text())
    assert (manifest["models"][0]["dtype"], manifest["models"][0]["quantization"]) == ("float32", "int8")
    assert manifest["engine"]["max_num_seqs"] == 3
    with pytest.raises(InvalidCall, match="quantization was int8, now none"):
        tm.map([{"item": "a"}], **arguments, dtype="float32")
    with pytest.raises(InvalidCall, match="did you mean quantize"):
        tm.preview([{"item": "a"}], prompt=PROMPT, model=model, quantise="int8")  # type: ignore[call-arg]


def test_given_a_dry_run_with_fields_when_made_then_it_says_what_their_order_saves(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_KV_BLOCK_SIZE", "8")
    rows = [{"review": f"{n} and back again", "item": "a message from the user " * 5} for n in range(6)]

    found = tm.map(rows, prompt="{% fields review, item %}", model=model, max_tokens=2, dry_run=True)

    assert (found.rows, found.computed, found.max_tokens) == (6, 6, 12)
    assert found.sharing is not None
    assert found.sharing.written == 0
    assert found.sharing.chosen == 5 * len(f"item: {rows[0]['item']}\n")
    assert found.shared_as_written is not None
    assert found.shared_prefix_tokens > found.shared_as_written
    assert f"{found.shared_as_written:,} shared if the fields" in str(found)
    assert "bench" in str(found)


def test_given_choices_when_estimated_then_no_answer_is_expected_to_be_longer_than_one(model: str) -> None:
    rows = [{"item": name} for name in "abc"]

    found = tm.map(rows, prompt=PROMPT, model=model, output=Literal["no", "yes"], max_tokens=100, dry_run=True)

    assert (found.expected_tokens, found.max_tokens) == (3 * len("yes."), 3 * len("yes."))


def test_given_nulls_one_prompt_or_no_max_tokens_when_estimated_or_mapped_then_a_line_says_so(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pd.DataFrame({"item": ["a", None, "b"], "old": [None, None, "x"]})
    call: dict[str, Any] = {"prompt": "{{ item }}{% if old %}{{ old }}{% endif %}", "model": model}
    null = "item is null in 1 row; it is rendered as empty text"
    limit = "max_tokens is not given: an answer may have 4,096 tokens, as the text has no bound"
    same = "prompt: no column is named, such as {{ item }}, so all 3 rows ask the same"

    assert tm.map(frame, **call, dry_run=True).notes == (null, limit)
    assert f"note             {null}" in str(tm.map(frame, **call, dry_run=True))
    assert tm.map(frame, **call | {"prompt": "Good?"}, output=Choice, dry_run=True).notes == (same,)
    assert null not in capsys.readouterr().err
    tm.map(frame, **call, max_tokens=1)
    said = capsys.readouterr().err.splitlines()
    assert (said.count(null), said.count(limit)) == (1, 0)


def test_given_fields_when_mapped_then_prompts_have_the_chosen_order(model: str, folder: Path) -> None:
    rows = [{"n": n, "item": "the same long text"} for n in range(2)]

    tm.map(rows, prompt="{% fields n, item %}Same?", model=model, max_tokens=1, output_dir=folder / "job")

    lines = [json.loads(line) for line in (folder / "job/requests.jsonl").read_text().splitlines()]
    assert [line["body"]["messages"][0]["content"] for line in lines] == [
        f"item: the same long text\nn: {n}\nSame?" for n in range(2)
    ]


def test_given_a_preview_when_made_then_prompts_and_answers_are_printed(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tm.preview([{"item": f"[b]{n}"} for n in range(9)], prompt=PROMPT, model=model, output=Choice, rows=2, max_tokens=9)

    out = capsys.readouterr().out
    assert "row 0\n  user: [b]0?\n  answer: " in out
    assert "row 1\n" in out
    assert "row 2" not in out
    assert "answer_" not in out, "what the table has besides of each row"


@pytest.mark.slow
def test_given_ctrl_c_without_a_folder_when_mapped_again_as_the_message_says_then_nothing_is_computed_twice(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", str(ROWS_PER_PART))
    frame = pl.DataFrame({"item": [f"number {n}" for n in range(160)]})
    arguments: Any = {"prompt": PROMPT, "model": model, "temperature": 0, "max_tokens": 20}

    def interrupt() -> None:
        wait_for(lambda: len(list(folder.glob("tokenmill-*/results/part-*"))) > 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt) as raised:
        tm.map(frame, **arguments)

    said = re.fullmatch(
        r"stopped: (\d+) of 160 rows are committed(?:, and \d+ more are computed)?; what is computed is "
        r"kept, and the same call with "
        r"output_dir='(.*)' goes on from there",
        str(raised.value),
    )
    assert said is not None
    assert len(traceback.extract_tb(raised.tb)) == 2, "the caller's line, and one of this project"
    assert "temporary" in raised.value.__notes__[0]
    job = Path(said[2])
    committed = digests(job)
    assert sum(pq.read_metadata(part).num_rows for part in parts(job)) == int(said[1]) > 0
    found = tm.map(frame, **arguments, output_dir=job)
    assert committed.items() <= digests(job).items()
    assert found["answer_error"].null_count() == 160
    assert json.loads((job / "manifest.json").read_text())["usage"]["repeated"] == 0
    tm.map(frame.head(1), **arguments)
    assert list(folder.glob("tokenmill-*")) == [job], "a job that ends leaves no temporary folder"


def arguments(model_folder: Path, folder: Path, rows: int) -> list[str]:
    return [str(PROGRAM), str(model_folder), str(folder / "job"), str(rows), str(folder / "out.parquet")]


def start(model_folder: Path, folder: Path, rows: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENMILL_PLAN__MAX_SHARD_ROWS": str(ROWS_PER_PART)}
    return subprocess.Popen(
        [sys.executable, *arguments(model_folder, folder, rows)],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "kills"), [(320, 1), (1_200, 3)])
@pytest.mark.exhaustive
def test_given_a_script_killed_at_random_moments_when_started_again_then_no_committed_row_is_computed_twice(
    folder: Path, model_folder: Path, rows: int, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, chance = folder / "job", random.Random(f"{rows} {kills}")
    committed: dict[str, str] = {}
    for kill in range(kills):
        process = start(model_folder, folder, rows)
        step = max(2, (rows // ROWS_PER_PART - len(committed)) // (4 * (kills - kill)))
        until = len(committed) + chance.randint(2, step)
        wait_for(lambda at=until, one=process: len(parts(job)) > at or one.poll() is not None)  # type: ignore[misc]
        assert process.poll() is None, process.communicate()
        process.kill()
        process.wait()
        assert committed.items() <= digests(job).items()
        committed = digests(job)
    assert 0 < len(committed) < rows // ROWS_PER_PART, "it was to be killed in the middle"

    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", str(ROWS_PER_PART))
    monkeypatch.setattr(sys, "argv", arguments(model_folder, folder, rows))
    runpy.run_path(str(PROGRAM))  # the last start is in this process

    assert committed.items() <= digests(job).items()
    usage = json.loads((job / "manifest.json").read_text())["usage"]
    assert usage["repeated"] == 0, "no token that was logged is sampled again"
    found = pl.read_parquet(folder / "out.parquet")
    assert found["item"].to_list() == [f"number {n}" for n in range(rows)]
    assert found["answer_error"].null_count() == rows
    assert set(found["answer"]) <= {"yes", "no"}
    assert found["answer_completion_tokens"].sum() == usage["completion"]
    assert sorted(pq.read_table(job / "results", columns=["row"])["row"].to_pylist()) == list(range(rows))


def test_given_a_resident_model_when_mapped_twice_then_it_is_loaded_once_and_answers_alike(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[LoadedModel] = []
    load = LoadedModel.load
    monkeypatch.setattr(LoadedModel, "load", lambda *args, **options: loads.append(load(*args, **options)) or loads[-1])
    table = pa.table({"item": ["a message " * 40, "from the user"]})
    call: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}

    with tm.load_model(model, dtype="float32") as resident:
        first = tm.map(table, model=resident, output_dir=folder / "first", **call)
        second = tm.map(table, model=resident, output_dir=folder / "second", **call)
        assert len(loads) == 1
    alone = tm.map(table, model=model, dtype="float32", **call)

    assert len(loads) == 2
    assert first["answer"] == second["answer"] == alone["answer"]
    assert first["answer_error"].null_count == 2
    # The second job counts its own work, and finds the first one's blocks.
    usages = [json.loads((folder / name / "manifest.json").read_text())["usage"] for name in ("first", "second")]
    assert usages[0]["completion"] == usages[1]["completion"] > 0
    assert usages[0]["cached"] < usages[1]["cached"]


def test_given_a_job_that_fails_when_mapped_again_then_the_resident_model_is_loaded_anew(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"item": ["a message"]})
    with tm.load_model(model) as resident:
        with monkeypatch.context() as broken:
            broken.setattr(LoadedModel, "mismatch", lambda *_: "planted")
            with pytest.raises(Exception, match="planted"):
                tm.map(table, prompt=PROMPT, model=resident, max_tokens=2)
        assert tm.map(table, prompt=PROMPT, model=resident, max_tokens=2)["answer_error"].null_count == 1


def test_options_of_a_resident_model_are_given_once(model: str) -> None:
    with pytest.raises(InvalidCall, match="temperature: is a sampling parameter"):
        tm.load_model(model, temperature=0)  # type: ignore[call-arg]
    with pytest.raises(InvalidCall, match="replicas: must be 1"):
        tm.load_model(model, replicas=2)
    with tm.load_model(model) as resident, pytest.raises(InvalidCall, match="dtype: the model is loaded already"):
        tm.map([{"item": "a"}], prompt=PROMPT, model=resident, dtype="float32")
