"""Null workers as real processes: their answers are predictable, though processes die meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
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
from tests.cluster.cluster import NULL_WORKER
from tests.cluster.null_worker import ExpectedAnswers
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS, wait_for
from workers.observability.watchdog import STUCK_EXIT_CODE

pytestmark = pytest.mark.slow

ROWS = 120
ROOT = Path(__file__).parents[3]


@contextmanager
def running(folder: Path, name: str, *program: object, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block; its output is printed."""
    log = folder / f"{name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *map(str, program)],
            stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        print(f"-- {name}\n{log.read_text()}")


class Cluster:
    """A root whose dispatcher and null workers share a Redis; jobs come by way of the intake."""

    def __init__(self, folder: Path, store: FolderStore, redis: RedisServer, stack: ExitStack) -> None:
        self.folder = folder
        self.world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        self.variables = {
            "TOKENMILL_REDIS_URL": redis.url,
            "TOKENMILL_ROOT": str(folder / "root"),
            "TOKENMILL_CHECKPOINT_SECONDS": "0.1",
        }
        self._stack = stack
        self.start("dispatcher", "-m", "tokenmill", "dispatcher")

    def start(self, name: str, *program: object, **variables: str) -> subprocess.Popen[bytes]:
        return self._stack.enter_context(running(self.folder, name, *program, **(self.variables | variables)))

    def served(self, models: int) -> bool:
        return len(Catalog(self.world.store).entries()) == models

    def submit(self, source: Path, name: str, rows_in_shard: int = 20, **options: Any) -> Path:
        intake = Intake(self.world, IntakeSettings(plan=PlanSettings(max_shard_rows=rows_in_shard)))
        intake.accept(JobDraft(pin_uri(str(source)), JobOptions(**options), "default", name))
        return self.folder / "root/jobs" / name


@pytest.fixture
def cluster(folder: Path, redis_server: RedisServer) -> Iterator[Cluster]:
    with ExitStack() as stack:
        store = stack.enter_context(FolderStore(folder / "root"))
        yield Cluster(folder, store, redis_server, stack)


def finished_at(job: Path) -> datetime:
    return datetime.fromisoformat(json.loads((job / "manifest.json").read_text())["finished_at"])


@pytest.mark.exhaustive
def test_given_one_worker_of_two_models_then_both_are_served_in_rotation(
    cluster: Cluster, model_folder: Path, chat: Any, tmp_path: Path, results: Any
) -> None:
    twin = tmp_path / "twin"  # other weights, by their digest
    shutil.copytree(model_folder, twin)
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"twin": True}))
    models = ("--model", f"one={model_folder}", "--model", f"two={twin}")
    worker = cluster.start("worker", *NULL_WORKER, *models, "--max-num-seqs", 4, "--step-ms", 15, "--switch-after", 1.5)
    wait_for(lambda: cluster.served(2), "the worker isn't up")
    jobs = {}
    for name, rows, shard in (("one", 200, 5), ("two", 20, 5)):
        lines = [chat(f"r{n}", f"number {n}", model=name, max_tokens=20, ignore_eos=True) for n in range(rows)]
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        jobs[name] = cluster.submit(source, f"job-{name}", shard, model=name), lines
    for job, _ in jobs.values():
        wait_for((job / "manifest.json").exists, f"{job.name} did not end")
    (one, _), (two, _) = jobs["one"], jobs["two"]
    assert finished_at(two) < finished_at(one), "the first model makes room though it has work"
    answers = ExpectedAnswers(model_folder)
    for job, lines in jobs.values():
        assert [row["text"] for row in results(job)] == answers.texts([line["body"] for line in lines])
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(HANG_SECONDS) == 0


@pytest.mark.exhaustive
def test_given_an_engine_that_is_stuck_then_its_worker_ends_and_another_does_the_work(
    cluster: Cluster, model_folder: Path, chat: Any, write_lines: Callable[..., Path], results: Any
) -> None:
    lines = [chat(f"r{n}", f"number {n}", max_tokens=4, ignore_eos=True) for n in range(10)]
    worker = (*NULL_WORKER, "--model", f"tiny={model_folder}")
    stuck = cluster.start("stuck", *worker, "--step-ms", 1_000_000, TOKENMILL_STUCK_SECONDS="1.5")
    wait_for(lambda: cluster.served(1), "the worker isn't up")
    job = cluster.submit(write_lines(*lines), "job-1")
    assert stuck.wait(HANG_SECONDS) == STUCK_EXIT_CODE
    cluster.start("working", *worker)
    wait_for((job / "manifest.json").exists, "the job did not end")
    assert [row["text"] for row in results(job)] == ExpectedAnswers(model_folder).texts(
        [line["body"] for line in lines]
    )
    assert {row["attempt"] for row in results(job)} == {2}
    assert "in execute" in (cluster.folder / "stuck.log").read_text(), "it says where it hung"


@pytest.mark.exhaustive
def test_given_two_null_workers_when_one_is_killed_then_all_texts_are_those_worked_out_from_the_requests(
    folder: Path,
    model_folder: Path,
    chat: Any,
    write_lines: Callable[..., Path],
    results: Any,
    redis_server: RedisServer,
) -> None:
    lines = [chat(f"r{n}", f"number {n}", max_tokens=8 + n % 30, ignore_eos=True) for n in range(ROWS)]
    source = write_lines(*lines)
    variables = {
        "TOKENMILL_REDIS_URL": redis_server.url,
        "TOKENMILL_ROOT": str(folder / "root"),
        "TOKENMILL_CHECKPOINT_SECONDS": "0.1",
    }
    worker = (*NULL_WORKER, "--model", f"tiny={model_folder}", "--max-num-seqs", 8, "--step-ms", 20)
    with ExitStack() as stack:
        killed = stack.enter_context(running(folder, "killed", *worker, **variables))
        living = stack.enter_context(running(folder, "living", *worker, **variables))
        stack.enter_context(running(folder, "dispatcher", "-m", "tokenmill", "dispatcher", **variables))
        store = stack.enter_context(FolderStore(folder / "root"))
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        wait_for(Catalog(store).entries, "no worker is up")
        intake = Intake(world, IntakeSettings(plan=PlanSettings(max_shard_rows=20)))
        intake.accept(JobDraft(pin_uri(str(source)), JobOptions(), "default", "job-1"))
        job = folder / "root/jobs/job-1"
        wait_for(lambda: list(job.glob("work/*/*-0*")), "nothing is checkpointed")
        killed.kill()
        wait_for((job / "manifest.json").exists, "the job did not end")
        living.send_signal(signal.SIGTERM)
        assert living.wait(HANG_SECONDS) == 0
    manifest = json.loads((job / "manifest.json").read_text())
    assert (manifest["status"], manifest["counts"]["succeeded"]) == ("completed", ROWS)
    answers = ExpectedAnswers(model_folder)
    assert [row["text"] for row in results(job)] == answers.texts([line["body"] for line in lines])
    # Another prompt of the same length has another answer.
    two = answers.texts([chat("", f"number {n}", max_tokens=8)["body"] for n in (34, 35)])
    assert two[0] != two[1]


@pytest.mark.exhaustive
def test_given_jobs_whose_objects_are_damaged_then_worker_and_dispatcher_live_and_the_other_job_ends(
    cluster: Cluster, model_folder: Path, chat: Any, write_lines: Callable[..., Path], results: Any
) -> None:
    lines = [chat(f"r{n}", f"number {n}", max_tokens=8, ignore_eos=True) for n in range(60)]
    source = write_lines(*lines)
    slow = (*NULL_WORKER, "--model", f"tiny={model_folder}", "--max-num-seqs", 4, "--step-ms", 10)
    first = cluster.start("first", *slow)
    wait_for(lambda: cluster.served(1), "the worker isn't up")
    lost, torn = (cluster.submit(source, name, 10) for name in ("job-lost", "job-torn"))
    for job in (lost, torn):
        wait_for((job / "plan/00000.json").exists, "it isn't planned")
    shards = json.loads((lost / "plan/00000.json").read_text())["shards"]
    (lost / shards[-1]["key"]).unlink()
    (torn / "closing.json").write_text("{")
    (cluster.folder / "root/close").mkdir(exist_ok=True)
    (cluster.folder / "root/close/job-torn").touch()
    second = cluster.start("second", *slow)
    good = cluster.submit(source, "job-good", 10)
    wait_for((good / "manifest.json").exists, "the other job did not end")
    assert [row["text"] for row in results(good)] == ExpectedAnswers(model_folder).texts(
        [line["body"] for line in lines]
    )
    wait_for(lambda: list(lost.glob("work/*/unreadable-*")), "the lost shard was not recorded")

    def attention() -> str:
        progress = torn / "progress.json"
        said: str = json.loads(progress.read_text()).get("attention", "") if progress.exists() else ""
        return said

    assert "closing.json: is not JSON" in wait_for(attention, "the job doesn't say what is wrong")
    assert (first.poll(), second.poll()) == (None, None)
    first.send_signal(signal.SIGTERM)
    assert first.wait(HANG_SECONDS) == 0
