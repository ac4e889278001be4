"""The long-running commands as real processes: ingested files are answered, though processes are killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ingest.intake import Intake, IntakeSettings, JobDraft
from pipeline.inputs.open import pin_uri
from pipeline.models.catalog import Catalog
from pipeline.ports import World
from schemas.jobs.job_options import JobOptions
from schemas.requests.limits import PlanSettings
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow

ROOT = str(Path(__file__).parents[3])
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a command as a process of its own; all are killed at the end."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: object, **variables: str) -> subprocess.Popen[str]:
        log = (folder / f"process-{len(processes)}.log").open("w")
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenmill", *map(str, arguments)],
            stdout=log, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": ROOT, **variables},
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for number, process in enumerate(processes):
        process.kill()
        process.wait()
        print(f"-- process {number}: {process.args}\n{(folder / f'process-{number}.log').read_text()}")


def wait_until(what: Callable[[], Any], *living: subprocess.Popen[str]) -> Any:
    """Its first true value; fails when it takes too long, or one of the processes ends."""
    until = time.monotonic() + HANG_SECONDS
    while not (value := what()):
        assert time.monotonic() < until, "it took too long"
        assert all(process.poll() is None for process in living), "a process has ended"
        time.sleep(0.05)
    return value


def outcomes(root: Path, count: int) -> list[dict[str, Any]] | None:
    """Manifests of the root's jobs, once there are so many."""
    found = sorted(root.glob("jobs/*/manifest.json"))
    return [json.loads(path.read_text()) for path in found] if len(found) == count else None


def drop(source: Path, inbox: Path, name: str) -> None:
    """As a careful sender does: under another name first."""
    inbox.mkdir(parents=True, exist_ok=True)
    partial = inbox / f".{name}"
    partial.write_bytes(source.read_bytes())
    partial.rename(inbox / name)


@pytest.mark.exhaustive
def test_ingested_files_are_answered_as_by_run_and_the_end_is_graceful(
    start: Start, folder: Path, model_folder: Path, chat: Any, write_lines: Any, tokenmill: Any, results: Any
) -> None:
    source = write_lines(*[chat(f"r{n}", f"number {n}", max_tokens=20) for n in range(30)], "not json")
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1)
    assert tokenmill("run", source, "--output", "alone", *engine).code == 0
    served = start("serve", "--data", "data", "--port", 0, "--settle", 0.2, *engine)
    root = folder / "data"
    wait_until((root / "incoming").is_dir, served)
    for inbox, name in (("incoming", "a.jsonl"), ("incoming/bulk", "b.jsonl")):
        drop(source, root / inbox, name)
    done = wait_until(lambda: outcomes(root, 2), served)
    assert [manifest["status"] for manifest in done] == ["completed"] * 2
    alone = [(row["custom_id"], row["text"], row["error_code"]) for row in results(folder / "alone")]
    for job in root.glob("jobs/*"):
        assert [(row["custom_id"], row["text"], row["error_code"]) for row in results(job)] == alone
    tiers = {json.loads((job / "job.json").read_text())["tier"] for job in root.glob("jobs/*")}
    assert tiers == {"standard", "bulk"}
    served.send_signal(signal.SIGTERM)
    assert served.wait(HANG_SECONDS) == 0
    # Started again it finds nothing to do: the same files are no new jobs, also when their results have gone.
    brief = {"TOKENMILL_RETENTION__INTERVAL": "1s", "TOKENMILL_RETENTION__OUTPUTS": "1s"}
    again = start("serve", "--data", "data", "--port", 0, "--settle", 0.2, *engine, **brief)
    wait_until(lambda: len(list(root.glob("jobs/*/tombstone.json"))) == 2, again)
    wait_until(lambda: not list(root.glob("jobs/*/results/*")), again)
    time.sleep(1.0)
    assert len(list(root.glob("jobs/*"))) == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_workers_and_two_dispatchers_lose_nothing_when_one_of_each_is_killed(
    start: Start,
    folder: Path,
    model_folder: Path,
    chat: Any,
    write_lines: Any,
    tokenmill: Any,
    results: Any,
    redis_server: RedisServer,
) -> None:
    source = write_lines(*[chat(f"r{n}", f"number {n}", max_tokens=60, ignore_eos=True) for n in range(200)])
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1, "--max-num-seqs", 4)
    assert tokenmill("run", source, "--output", "alone", *engine).code == 0
    variables = {
        "TOKENMILL_REDIS_URL": redis_server.url,
        "TOKENMILL_ROOT": str(folder / "root"),
        "TOKENMILL_CHECKPOINT_SECONDS": "0.2",
    }
    workers = [start("worker", *engine, **variables) for _ in range(2)]
    dispatchers = [start("dispatcher", **variables) for _ in range(2)]
    with FolderStore(folder / "root") as store:
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        wait_until(Catalog(store).entries, *workers)
        intake = Intake(world, IntakeSettings(plan=PlanSettings(max_shard_rows=20)))
        draft = JobDraft(pin_uri(str(source)), JobOptions(), "default", "job-1")
        intake.accept(draft)
        parts = folder / "root/jobs/job-1/results"
        wait_until(lambda: len(list(parts.glob("part-*.parquet"))) > 2, *workers, *dispatchers)
        workers[0].kill()
        dispatchers[0].kill()
        (manifest,) = wait_until(lambda: outcomes(folder / "root", 1), workers[1], dispatchers[1])
        assert intake.accept(draft).created is False
    assert manifest["status"] == "completed"
    assert manifest["counts"]["succeeded"] == 200
    found = [(row["custom_id"], row["text"]) for row in results(folder / "root/jobs/job-1")]
    assert found == [(row["custom_id"], row["text"]) for row in results(folder / "alone")]
    workers[1].send_signal(signal.SIGTERM)
    assert workers[1].wait(HANG_SECONDS) == 0


def test_a_worker_without_redis_reports_it(tokenmill: Any, folder: Path) -> None:
    ended = tokenmill("dispatcher", "--root", "root")
    assert (ended.code, "TOKENMILL_REDIS_URL is not set" in ended.error) == (1, True)
    ended = tokenmill("dispatcher")
    assert "no root is named; give --root FOLDER" in ended.error
