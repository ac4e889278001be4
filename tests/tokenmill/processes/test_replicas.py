"""Several engines of one run: they divide its shards, and the table is the one that a single engine writes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.ledger.ledger import JobLedger
from pipeline.results.part_files import read_part
from tests.waiting import HANG_SECONDS
from tokenmill.config.engine_options import EngineOptions
from tokenmill.errors import UserError
from tokenmill.processes.replicas import environments

pytestmark = pytest.mark.slow

ROWS = 60
Tokenmill = Callable[..., Any]

COMPARED = ("custom_id", "row", "status", "text", "finish_reason", "prompt_tokens", "completion_tokens", "error_code")


def table(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(row[column] for column in COMPARED) for row in rows]


def workers(out: Path) -> set[str]:
    """The workers that committed parts."""
    ledger = JobLedger(FolderStore(out, read_only=True))
    return {read_part(ledger, number).summary.worker for number, _ in ledger.parts() if number}


@pytest.fixture(autouse=True)
def a_library_has_set_a_timeout_for_all_new_sockets() -> Iterator[None]:
    """As Celery's threads leave one behind now and then."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5.0)
    yield
    socket.setdefaulttimeout(before)


@pytest.fixture
def lines(chat: Any, write_lines: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Many small shards, greedy and drawn rows, and a line that is no request."""
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", "3")
    drawn = [chat(f"d{n}", f"draw {n}", max_tokens=8, temperature=0.7, seed=n) for n in range(ROWS // 2)]
    made: Path = write_lines(
        *[chat(f"r{n}", f"number {n}", max_tokens=8) for n in range(ROWS // 2)], *drawn, "not json"
    )
    return made


@pytest.mark.exhaustive
def test_two_replicas_divide_a_job_and_write_the_table_of_one(
    lines: Path, folder: Path, model_folder: Path, tokenmill: Tokenmill, results: Any
) -> None:
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", "2", "--max-num-seqs", "2")
    assert tokenmill("run", lines, "--output", "one", *engine).code == 0
    ended = tokenmill("run", lines, "--output", "two", *engine, "--replicas", "2", "--json")
    assert ended.code == 0, ended.err
    assert table(results(folder / "two")) == table(results(folder / "one"))
    assert workers(folder / "one") == {"local"}
    assert workers(folder / "two") == {"local-0", "local-1"}
    counts = ended.json()["counts"]
    assert (counts["total"], counts["succeeded"], counts["failed"]) == (ROWS + 1, ROWS, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("option", [("--tensor-parallel", "2"), ("--pipeline-parallel", "2", "--micro-batches", "2")])
def test_a_model_shared_by_two_processes_writes_the_same_table(
    option: tuple[str, ...], lines: Path, folder: Path, model_folder: Path, tokenmill: Tokenmill, results: Any
) -> None:
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", "2")
    assert tokenmill("run", lines, "--output", "one", *engine).code == 0
    ended = tokenmill("run", lines, "--output", "two", *engine, *option)
    assert ended.code == 0, ended.err
    assert table(results(folder / "two")) == table(results(folder / "one"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["replica", "rank"])
def test_a_dead_process_ends_the_run_and_the_same_command_goes_on(
    victim: str, folder: Path, model_folder: Path, chat: Any, write_lines: Any, results: Any, tokenmill: Tokenmill
) -> None:
    """Two replicas of two ranks each: a process of either kind is killed, and none outlives the run."""
    lines = write_lines(*[chat(f"r{n}", f"number {n}", max_tokens=60, ignore_eos=True) for n in range(40)])
    run = [
        sys.executable, "-m", "tokenmill", "run", str(lines), "--model", f"tiny={model_folder}", "--output", "out",
        "--threads", "2", "--dtype", "float32",
    ]  # fmt: skip
    more = ["--replicas", "2", "--tensor-parallel", "2", "--max-num-seqs", "1"]
    variables = {"TOKENMILL_PLAN__MAX_SHARD_ROWS": "2", "PYTHONPATH": str(Path(__file__).parents[3])}
    environment = {**os.environ, **variables}
    process = subprocess.Popen([*run, *more], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + HANG_SECONDS
    while len(list((folder / "out" / "results").glob("*.parquet"))) < 2:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until, "no parts appear"
        time.sleep(0.05)
    replicas = children(process.pid, "tokenmill.processes.replica_main")
    ranks = [rank for replica in replicas for rank in children(replica, "engine.parallel.rank")]
    assert (len(replicas), len(ranks)) == (2, 2)
    os.kill((replicas if victim == "replica" else ranks)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1, err
    said = "was killed by SIGKILL" if victim == "replica" else "the engine lost a rank: rank 1"
    assert said in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("error: replica ")
    for pid in (*replicas, *ranks):
        wait_until_gone(pid)
    again = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert again.returncode == 0, again.stderr
    assert [row["custom_id"] for row in results(folder / "out")] == [f"r{n}" for n in range(40)]
    assert {row["status"] for row in results(folder / "out")} == {"succeeded"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_process_outlives_a_run_that_is_killed(
    folder: Path, model_folder: Path, chat: Any, write_lines: Any
) -> None:
    lines = write_lines(*[chat(f"r{n}", f"number {n}", max_tokens=400, ignore_eos=True) for n in range(60)])
    run = [
        sys.executable, "-m", "tokenmill", "run", str(lines), "--model", f"tiny={model_folder}", "--output", "out",
        "--threads", "1", "--dtype", "float32", "--tensor-parallel", "2", "--max-num-seqs", "1",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TOKENMILL_PLAN__MAX_SHARD_ROWS": "1"}
    process = subprocess.Popen(run, cwd=folder, env=environment, stderr=subprocess.DEVNULL)
    until = time.monotonic() + HANG_SECONDS
    while not (ranks := children(process.pid, "engine.parallel.rank")):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    process.wait()
    wait_until_gone(ranks[0])


def children(pid: int, module: str) -> list[int]:
    """Processes that `pid` started with this module."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    started = [child for task in tasks for child in (task / "children").read_text().split()]
    return sorted(int(child) for child in started if module in Path(f"/proc/{child}/cmdline").read_text())


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + HANG_SECONDS
    while Path(f"/proc/{pid}").exists():
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":  # ended; its parent has not reaped it yet
            return
        assert time.monotonic() < until, f"process {pid} goes on"
        time.sleep(0.05)


def test_gpus_are_dealt_out_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,9,11")
    assert environments(2, 2, on_gpus=True) == [{"CUDA_VISIBLE_DEVICES": "3,5"}, {"CUDA_VISIBLE_DEVICES": "7,9"}]
    assert environments(2, 2, on_gpus=False) == [{}, {}]
    with pytest.raises(UserError, match="3 replicas on 2 GPUs each need 6, but 5 are visible"):
        environments(3, 2, on_gpus=True)


def test_replicas_share_threads_and_memory_of_a_processor() -> None:
    one, three = EngineOptions(threads=6).config(), EngineOptions(threads=6, replicas=3).config()
    assert (one.threads, three.threads) == (6, 2)
    assert three.cache.memory_fraction == pytest.approx(one.cache.memory_fraction / 3)
    assert EngineOptions(threads=1, replicas=3).config().threads == 1
