"""`jobs retry` and `jobs export --merged`: unanswered rows become a new job, and the results are joined."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Write = Callable[..., Path]
Results = Callable[[Path], list[dict[str, Any]]]

LINES = 12


@pytest.fixture
def path(chat: Chat, write_lines: Write) -> Path:
    """Twelve requests, greedy and sampled, a bad line and one that is too long."""
    lines: list[Any] = [chat(f"r{i}", text=f"number {i}", temperature=i % 2, max_tokens=9) for i in range(LINES)]
    return write_lines(*lines[:5], "{", *lines[5:], chat("long", text="word " * 2000))


@pytest.fixture
def cancelled(
    tokenmill: Cli, folder: Path, model_folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """The same job twice: `whole` ended, of `out` a part is missing and the rest was cancelled."""
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", "4")
    run = ("run", path, "--model", f"tiny={model_folder}", "--dtype", "float32", "--seed", "3")
    whole, out = folder / "whole", folder / "out"
    assert tokenmill(*run, "-o", whole).code == 0
    shutil.copytree(whole, out)
    for part in (2, 3):
        (out / f"results/part-{part:05}.parquet").unlink()
    (out / "manifest.json").unlink()
    assert tokenmill("jobs", "cancel", out).code == 0
    return whole, out


def exported(tokenmill: Cli, folder: Path, *folders: Path) -> list[dict[str, Any]]:
    merged = ("--merged",) if len(folders) > 1 else ("--in-input-order",)
    ended = tokenmill("jobs", "export", *folders, "--to", folder / "all.jsonl", *merged)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in (folder / "all.jsonl").read_text().splitlines()]


def answer(line: dict[str, Any]) -> object:
    response = line["response"]
    return response["body"]["choices"] if response else line["error"]["code"]


def test_given_a_cancelled_job_when_retried_and_merged_then_it_is_as_if_it_had_never_been_cancelled(
    tokenmill: Cli, folder: Path, cancelled: tuple[Path, Path], results: Results
) -> None:
    whole, out = cancelled
    left = [row["row"] for row in results(out) if row["status"] == "cancelled"]
    assert len(left) >= 4

    ended = tokenmill("jobs", "retry", out, "--output", folder / "again")
    again = tokenmill("jobs", "retry", out, "--output", folder / "again", "--json")
    shown = tokenmill("jobs", "show", folder / "again")

    assert ended.code == 0, ended.err
    assert f"{len(left)} of {len(left)} rows succeeded, 0 failed" in ended.err.splitlines()[-1]
    assert "1 invalid_json" in ended.err
    assert [row["row"] for row in results(folder / "again")] == left
    assert "was done before" in again.err
    first = json.loads((out / "job.json").read_bytes())
    second = json.loads((folder / "again/job.json").read_bytes())
    assert again.json()["job"] == second["id"]
    assert second["retry_of"] == first["id"]
    assert first["id"] in shown.out
    assert second["settings"]["seed"] == 3
    assert second["models"] == first["models"]

    in_root = folder / "root" / "jobs" / first["id"]
    shutil.copytree(out, in_root)
    here = tokenmill("jobs", "retry", in_root, "--output", folder / "again")
    assert "was done before" in here.err, "a job of a local root can be tried again here, too"
    unnamed = tokenmill("jobs", "retry", out)
    assert (unnamed.code, "--output" in unnamed.error) == (2, True)
    followed = tokenmill("jobs", "retry", out, "--output", folder / "again", "--watch")
    assert (followed.code, "--watch" in followed.error) == (2, True)

    lines = exported(tokenmill, folder, out, folder / "again")
    expected = exported(tokenmill, folder, whole)
    assert [line["custom_id"] for line in lines] == [line["custom_id"] for line in expected]
    assert [answer(line) for line in lines] == [answer(line) for line in expected]


def test_given_a_retry_when_it_asks_for_less_or_for_more_then_those_rows_are_tried(
    tokenmill: Cli, folder: Path, cancelled: tuple[Path, Path], results: Results, model_folder: Path
) -> None:
    _, out = cancelled
    retry = ("jobs", "retry", out, "--output")

    none = tokenmill(*retry, folder / "a", "--only", "expired")
    refused = tokenmill(*retry, folder / "a", "--only", "failed")
    invalid = tokenmill(*retry, folder / "b", "--only", "failed", "--include-invalid")
    other = tokenmill(*retry, folder / "c", "--only", "failed", "--model", model_folder)

    assert (none.code, refused.code) == (1, 1)
    assert "no row is worth another try" in none.error
    assert "1 context_length_exceeded, 1 invalid_json: refused for what they are; --include-invalid" in refused.error
    assert not (folder / "a").exists()
    assert invalid.code == 0, invalid.err
    assert [row["error_code"] for row in results(folder / "b")] == ["invalid_json", "context_length_exceeded"]
    assert other.code == 0, other.err
    assert [row["error_code"] for row in results(folder / "c")] == ["context_length_exceeded"]


@pytest.mark.exhaustive
def test_given_a_changed_input_or_model_when_retried_then_the_error_is_one_line(
    tokenmill: Cli, folder: Path, cancelled: tuple[Path, Path], path: Path, model_folder: Path
) -> None:
    _, out = cancelled
    retry = ("jobs", "retry", out, "--output", folder / "again")

    itself = tokenmill("jobs", "retry", out, "--output", folder / "." / "out", "--fresh")
    assert itself.code == 1
    assert "results are never changed" in itself.error
    assert (out / "manifest.json").exists()

    moved = path.rename(folder / "moved.jsonl")
    gone = tokenmill(*retry)
    assert gone.code == 1
    assert "no such file" in gone.error
    assert tokenmill(*retry, "--input", moved).code == 0
    moved.write_bytes(moved.read_bytes() + b"\n")
    changed = tokenmill(*retry, "--input", moved)
    assert changed.code == 1
    assert "is not what job-" in changed.error

    moved.write_bytes(moved.read_bytes()[:-1])
    template = folder / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert tokenmill(*retry, "--input", moved).code == 0
    other = tokenmill(*retry, "--input", moved, "--chat-template", template)
    assert other.code == 1
    assert "model.digest was" in other.error
    assert "weights or its chat template" not in other.error

    weights = folder / "other"
    shutil.copytree(model_folder, weights)
    job = json.loads((out / "job.json").read_text())
    job["models"][0]["digest"] = "sha256:" + "0" * 64
    (out / "job.json").write_text(json.dumps(job))
    worn = tokenmill("jobs", "retry", out, "--output", folder / "new", "--input", moved)
    assert worn.code == 1
    assert "its weights or its chat template are not those that answered" in worn.error
    assert not (folder / "new").exists()


def test_given_folders_of_unrelated_jobs_when_merged_then_they_are_refused(
    tokenmill: Cli, folder: Path, cancelled: tuple[Path, Path]
) -> None:
    whole, out = cancelled
    to = ("--to", folder / "x.jsonl")

    alone = tokenmill("jobs", "export", out, "--merged", *to)
    apart = tokenmill("jobs", "export", out, whole, *to)
    strangers = tokenmill("jobs", "export", whole, out, "--merged", *to)
    nowhere = tokenmill("jobs", "export", out, "--to", folder / "no" / "x.jsonl")

    assert "name their folders or ids behind JOB" in alone.error
    assert "--merged joins them" in apart.error
    elsewhere = tokenmill("jobs", "export", "one", "two", "--url", "http://127.0.0.1:1", *to)
    assert (elsewhere.code, "--merged joins them" in elsewhere.error) == (apart.code, True)
    assert strangers.code == 1
    assert "given already" in strangers.error, "a copy of the same job is no retry"
    assert f"no/x.jsonl: can't export: there is no folder {folder / 'no'}; make it first" in nowhere.error
    assert not (folder / "x.jsonl").exists()
