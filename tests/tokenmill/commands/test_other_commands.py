"""jobs, estimate, models and bench, as their user and a program see them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.planner.estimates.capacity import HARDWARE
from tokenmill import output
from tokenmill.bench_results import MeasuredSpeed
from tokenmill.commands.estimate import DEVICES
from workers.model.loaded_model import model_digest

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Write = Callable[..., Path]


@pytest.fixture
def job(tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write) -> Path:
    """A finished job of three answers and one bad line."""
    out = folder / "jobs-here" / "one"
    path = write_lines(chat("a"), "{", chat("b", text="longer first", max_tokens=30), chat("c"))
    assert tokenmill("run", path, "--model", f"tiny={model_folder}", "--output", out).code == 0
    return out


@pytest.mark.slow
def test_given_a_folder_of_jobs_when_listed_and_shown_then_people_and_programs_see_how_they_stand(
    tokenmill: Cli, job: Path
) -> None:
    table = tokenmill("jobs", "list", job.parent)
    listed = tokenmill("jobs", "list", job.parent, "--json").json()
    itself = tokenmill("jobs", "list", job, "--json").json()
    shown = tokenmill("jobs", "show", job)
    document = tokenmill("jobs", "show", job, "--json").json()

    assert "completed" in table.out
    assert listed == itself
    assert listed == [document]
    assert document["object"] == "batch"
    assert document["tokenmill"]["counts"]["succeeded"] == 3
    assert document["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    assert document["status"] == "completed"
    assert "completed" in shown.out
    assert "requests.jsonl" in shown.out


@pytest.mark.slow
def test_given_a_job_when_exported_then_the_lines_have_openai_form_and_the_requested_order(
    tokenmill: Cli, job: Path, folder: Path
) -> None:
    done = tokenmill("jobs", "export", job, "--to", folder / "out.jsonl", "--in-input-order", "--json")
    split = tokenmill("jobs", "export", job, "--to", folder / "good.jsonl", "--errors-to", folder / "bad.jsonl")

    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert done.json()["succeeded"] == 3
    assert [line["custom_id"] for line in lines] == ["a", None, "b", "c"]
    assert lines[0]["response"]["status_code"] == 200
    assert lines[0]["response"]["body"]["choices"][0]["message"]["content"] is not None
    assert lines[1]["error"]["code"] == "invalid_json"
    inside = tokenmill("jobs", "export", job, "--to", job / "results" / "x.jsonl")
    errors = tokenmill("jobs", "export", job, "--to", folder / "y.jsonl", "--errors-to", job / "results" / "x.jsonl")
    assert "x.jsonl: lies among the job's results" in inside.error
    assert "x.jsonl: lies among the job's results" in errors.error
    assert not (job / "results" / "x.jsonl").exists()
    assert not (folder / "y.jsonl").exists()
    assert split.code == 0
    assert len((folder / "good.jsonl").read_text().splitlines()) == 3
    assert len((folder / "bad.jsonl").read_text().splitlines()) == 1


def test_given_no_job_when_shown_then_the_error_is_one_line(tokenmill: Cli, folder: Path) -> None:
    (folder / "empty").mkdir()

    nothing = tokenmill("jobs", "list", folder / "empty")
    missing = tokenmill("jobs", "show", folder / "empty")
    nowhere = tokenmill("jobs", "show", folder / "nowhere")

    assert nothing.code == 0
    assert "no jobs in" in nothing.err
    assert missing.code == 1
    assert "no job" in missing.error
    assert nowhere.code == 1
    assert "no such folder" in nowhere.error


@pytest.mark.slow
def test_given_an_input_when_estimated_then_tokens_add_up_and_nothing_is_written(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    path = write_lines(chat("a", max_tokens=10), chat("copy", max_tokens=10), chat("b", text="x", max_tokens=20), "{")
    before = sorted(folder.rglob("*"))
    arguments = ("estimate", path, "--model", f"tiny={model_folder}", "--hardware", "h100", "--price-per-hour", "36")

    found = tokenmill(*arguments, "--exact", "--json").json()
    (small,) = tokenmill(*arguments, "--exact", "--json", "--quantize", "int4").json()["times"]
    shown = tokenmill(*arguments)

    assert sorted(folder.rglob("*")) == before
    assert (found["rows"], found["rejected"], found["unique"]) == (4, 1, 2)
    assert found["max_tokens"] == 30
    assert 0 < found["expected_tokens"] <= 30
    assert found["reasons"] == {"invalid_json": 1}
    (least,) = found["times"]
    assert least["on"] == "h100"
    assert small["seconds"] < least["seconds"], "its weights are a quarter as large"
    assert least["cost"] == pytest.approx(least["seconds"] / 100)
    assert "h100" in shown.out
    assert "tokenmill bench" in shown.err


@pytest.mark.slow
def test_given_several_devices_when_estimated_then_their_capacity_time_and_price_are_shown(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(chat("r", max_tokens=20))
    monkeypatch.setitem(HARDWARE, "t4", replace(HARDWARE["t4"], memory=1.0))  # type: ignore[arg-type]
    estimate = ("estimate", path, "--model", f"tiny={model_folder}", "--hardware", "h100")
    found, one = (
        tokenmill(*estimate, *more, "--context", 100, "--json").json()
        for more in (("--tensor-parallel", 2, "--replicas", 2, "--kv-dtype", "int8"), ())
    )
    (fits,), (alone,), (time,) = found["capacity"], one["capacity"], found["times"]
    assert (fits["on"], fits["devices"], fits["context_tokens"]) == ("2x2xh100", 4, 100)
    assert fits["weight_bytes"] == pytest.approx(alone["weight_bytes"] / 2, abs=2)
    assert fits["kv_bytes_per_token"] == alone["kv_bytes_per_token"] / 4, "half of the heads, in half of the bits"
    assert fits["kv_bytes_per_request"] == 100 * fits["kv_bytes_per_token"]
    assert fits["max_requests"] == pytest.approx(8 * alone["max_requests"], rel=0.01)
    assert fits["price_per_month"] == pytest.approx(4 * alone["price_per_month"])
    assert fits["communication_seconds"] > alone["communication_seconds"] == 0.0
    replica = fits["price_per_month"] / 2 / 730
    assert time["cost"] == pytest.approx(time["seconds"] * replica / 3600), "the one shard is for one of the replicas"
    assert "of it communication" in time["basis"]
    shown = tokenmill(*estimate, "--hardware", "t4", "--tensor-parallel", 2)
    assert "requests at once" in shown.out
    assert "leave no room" in shown.out, "the other one fits"
    for more, why in (
        (("--tensor-parallel", 3), "can't be shared evenly by 3 devices"),
        (("--context", 10**9), "is beyond the model's context"),
    ):
        refused = tokenmill(*estimate, *more)
        assert (refused.code, why in refused.error) == (1, True), refused
    refused = tokenmill("estimate", path, "--model", f"tiny={model_folder}", "--hardware", "t4")
    assert (refused.code, "1 x t4" in refused.error) == (1, True)
    assert "give it too" in tokenmill("estimate", path, "--model", f"tiny={model_folder}", "--replicas", 2).err


def test_given_the_devices_offered_when_compared_with_the_data_sheets_then_none_is_missing() -> None:
    assert sorted(DEVICES) == sorted(HARDWARE)


@pytest.mark.parametrize("context", [128, 256])
@pytest.mark.slow
def test_given_a_small_context_when_measured_then_prompts_fit_it(
    context: int, tokenmill: Cli, folder: Path, model_folder: Path
) -> None:
    model = shutil.copytree(model_folder, folder / "small")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    quick = ("--repeats", "1", "--batch", "2", "--rows", "20", "--dtype", "float32", "--threads", "1")
    found = tokenmill("bench", "--model", model, *quick, "--json").json()
    names = [result["name"] for result in found["results"]]
    assert f"prefill, prompts of {context - 1} tokens" in names
    assert found["pipeline_rows_per_second"] > 0


@pytest.mark.slow
def test_given_a_bench_when_it_ends_then_its_results_are_printed_and_estimate_uses_them(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    quick = ("--repeats", "1", "--batch", "2", "--rows", "20", "--dtype", "float32", "--threads", "1")

    benched = tokenmill("bench", "--model", model_folder, *quick, "--json")
    found = benched.json()
    stages = benched.err.splitlines()[-4:]
    assert [line.split(" (about")[0] for line in stages] == [
        "4 of 7: decode, batch 2",
        "5 of 7: prefill, a prompt of 128 tokens",
        "6 of 7: prefill, prompts of 128 tokens",
        "7 of 7: decode, batch 5, behind 486 tokens",
    ]
    assert all(line.endswith(" left)") for line in stages)
    estimated = tokenmill(
        "estimate", write_lines(chat("a", max_tokens=10)), "--model", f"tiny={model_folder}",
        "--dtype", "float32", "--threads", "1", "--json",
    ).json()  # fmt: skip

    names = [result["name"] for result in found["results"]]
    assert names[:3] == ["scheduler alone, batch 256", "prefill, prompts of 256 tokens", "decode, batch 2"]
    assert any("behind" in name for name in names), "decoding behind long contexts is measured separately"
    assert all(result["tokens_per_second"] > 0 for result in found["results"])
    assert found["pipeline_rows_per_second"] > 0
    (here,) = estimated["times"]
    assert here["on"] == "this machine"
    assert [tokens for tokens, _ in found["step_sizes"]] == [2, 128, 512, 2048]
    assert min(seconds for _, seconds in found["step_sizes"]) >= 0
    assert found["cache_bytes"] > 2**20
    assert estimated["expected_tokens"] == 5, "half of what it may have"
    assert 0 < here["seconds"] < 5


@pytest.mark.slow
def test_given_a_slow_machine_when_measured_then_each_thing_is_measured_once(
    tokenmill: Cli, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.local.bench.STAGE_SECONDS", 1e-9)
    quick = ("--batch", "2", "--rows", "20", "--dtype", "float32", "--threads", "1")
    found = tokenmill("bench", "--model", model_folder, *quick, "--json").json()

    assert all(result["slowest"] == result["fastest"] for result in found["results"])
    assert min(seconds for _, seconds in found["step_sizes"]) >= 0


@pytest.mark.slow
def test_given_ctrl_c_in_a_bench_then_nothing_is_stored_and_it_says_how_long_all_of_it_takes(
    tokenmill: Cli, folder: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = output.say

    def interrupt_fifth_stage(message: str) -> None:
        say(message)
        if message.startswith("5 of 7"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(output, "say", interrupt_fifth_stage)
    quick = ("--repeats", "1", "--batch", "2", "--rows", "20", "--dtype", "float32", "--threads", "1")
    stopped = tokenmill("bench", "--model", model_folder, *quick)

    assert stopped.code == 130
    assert re.search(
        "interrupted in stage 5 of 7, after .*s of about .*s: nothing was stored, because an estimate needs all stages",
        stopped.err,
    )
    assert not list(folder.rglob("measured.json"))


@pytest.mark.slow
def test_given_results_of_another_machine_when_estimated_then_its_price_is_the_books_and_workers_share_the_job(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(*(chat(f"r{n}", text=str(n), max_tokens=10, ignore_eos=True) for n in range(40)))
    speed = asdict(MeasuredSpeed(model_digest(model_folder), "float32", 1, "far away", "2026-01-01", 1e3, 100.0, 8))
    (folder / "speed.json").write_text(json.dumps(speed | {"step_sizes": [[8, 0.08], [2048, 2.0]]}))
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", "10")
    estimate = ("estimate", path, "--model", f"tiny={model_folder}", "--measured", folder / "speed.json")

    plain = tokenmill(*estimate, "--json").json()["times"]
    (one,) = tokenmill(*estimate, "--instance", "g6.xlarge", "--region", "us-east-1", "--json").json()["times"]
    four = tokenmill(*estimate, "--instance", "g6.xlarge", "--region", "us-east-1", "--workers", "9", "--json").json()
    spot = tokenmill(*estimate, "--instance", "g6.xlarge", "--region", "mars", "--json")

    assert [(entry["on"], entry["cost"]) for entry in plain] == [("far away", None)]
    assert one["cost"] == pytest.approx(one["seconds"] / 3600 * 0.8048)
    tokens = four["prompt_tokens"] + four["expected_tokens"]
    assert one["cost_per_million_tokens"] == pytest.approx(one["cost"] / tokens * 1e6)
    assert four["workers"] == 4, "there are no more shards than that"
    assert four["times"][0]["on"] == "far away x 4"
    assert four["times"][0]["seconds"] < one["seconds"]
    assert "no price of g6.xlarge in mars, on-demand; it has g6.xlarge in us-east-1" in spot.error
    (folder / "speed.json").write_text(json.dumps(speed | {"model": "another"}))
    assert "was measured with another model" in tokenmill(*estimate).error
    (folder / "speed.json").write_text("[]")
    assert "is not what 'tokenmill bench --json' prints" in tokenmill(*estimate).error


def test_given_a_price_book_when_checked_then_the_price_of_a_worker_or_the_error_is_shown(
    tokenmill: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "l4" in tokenmill("prices", "list").out
    monkeypatch.setenv("TOKENMILL_INSTANCE__TYPE", "g6.xlarge")
    monkeypatch.setenv("TOKENMILL_INSTANCE__REGION", "us-east-1")
    monkeypatch.setenv("TOKENMILL_INSTANCE__WORKERS", "2")
    assert tokenmill("prices", "check", "--json").json()["price_per_hour"] == 0.4024
    (folder / "mine.toml").write_text("price = 1")
    wrong = tokenmill("prices", "check", folder / "mine.toml")
    assert wrong.code == 1
    assert f"{folder / 'mine.toml'}: price: " in wrong.error


def test_given_an_empty_cache_when_models_are_listed_then_the_command_to_pull_one_is_shown(
    tokenmill: Cli, folder: Path
) -> None:
    listed = tokenmill("models", "list")

    assert listed.code == 0
    assert "tokenmill models pull demo" in listed.err
    assert tokenmill("models", "list", "--json").json() == {"cache": str(folder / "cache"), "models": []}


def test_given_a_folder_when_pulled_then_it_is_taken_as_it_is(tokenmill: Cli, model_folder: Path) -> None:
    assert tokenmill("models", "pull", model_folder).out.strip() == str(model_folder)
    assert tokenmill("models", "pull", model_folder, "--json").json()["path"] == str(model_folder)


@pytest.mark.slow
def test_given_no_network_when_a_hub_name_is_pulled_then_the_error_is_one_line(folder: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", "models", "pull", "owner/model"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: the model hub can't be reached for owner/model")
    assert "Traceback" not in done.stderr


def test_given_wrong_settings_when_a_command_runs_then_one_line_names_the_setting(
    tokenmill: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_DEFAULT_MAX_TOKENS", "many")

    ended = tokenmill("models", "list")

    assert ended.code == 1
    assert "default_max_tokens" in ended.error


def test_given_no_command_when_called_then_the_help_is_shown_and_the_exit_code_is_2(tokenmill: Cli) -> None:
    for arguments in ((), ("jobs",), ("models",)):
        ended = tokenmill(*arguments)
        assert ended.code == 2
        assert "Usage: tokenmill" in ended.out


@pytest.mark.slow
def test_given_results_that_are_damaged_then_show_run_and_verify_name_the_file_and_fail(
    tokenmill: Cli, job: Path, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    path = write_lines(chat("a"), "{", chat("b", text="longer first", max_tokens=30), chat("c"))
    run = ("run", path, "--model", f"tiny={model_folder}", "--output", job)
    assert "2 files with 4 rows are as committed" in tokenmill("jobs", "verify", job).out
    assert tokenmill("jobs", "verify", job, "--json").json()["files"] == 2
    part = job / "results/part-00001.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:-9] + b"x" + whole[-8:])
    assert tokenmill("jobs", "show", job).code == 0, "names and sizes are right"
    verified = tokenmill("jobs", "verify", job)
    assert (verified.code, "part-00001.parquet has other contents" in verified.err) == (1, True)
    part.write_bytes(whole[: len(whole) // 2])
    for command in (("jobs", "show", job), run, ("jobs", "verify", job)):
        ended = tokenmill(*command)
        assert (ended.code, "part-00001.parquet has" in ended.err) == (1, True)
    part.unlink()
    for command in (("jobs", "show", job), run, ("jobs", "verify", job)):
        ended = tokenmill(*command)
        assert (ended.code, "part-00001.parquet is missing (3 rows)" in ended.err) == (1, True)
        assert ended.err.count("\n") <= 2, "one line that says what, where and what to do"
    assert "completed" in tokenmill("jobs", "show", job).out, "what is known is shown all the same"
    part.write_bytes(whole)
    (job / "results/part-00007.parquet").write_bytes(whole)
    ended = tokenmill("jobs", "show", job)
    assert (ended.code, "part-00007.parquet is no part of this job" in ended.err) == (1, True)
