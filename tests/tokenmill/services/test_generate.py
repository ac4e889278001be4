"""`tokenmill.generate` from end to end: real processes, a real Redis, and a Celery caller that uses names only."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.redis.connection import RedisSettings
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ingest.intake import Intake, IntakeSettings, JobDraft
from pipeline.inputs.open import pin_uri
from pipeline.lane.client import CallSettings, answer
from pipeline.lane.redis import RedisLane
from pipeline.models.catalog import Catalog
from pipeline.ports import World
from schemas.jobs.job import Tier
from schemas.jobs.job_options import JobOptions
from schemas.requests.limits import PlanSettings
from schemas.workers.lane import EndEvent, LaneRequest, TokensEvent
from tests.cluster.cluster import NULL_WORKER
from tests.cluster.null_worker import ExpectedAnswers
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
QUEUE = "tokenmill"


class Harness:
    """An installation on a folder and a Redis, of as many processes as a test starts."""

    def __init__(self, folder: Path, server: RedisServer, model: Path) -> None:
        self.folder, self.url, self.model = folder, server.url, model
        self.processes: list[subprocess.Popen[bytes]] = []
        self.variables = {
            "PYTHONPATH": str(ROOT),
            "TOKENMILL_REDIS_URL": server.url,
            "TOKENMILL_ROOT": str(folder / "root"),
            "TOKENMILL_CELERY__QUEUES": f'{{"{QUEUE}": "default"}}',
            "OMP_NUM_THREADS": "1",
        }
        self.redis = redis.Redis.from_url(server.url)
        self.caller = Celery("a-caller", broker=server.url, backend=server.url, set_as_current=False)

    def start(self, *program: object, **variables: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"process-{len(self.processes)}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *map(str, program)],
                    stdout=log, stderr=log, env={**os.environ, **self.variables, **variables},
                )
            )  # fmt: skip
        return self.processes[-1]

    def null_worker(self, rows: int = 8, step_ms: int = 20, **variables: str) -> subprocess.Popen[bytes]:
        options = ("--model", f"tiny={self.model}", "--max-num-seqs", rows, "--step-ms", step_ms)
        return self.start(*NULL_WORKER, *options, **variables)

    def intake(self) -> subprocess.Popen[bytes]:
        return self.start("-m", "tokenmill", "intake")

    def wait_for_model(self) -> None:
        with FolderStore(self.folder / "root") as store:
            wait_for(Catalog(store).entries, "no worker is up")

    def send(self, body: Any, *args: Any, task_id: str | None = None, **options: Any) -> AsyncResult:
        return self.caller.send_task("tokenmill.generate", [body, *args], options, queue=QUEUE, task_id=task_id)

    def running_requests(self) -> dict[str, str]:
        """Requests with an answer that has begun and not ended -> the worker that computes them."""
        found = {}
        for key in self.redis.scan_iter("tokenmill:lane:wanted:*"):
            state = self.redis.hgetall(key)
            if b"worker" in state and b"ended" not in state:
                found[key.decode().rpartition(":")[2]] = state[b"worker"].decode()
        return found

    def worker_of(self, name: str) -> subprocess.Popen[bytes]:
        """The process that is a worker of this name."""
        (process,) = [process for process in self.processes if f"-{process.pid}-" in name]
        return process

    def close(self) -> None:
        gc.collect()  # results that were not read unsubscribe when they go, while there is a server
        self.caller.close()
        for number, process in enumerate(self.processes):
            process.kill()
            process.wait()
            print(f"-- {process.args}\n{(self.folder / f'process-{number}.log').read_text()[-3000:]}")


@pytest.fixture
def harness(folder: Path, redis_server: RedisServer, model_folder: Path) -> Iterator[Harness]:
    harness = Harness(folder, redis_server, model_folder)
    yield harness
    harness.close()
    harness.redis.flushall()


def content(body: dict[str, Any]) -> str:
    assert "error" not in body, body
    text: str = body["choices"][0]["message"]["content"]
    return text


@pytest.mark.exhaustive
def test_concurrent_requests_are_answered_and_a_revoked_one_frees_its_slot(harness: Harness, chat: Any) -> None:
    worker, intake = harness.null_worker(rows=4, step_ms=5), harness.intake()
    harness.wait_for_model()
    # Far more wait than the ingest worker has threads,
    bodies = [chat("", f"number {n}", max_tokens=12 + n % 5, ignore_eos=True)["body"] for n in range(120)]
    waiting = [harness.send(body) for body in bodies]
    assert [content(one.get(timeout=HANG_SECONDS)) for one in waiting] == ExpectedAnswers(harness.model).texts(bodies)
    assert harness.redis.ttl(f"celery-task-meta-{waiting[0].id}") > 80_000
    # one that fails says why, as a body,
    unknown = harness.send({**bodies[0], "model": "gpt-9"}).get(timeout=HANG_SECONDS)
    assert unknown["error"]["code"] == "model_not_found"
    late = harness.send({**bodies[0], "max_tokens": 10_000}).get(timeout=HANG_SECONDS)
    assert late["error"]["code"] == "context_length_exceeded"
    # and of one that is revoked nothing goes on: its rows are free within seconds.
    long = [
        harness.send(chat("", f"long {n}", max_tokens=400, ignore_eos=True)["body"], "interactive") for n in range(4)
    ]
    wait_for(lambda: len(harness.running_requests()) == 4, "they did not begin")
    began = time.monotonic()
    for one in long:
        one.revoke()
    wait_for(lambda: not harness.running_requests(), "they were not cancelled")
    bulk_answer = harness.send(bodies[0], "bulk").get(timeout=HANG_SECONDS)
    print(f"revoked, and another answered, within {time.monotonic() - began:.1f} s")
    assert content(bulk_answer) == ExpectedAnswers(harness.model).texts(bodies[:1])[0]
    with pytest.raises(TaskRevokedError):
        long[0].get(timeout=HANG_SECONDS)
    for process in (worker, intake):
        process.send_signal(signal.SIGTERM)
    assert (worker.wait(HANG_SECONDS), intake.wait(HANG_SECONDS)) == (0, 0)


@pytest.mark.exhaustive
def test_answers_outlive_orderly_stops_of_worker_and_intake(harness: Harness, chat: Any) -> None:
    first, intake = harness.null_worker(TOKENMILL_LANE__DRAIN_SECONDS="0.5"), harness.intake()
    harness.wait_for_model()
    bodies = [chat("", f"number {n}", max_tokens=150, ignore_eos=True)["body"] for n in range(6)]
    waiting = [harness.send(body) for body in bodies]
    wait_for(lambda: len(harness.running_requests()) == 6, "they did not begin")
    harness.null_worker()
    for process in (first, intake):
        process.send_signal(signal.SIGTERM)
    harness.intake()
    assert [content(one.get(timeout=HANG_SECONDS)) for one in waiting] == ExpectedAnswers(harness.model).texts(bodies)
    assert (first.wait(HANG_SECONDS), intake.wait(HANG_SECONDS)) == (0, 0)


@pytest.mark.exhaustive
def test_a_worker_is_killed_in_the_middle_and_another_finishes_its_answers(harness: Harness, chat: Any) -> None:
    harness.null_worker(), harness.null_worker(), harness.intake()
    harness.wait_for_model()
    bodies = [chat("", f"number {n}", max_tokens=200, ignore_eos=True)["body"] for n in range(6)]
    waiting = [harness.send(body) for body in bodies]
    running = wait_for(
        lambda: len(harness.running_requests()) == 6 and harness.running_requests(), "they did not begin"
    )
    victim = harness.worker_of(next(iter(running.values())))
    time.sleep(0.5)
    victim.kill()
    killed = time.monotonic()
    assert [content(one.get(timeout=HANG_SECONDS)) for one in waiting] == ExpectedAnswers(harness.model).texts(bodies)
    print(f"all answered {time.monotonic() - killed:.1f} s after the kill")
    harness.wait_for_model()


@pytest.mark.exhaustive
def test_answers_are_those_of_run_while_bulk_work_fills_the_batch(
    harness: Harness, chat: Any, write_lines: Callable[..., Path], tokenmill: Any, results: Any
) -> None:
    engine = ("--model", f"tiny={harness.model}", "--dtype", "float32", "--threads", 1, "--max-num-seqs", 8)
    lines = [chat(f"r{n}", f"question {n}", max_tokens=30) for n in range(12)]
    lines += [chat("seeded", "dice", max_tokens=30, temperature=1.0, seed=7, n=2, stop=["e"])]
    assert tokenmill("run", write_lines(*lines), "--output", "alone", *engine).code == 0
    alone = [row["text"] for row in results(harness.folder / "alone")]
    worker = harness.start("-m", "tokenmill", "worker", *engine)
    harness.start("-m", "tokenmill", "dispatcher")
    harness.intake()
    harness.wait_for_model()
    bulk = [chat(f"b{n}", f"number {n}", max_tokens=400, ignore_eos=True) for n in range(1_500)]
    source = write_lines(*bulk, name="bulk.jsonl")
    with FolderStore(harness.folder / "root") as store:
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        intake = Intake(world, IntakeSettings(plan=PlanSettings(max_shard_rows=100)))
        job = harness.folder / "root/jobs/job-1"
        intake.accept(JobDraft(pin_uri(str(source)), JobOptions(tier=Tier.BULK), "default", "job-1"))
        (entry,) = Catalog(store).entries()
    wait_for(lambda: list(job.glob("work/*/*-0*")), "the bulk job did not begin")
    sent = [harness.send(line["body"]) for line in lines]
    assert [content(one.get(timeout=HANG_SECONDS)) for one in sent] == alone
    firsts = first_tokens(harness, entry.pin.key, [{**line["body"], "ignore_eos": True} for line in lines[:-1]])
    print("first token while bulk fills the batch, ms:", " ".join(f"{1000 * seconds:.0f}" for seconds in firsts))
    assert max(firsts) < 2.0
    assert not (job / "manifest.json").exists(), "the bulk job filled the batch all the time"
    assert worker.poll() is None


def first_tokens(harness: Harness, model: str, bodies: list[dict[str, Any]]) -> list[float]:
    """Seconds until each request's first token came, one after the other."""
    lane, seconds = RedisLane(RedisSettings(harness.url), SystemClock()), []
    for number, body in enumerate(bodies):
        began = time.monotonic()
        events = answer(
            lane,
            LaneRequest(f"direct-{number}", model, body, tier=Tier.STANDARD),
            SystemClock(),
            CallSettings(poll_interval_seconds=0.02),
        )
        assert isinstance(next(events), TokensEvent)
        seconds.append(time.monotonic() - began)
        assert isinstance(list(events)[-1], EndEvent)
    lane.close()
    return seconds
