"""`tokenmill run --prompt`: a table in, and the same table with columns of answers out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.tokenmill.chaos.watching import digests, parts
from tests.tokenmill.command_processes import ROOT
from tests.waiting import wait_for

Cli = Callable[..., Any]

TABLE = pa.table({
    "id": pa.array([3, 1, 2], pa.int16()),
    "item": pa.array(["a message", None, "from the user"]).dictionary_encode(),
    "day": [date(2024, 2, 29), None, date(1969, 12, 31)],
})  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}, "stars": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["good", "stars"],
}
SHORT = ("--sampling", "max_tokens=2")


@pytest.fixture
def files(folder: Path) -> Path:
    """The working folder with a table, templates and a schema."""
    pq.write_table(TABLE, folder / "in.parquet")
    (folder / "prompt.txt").write_text("{% fields id, item %}\nGood?\n")
    (folder / "system.txt").write_text("Today is {{ day }}.\n")
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    (folder / "item.txt").write_text("{{ item }}")
    return folder


@pytest.fixture
def run(tokenmill: Cli, model_folder: Path, files: Path) -> Cli:
    """Runs the command in the folder of the files; the job is in "out"."""

    def call(table: str, prompt: str, *options: object) -> Any:
        return tokenmill(
            "run", table, "--model", f"tiny={model_folder}", "--output", "out", "--prompt", prompt, *options
        )

    return call


@pytest.mark.slow
def test_given_a_table_when_run_then_it_comes_back_with_the_typed_columns_that_map_makes(
    run: Cli, files: Path, model_folder: Path
) -> None:
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 60}
    given = [part for name, value in sampling.items() for part in ("--sampling", f"{name}={value}")]

    ended = run("in.parquet", "prompt.txt", "--system", "system.txt", "--output-schema", "schema.json", *given)

    assert ended.code == 0, ended.err
    assert ended.err.splitlines()[-1] == "out/table.parquet: 3 of 3 rows have an answer"
    found = pq.read_table(files / "out/table.parquet")
    assert found.select(TABLE.column_names).equals(TABLE)
    assert found.schema.field("answer").type == pa.struct({"good": pa.bool_(), "stars": pa.int64()})
    texts = {row["row"]: row["text"] for row in pq.read_table(files / "out/results").to_pylist()}
    assert len(set(texts.values())) > 1
    assert found["answer"].to_pylist() == [json.loads(texts[row]) for row in range(3)]
    before = digests(files / "out")
    mapped = tm.map(
        files / "in.parquet", prompt=(files / "prompt.txt").read_text(), system=(files / "system.txt").read_text(),
        model=f"tiny={model_folder}", output=SCHEMA, output_dir=files / "out", **sampling,
    )  # fmt: skip
    assert mapped.equals(found), "it is the same job"
    assert digests(files / "out") == before


@pytest.mark.slow
def test_given_a_schema_of_texts_when_run_then_it_is_the_job_of_map_with_a_literal(
    run: Cli, files: Path, model_folder: Path
) -> None:
    (files / "choice.json").write_text('{"type": "string", "enum": ["good", "bad"]}')
    ended = run("in.parquet", "item.txt", "--output-schema", "choice.json", "--sampling", "max_tokens=9")
    assert ended.code == 0, ended.err
    before = digests(files / "out")

    mapped = tm.map(
        files / "in.parquet", prompt="{{ item }}", model=f"tiny={model_folder}", output=Literal["good", "bad"],
        max_tokens=9, output_dir=files / "out",
    )  # fmt: skip

    assert digests(files / "out") == before, "it is the same job"
    assert mapped.equals(pq.read_table(files / "out/table.parquet"))
    assert mapped["answer"].type == pa.dictionary(pa.int32(), pa.string())
    assert set(mapped["answer"].to_pylist()) <= {"good", "bad"}


@pytest.mark.slow
def test_given_text_formats_and_limits_when_run_then_the_table_has_so_many_rows(run: Cli, files: Path) -> None:
    (files / "in.csv").write_text('item,n\n"one, two",1\n,2\n')
    (files / "in.jsonl").write_text('{"item": ["x"], "n": null}\n{"n": 4}\n')

    first = run("in.csv", "item.txt", "--limit", 1, "--output-column", "said", *SHORT)
    ended = run("in.jsonl", "item.txt", "--fresh", "--json", *SHORT)

    assert (first.code, ended.code) == (0, 0), ended.err
    assert ended.json()["counts"]["succeeded"] == 2
    found = pq.read_table(files / "out/table.parquet").to_pylist()
    assert [(row["item"], row["n"]) for row in found] == [(["x"], None), (None, 4)]
    prompts = [json.loads(line)["body"]["messages"] for line in (files / "out/requests.jsonl").read_text().splitlines()]
    assert [messages[0]["content"] for messages in prompts] == ['["x"]', ""]


def test_given_a_table_without_rows_when_run_then_it_has_the_new_columns(run: Cli, files: Path) -> None:
    pq.write_table(TABLE.slice(0, 0), files / "in.parquet")

    ended = run("in.parquet", "item.txt", "--output-schema", "schema.json", "--output-column", "said")

    assert ended.code == 0, ended.err
    found = pq.read_table(files / "out/table.parquet")
    assert found.num_rows == 0
    assert found.schema.names[:5] == ["id", "item", "day", "said", "said_error"]


@pytest.mark.slow
def test_given_wrong_files_or_options_when_run_then_no_job_is_made_and_the_message_has_the_fix(
    run: Cli, tokenmill: Cli, files: Path
) -> None:
    for name, text in {
        "typo.txt": "{{ itme }}", "syntax.txt": "one\n{{ item", "render.txt": "{{ item.x.y }}", "list.json": "[1]",
        "cut.json": "{", "not.json": '{"not": {"type": "string"}}', "clash.csv": "item,answer_error\na,b\n",
        "cells.csv": "item\na\nb,c\n", "broken.jsonl": '{"item": "a"}\n{"item": \n',
    }.items():  # fmt: skip
        (files / name).write_text(text)
    (files / "latin.txt").write_bytes(b"\xff{{ item }}")
    (files / "long.txt").write_text("x" * ((1 << 20) + 1))
    os.mkfifo(files / "pipe.txt")
    cases: list[tuple[tuple[object, ...], str]] = [
        (("in.parquet", "typo.txt"), "--prompt typo.txt: the data has no column 'itme'; did you mean 'item'?"),
        (("in.parquet", "item.txt", "--system", "typo.txt"), "--system typo.txt: the data has no column 'itme'"),
        (("in.parquet", "syntax.txt"), "--prompt syntax.txt, line 2"),
        (("in.parquet", "render.txt"), "row 0: --prompt render.txt: can't be rendered"),
        (("in.parquet", "none.txt"), "--prompt none.txt: can't be read: No such file"),
        (("in.parquet", "latin.txt"), "--prompt latin.txt: can't be read"),
        (("in.parquet", "Is it good?"), "No such file or directory; it takes the path of a file, or a text with {{"),
        (("in.parquet", "Is {{ itm }} good?"), "error: --prompt: the data has no column 'itm'; did you mean 'item'"),
        (("in.parquet", os.fsdecode(b"\xff {{ item }}")), "error: --prompt: can't be read"),
        (("in.parquet", "item.txt", "--output-schema", '{"enum": '), "error: --output-schema: is not JSON"),
        (("in.parquet", "item.txt", "--output-schema", "good, bad"), "takes the path of a file, or a JSON object"),
        (("in.parquet", "long.txt"), "--prompt long.txt: has more than 1048576 bytes"),
        (("in.parquet", "pipe.txt"), "pipe.txt: is no regular file"),
        (("in.parquet", "item.txt", "--output-schema", "list.json"), "list.json: must be a JSON object"),
        (("in.parquet", "item.txt", "--output-schema", "cut.json"), "cut.json: is not JSON"),
        (("in.parquet", "item.txt", "--output-schema", "not.json"), "output schema: response_format can't be compiled"),
        (("in.parquet", "item.txt", "--sampling", "temprature=1"), "did you mean temperature?"),
        (("in.parquet", "item.txt", "--sampling", "temperature=hot"), "temperature is 'hot'"),
        (("in.parquet", "item.txt", "--sampling", "kv_dtype=int8"), "is an option of its own; give --kv-dtype"),
        (("in.parquet", "item.txt", "--sampling", "seed"), "--sampling seed: give NAME=VALUE"),
        (("clash.csv", "item.txt"), "column 'answer_error' already"),
        (("cells.csv", "item.txt"), "cells.csv: can't be read: CSV parse error: Row #3"),
        (("broken.jsonl", "item.txt"), "broken.jsonl: line 2: the line is not JSON"),
        (("pipe.txt", "item.txt"), "must be files of one format"),
        (("https://host/in.parquet", "item.txt"), "must be a path on this machine, or s3://"),
    ]  # fmt: skip
    for given, message in cases:
        ended = run(*given)
        assert ended.code == 1, given
        assert message in ended.error
        assert not (files / "out/job.json").exists()
    usage: list[tuple[tuple[object, ...], str]] = [
        (("--dry-run",), "those of --prompt"),
        (("--output-column", ""), "those of --prompt"),
        (("--prompt", "item.txt", "--then", "demo"), "takes no cascade"),
        (("--prompt", "item.txt", "--dry-run", "--chat-template", "item.txt"), "takes no other --chat-template"),
        (("--prompt", "item.txt", "--model", "demo"), "takes one model"),
    ]
    usage.append((("--max-tokens", 20), "No such option: --max-tokens; with --prompt give --sampling max_tokens=VALUE"))
    usage.append((("--max-token", 20), "No such option: --max-token (Possible options"))
    for options, message in usage:
        ended = tokenmill("run", "in.parquet", "--model", "tiny", "--output", "out", *options)
        assert (ended.code, message in ended.error) == (2, True), ended.err


@pytest.mark.slow
def test_given_a_folder_with_another_job_when_run_then_only_fresh_replaces_it_and_its_table(
    run: Cli, files: Path
) -> None:
    assert run("in.parquet", "item.txt", *SHORT).code == 0
    before = digests(files / "out"), (files / "out/table.parquet").read_bytes()

    ended = run("in.parquet", "prompt.txt", *SHORT)

    assert ended.code == 1
    assert "holds a job of other prompts or options" in ended.error
    assert (digests(files / "out"), (files / "out/table.parquet").read_bytes()) == before
    assert run("in.parquet", "prompt.txt", "--fresh", "--content-policy", "nowhere").code == 1
    assert not (files / "out/table.parquet").exists(), "it was another job's"
    assert run("in.parquet", "prompt.txt", "--fresh", *SHORT).code == 0
    assert pq.read_table(files / "out/table.parquet").num_rows == 3


@pytest.mark.slow
def test_given_texts_in_place_of_files_when_run_then_it_is_the_job_of_the_files(run: Cli, files: Path) -> None:
    texts = (files / "prompt.txt").read_text(), (files / "system.txt").read_text(), json.dumps(SCHEMA)

    of_files = run("in.parquet", "prompt.txt", "--system", "system.txt", "--output-schema", "schema.json", *SHORT)
    before = digests(files / "out")
    of_texts = run("in.parquet", texts[0], "--system", texts[1], "--output-schema", texts[2], *SHORT)
    (files / "{{ item }}").write_text("{{ itme }}")
    named = run("in.parquet", "{{ item }}", "--dry-run")

    assert (of_files.code, of_texts.code) == (0, 0), of_texts.err
    assert digests(files / "out") == before, "it is the same job"
    assert "--prompt {{ item }}: the data has no column 'itme'" in named.err, "a file of that name is read"


def test_given_a_dry_run_when_made_then_it_prints_the_plan_and_writes_nothing(run: Cli, files: Path) -> None:
    shown = run("in.parquet", "prompt.txt", "--dry-run", *SHORT)
    priced = run("in.parquet", "prompt.txt", "--dry-run", "--price-per-hour", 2, *SHORT)
    ended = run("in.parquet", "prompt.txt", "--dry-run", "--limit", 2, "--json", *SHORT)

    assert (shown.code, ended.code) == (0, 0), ended.err
    assert "cost unknown: this machine has no price per hour; set TOKENMILL_PRICE" in " ".join(shown.out.split())
    assert "cost unknown, as the time is" in " ".join(priced.out.split())
    assert "shared if the fields had the template's order" in shown.out
    assert (ended.json()["rows"], ended.json()["max_tokens"]) == (2, 4)
    assert not (files / "out").exists()


@pytest.mark.slow
def test_given_former_answers_when_a_dry_run_is_made_then_it_counts_the_rows_that_the_run_reuses(
    run: Cli, files: Path
) -> None:
    (files / "birds.toml").write_text("[[rule]]\nname = 'birds'\nkeywords = ['falcon']\n")
    policy, form = ("--content-policy", "rules:birds.toml"), ("--reasoning-parser", "none")
    assert run("in.parquet", "item.txt", "--limit", 2, *SHORT, *policy, *form).code == 0
    (files / "out").rename(files / "former")
    again = ("in.parquet", "item.txt", "--reuse", "former", *SHORT)

    def planned(*options: object) -> tuple[int, int, int, int]:
        ended = run(*again, "--dry-run", "--json", *options)
        assert ended.code == 0, ended.err
        found = ended.json()
        return found["rows"], found["reused"], found["computed"], found["max_tokens"]

    assert planned(*policy, *form) == (3, 2, 1, 2)
    assert planned(*policy) == planned(*form) == (3, 0, 3, 6), "these enter the answers"
    assert not (files / "out").exists()
    assert "reused 2 of 3 rows" in run(*again, *policy, *form).err, "so does the run"
    refused = run("in.parquet", "item.txt", "--reuse", "no", "--dry-run", *SHORT)
    assert (refused.code, "no: no such folder" in refused.err) == (1, True), refused.err


@pytest.mark.slow
def test_given_a_killed_run_when_started_again_then_no_committed_row_is_computed_twice(
    run: Cli, files: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, out = 120, files / "out"
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", "4")
    pq.write_table(pa.table({"item": [f"number {row}" for row in range(rows)]}), files / "in.parquet")
    options = ("--sampling", "max_tokens=40")
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenmill", "run", "in.parquet", "--model", f"tiny={model_folder}", "--output", "out",
         "--prompt", "item.txt", *options, "--max-num-seqs", "4"],
        cwd=files, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for(lambda: len(parts(out)) > 3 or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate()
    committed = digests(out)
    assert 3 < len(committed) < rows // 4, "it was to be killed in the middle"
    assert not (out / "table.parquet").exists()

    ended = run("in.parquet", "item.txt", *options)

    assert ended.code == 0, ended.err
    assert committed.items() <= digests(out).items()
    usage = json.loads((out / "manifest.json").read_text())["usage"]
    assert usage["repeated"] == 0, "no token that was logged is sampled again"
    found = pq.read_table(out / "table.parquet")
    assert found["item"].to_pylist() == [f"number {row}" for row in range(rows)]
    assert found["answer"].null_count == 0
    assert sum(found["answer_completion_tokens"].to_pylist()) == usage["completion"]


@pytest.mark.slow
def test_given_max_tries_when_answers_are_cut_off_then_rows_of_tables_are_asked_again(run: Cli, files: Path) -> None:
    ended = run("in.parquet", "item.txt", "--output-schema", "schema.json", "--max-tries", 2, *SHORT)

    assert ended.code == 0, ended.err
    found = pq.read_table(files / "out/table.parquet").to_pylist()
    assert [row["answer_tries"] for row in found] == [2] * 3
    assert all(row["answer_error"].startswith("incomplete_answer: row ") for row in found)
    usage = json.loads((files / "out/manifest.json").read_text())["usage"]
    assert usage["completion"] == sum(row["answer_completion_tokens"] for row in found) == 12
    wrong = run("in.parquet", "item.txt", "--max-tries", 2)
    assert wrong.code != 0
    assert "max_tries: any text is an answer here" in wrong.err.replace("\n", " ")
