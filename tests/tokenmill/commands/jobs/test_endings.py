"""Jobs that are cancelled or run out of time, as their user sees it; the model and the runs are real."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.locks import RunLock
from pipeline.adapters.folder.store import FolderStore
from pipeline.ledger.ledger import JobLedger
from pipeline.results.shard_history import read_history
from schemas.jobs.outcome import JobStatus
from tests.waiting import HANG_SECONDS
from tokenmill.jobs.cancel import cancel_job

pytestmark = pytest.mark.slow

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Write = Callable[..., Path]
Results = Callable[[Path], list[dict[str, Any]]]
Start = Callable[..., subprocess.Popen[str]]

ROWS = 150
ROWS_PER_PART = 3


@pytest.fixture
def start(folder: Path, model_folder: Path) -> Iterator[Start]:
    """Starts a run in a process of its own, that computes one row at a time; it is killed at the test's end."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[4]),
        "TOKENMILL_PLAN__MAX_SHARD_ROWS": str(ROWS_PER_PART),
        "TOKENMILL_CHECKPOINT_SECONDS": "0.05",
    }
    started: list[subprocess.Popen[str]] = []

    def begin(path: Path, *more: object) -> subprocess.Popen[str]:
        run = [sys.executable, "-m", "tokenmill", "run", path, "--model", f"tiny={model_folder}"]
        run += ["-o", folder / "out", "--threads", "1", "--max-num-seqs", "1", *more]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [str(word) for word in run], cwd=folder, env=environment, text=True, stdout=pipe, stderr=pipe
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def long_requests(chat: Chat) -> list[Any]:
    """One after the other they take a minute; ten seconds on a machine that is much faster than it was written on."""
    return [chat(f"r{i}", text=f"number {i}", max_tokens=400, ignore_eos=True) for i in range(ROWS)]


def wait_for(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + HANG_SECONDS
    while not what():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until, "it doesn't come"
        time.sleep(0.02)


def finished_rows(out: Path) -> int:
    """Rows that are logged as finished, and in no part yet."""
    with FolderStore(out, read_only=True) as store:
        ledger = JobLedger(store)
        committed = {number for number, _ in ledger.parts()}
        numbers = {int(folder.name) for folder in out.glob("work/0*")} - committed
        return sum(len(read_history(ledger, number).finished_rows) for number in numbers)


def status_of(out: Path) -> JobStatus:
    with FolderStore(out, read_only=True) as store:
        return JobLedger(store).status()


@pytest.mark.exhaustive
def test_given_an_active_run_when_cancelled_then_it_ends_the_job_and_keeps_finished_rows(
    tokenmill: Cli, folder: Path, chat: Chat, write_lines: Write, results: Results, start: Start
) -> None:
    out = folder / "out"
    process = start(write_lines(*long_requests(chat), "not json"))
    wait_for(lambda: list(out.glob("results/part-00001.parquet")), process)

    ended = tokenmill("jobs", "cancel", out)
    _, err = process.communicate(timeout=HANG_SECONDS)

    rows = results(out)
    statuses = Counter(row["status"] for row in rows)
    assert ended.code == process.returncode == 0, (ended.err, err)
    assert "a run is at this job" in ended.err
    assert "was cancelled; what was finished is kept" in err
    assert [row["row"] for row in rows] == list(range(ROWS + 1))
    assert statuses["succeeded"] >= ROWS_PER_PART
    assert statuses["cancelled"] > 0, "it didn't wait until all was computed"
    assert statuses["failed"] == 1
    assert f"{statuses['cancelled']} expired or cancelled" in ended.err.splitlines()[-1]
    assert f"{statuses['cancelled']} expired or cancelled" in err.splitlines()[-1]
    assert {row["error_code"] for row in rows if row["status"] == "cancelled"} == {"batch_cancelled"}
    assert status_of(out) is JobStatus.CANCELLED


@pytest.mark.exhaustive
def test_given_a_stopped_run_when_cancelled_then_it_is_ended_at_once_with_logged_rows(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, results: Results, start: Start
) -> None:
    out = folder / "out"
    path = write_lines(*long_requests(chat))
    process = start(path)
    wait_for(lambda: list(out.glob("results/part-00001.parquet")) and finished_rows(out), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = len(results(out)) + finished_rows(out)

    done = tokenmill("jobs", "cancel", out, "--json")
    document = done.json()

    assert done.code == 0, done.err
    assert document["status"] == "cancelled"
    counts = document["tokenmill"]["counts"]
    assert counts["succeeded"] + counts["cancelled"] == ROWS
    assert counts["succeeded"] == finished >= ROWS_PER_PART
    assert counts["cancelled"] > 0
    assert [row["row"] for row in results(out)] == list(range(ROWS))
    assert json.loads((out / "manifest.json").read_bytes())["repeated_at_most"] > 0

    # The same run, and the same cancel, find the job as it ended.
    before = {file: file.stat().st_mtime_ns for file in out.glob("results/*")}
    again = tokenmill("jobs", "cancel", out)
    assert (again.code, "was cancelled before" in again.err) == (0, True)
    rerun = start(path, "--json")
    out_text, err = rerun.communicate(timeout=HANG_SECONDS)
    assert rerun.returncode == 0, err
    assert '"status": "cancelled"' in out_text
    assert "jobs retry" in err
    assert {file: file.stat().st_mtime_ns for file in out.glob("results/*")} == before


def test_given_a_job_of_which_nothing_is_planned_when_cancelled_then_every_line_gets_its_row(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, results: Results
) -> None:
    out = folder / "out"
    path = write_lines(chat("a"), "", "{", chat("b"), chat("a"))
    run = ("run", path, "--model", f"tiny={model_folder}", "-o", out)
    assert tokenmill(*run).code == 0
    for file in [*out.glob("plan/*"), *out.glob("results/*"), out / "manifest.json"]:
        file.unlink()

    assert tokenmill("jobs", "cancel", out).code == 0

    rows = [(row["row"], row["custom_id"], row["status"], row["error_code"]) for row in results(out)]
    assert rows == [
        (0, "a", "cancelled", "batch_cancelled"),
        (2, None, "failed", "invalid_json"),
        (3, "b", "cancelled", "batch_cancelled"),
        (4, "a", "failed", "duplicate_custom_id"),
    ]


def test_given_a_job_that_has_ended_when_cancelled_then_nothing_changes_and_the_exit_code_is_1(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    out = folder / "out"
    assert tokenmill("run", write_lines(chat("a")), "--model", f"tiny={model_folder}", "-o", out).code == 0

    ended = tokenmill("jobs", "cancel", out)
    nothing = tokenmill("jobs", "cancel", folder)
    nowhere = tokenmill("jobs", "cancel", folder / "nowhere")

    assert ended.code == 1
    assert "has ended already (completed)" in ended.error
    assert not (out / "closing.json").exists()
    assert (nothing.code, nowhere.code) == (1, 1)
    assert "no job" in nothing.error
    assert "no such folder" in nowhere.error
    assert not (folder / ".tmp").exists(), "a folder that is no job is left as it is"


def test_given_a_run_that_holds_the_job_and_then_dies_when_cancelled_then_it_is_ended_all_the_same(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    out = folder / "out"
    assert tokenmill("run", write_lines(chat("a")), "--model", f"tiny={model_folder}", "-o", out).code == 0
    for file in [*out.glob("results/part-00001*"), out / "manifest.json"]:
        file.unlink()
    lock = RunLock(out)
    lock.acquire()

    timed_out = cancel_job(out, wait=0.5)
    assert timed_out.manifest is None
    assert status_of(out) is JobStatus.CANCELLING
    threading.Timer(0.5, lock.release).start()
    done = cancel_job(out, wait=60.0)

    assert done.manifest is not None
    assert done.manifest.counts.cancelled == 1


@pytest.mark.exhaustive
def test_given_a_deadline_when_it_passes_then_the_run_succeeds_and_reports_expired_rows(
    tokenmill: Cli,
    folder: Path,
    model_folder: Path,
    chat: Chat,
    write_lines: Write,
    results: Results,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, path = folder / "out", write_lines(*long_requests(chat))
    process = start(path, "--deadline", "3s")
    _, err = process.communicate(timeout=HANG_SECONDS)

    statuses = Counter(row["status"] for row in results(out))
    assert process.returncode == 0, err
    assert statuses["succeeded"] + statuses["expired"] == ROWS
    assert statuses["expired"] > 0, "three seconds are too short for all of them"
    assert "this job has expired" in err
    assert re.search(rf"{statuses['succeeded']} of {ROWS} rows succeeded, 0 failed, {statuses['expired']} expired", err)
    assert status_of(out) is JobStatus.EXPIRED

    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", str(ROWS_PER_PART))
    run = ("run", path, "--model", f"tiny={model_folder}", "-o", out)
    again = tokenmill(*run, "--deadline", "3s", "--json")
    other = tokenmill(*run, "--deadline", "2d")
    none = tokenmill(*run)
    assert again.code == 0, again.err
    assert again.json()["status"] == "expired"
    assert (other.code, none.code) == (1, 1)
    assert "deadline was 0:00:03 after acceptance, now 2 days, 0:00:00 after acceptance" in other.error


def test_given_a_deadline_that_passed_while_nothing_ran_when_run_again_then_no_model_is_loaded(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, results: Results
) -> None:
    out = folder / "out"
    run = ("run", write_lines(chat("a"), chat("b")), "--model", f"tiny={model_folder}", "-o", out, "--deadline", "1s")
    first = tokenmill(*run)
    assert first.code == 0
    for file in [*out.glob("results/part-00001*"), out / "manifest.json", out / "closing.json"]:
        file.unlink(missing_ok=True)
    time.sleep(1.0)

    again = tokenmill(*run)

    assert again.code == 0, again.err
    assert "loading" not in again.err
    assert [row["status"] for row in results(out)] == ["expired", "expired"]


def test_given_a_deadline_far_away_when_run_then_nothing_expires(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    run = ("run", write_lines(chat("a")), "--model", f"tiny={model_folder}", "-o", folder / "out", "--deadline", "2d")
    assert "1 of 1 rows succeeded, 0 failed" in tokenmill(*run).err.splitlines()[-1]
    assert "was done before" in tokenmill(*run).err
