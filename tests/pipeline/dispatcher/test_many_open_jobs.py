"""A root with very many open jobs: idle ones cost almost no reads, and changes are still noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.controller import MAX_OPEN_CHECKS, JobController, JobControllerSettings
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.ledger.active_index import sweep
from pipeline.ledger.ledger import CLOSE, JobLedger
from pipeline.ports import ObjectInfo, World
from schemas.jobs.job import Closing
from schemas.jobs.outcome import JobStatus
from tests.pipeline.made_jobs import plan_by_hand

JOBS = 60


class CountingStore(FolderStore):
    """A folder store that counts the requests for jobs' objects."""

    def __init__(self, root: Path) -> None:
        self.requests: Counter[str] = Counter()
        super().__init__(root)

    def info(self, key: str) -> ObjectInfo | None:
        self._count("info", key)
        return super().info(key)

    def read(self, key: str) -> bytes:
        self._count("read", key)
        return super().read(key)

    def _count(self, what: str, key: str) -> None:
        if key.startswith("jobs/"):
            self.requests[f"{what} {key.rpartition('/')[2]}"] += 1


class FastClock(SystemClock):
    """A clock that advances a tenth of a second at each reading."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 0.1
        return self._now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CountingStore]:
    with CountingStore(tmp_path / "root") as store:
        yield store


@pytest.fixture
def world(store: CountingStore) -> World:
    return World(store, SystemClock(), SystemRandomness(), store.scratch)


def job(world: World, name: str, shards: int = 3, deadline: timedelta | None = None) -> JobLedger:
    ledger = JobLedger(world.store, f"jobs/{name}/")
    plan_by_hand(ledger, world, [[row] for row in range(shards)], deadline=deadline)
    return ledger


def controller(world: World) -> tuple[JobController, Dispatcher]:
    beats = MemoryHeartbeats(world.clock, 60.0)
    dispatcher = Dispatcher(
        world, MemoryQueue(), beats, settings=DispatchSettings(isolate=True, closing_interval_seconds=0.0)
    )
    return JobController(world, dispatcher, settings=JobControllerSettings(refresh_interval_seconds=0.0)), dispatcher


@pytest.mark.slow
def test_given_many_idle_jobs_then_a_tick_reads_a_few_of_them_and_a_cancelled_one_is_seen(
    store: CountingStore, world: World
) -> None:
    ledgers = [job(world, f"job-{number:02d}") for number in range(JOBS)]
    harness, dispatcher = controller(world)
    for _ in range(100):
        harness.tick()
    assert all(dispatcher.progress(ledger.name) for ledger in ledgers)
    store.requests.clear()
    for _ in range(10):
        harness.tick()
    # Two objects say whether a job is open, and two shards wait in the queue.
    assert sum(store.requests.values()) <= 10 * (2 * MAX_OPEN_CHECKS + 2), store.requests
    assert store.requests["info manifest.json"] == 10 * MAX_OPEN_CHECKS, "what has ended would not be noticed"

    cancelled = ledgers[7]
    cancelled.create_closing(Closing(kind="cancel", at=world.clock.now()))
    for _ in range(3):
        harness.tick()
    manifest = cancelled.manifest()
    assert manifest is not None
    assert manifest.status is JobStatus.CANCELLED
    assert not list(store.list(CLOSE))
    harness.close()


def test_given_a_job_of_a_root_when_its_deadline_passes_then_it_expires_without_a_marker(world: World) -> None:
    late = job(world, "late", deadline=timedelta(microseconds=1))
    harness, _ = controller(world)
    for _ in range(5):
        harness.tick()
    manifest = late.manifest()
    assert manifest is not None
    assert manifest.status is JobStatus.EXPIRED
    harness.close()


@pytest.mark.slow
def test_given_many_new_jobs_when_adding_them_is_slow_then_each_tick_adds_a_few(world: World) -> None:
    ids = [job(world, f"job-{number:02d}").name for number in range(JOBS)]
    harness, dispatcher = controller(replace(world, clock=FastClock()))
    counts = []
    for _ in range(JOBS):
        harness.tick()
        counts.append(sum(dispatcher.progress(name) is not None for name in ids))
    assert 0 < counts[0] < 5
    assert counts[-1] == JOBS
    harness.close()


def test_given_a_job_that_ended_when_it_was_to_be_cancelled_when_all_is_swept_then_no_marker_is_left(
    store: CountingStore, world: World
) -> None:
    open_job, ended = job(world, "open"), job(world, "ended", deadline=timedelta(microseconds=1))
    harness, _ = controller(world)
    for _ in range(5):
        harness.tick()
    assert ended.manifest() is not None
    for ledger in (open_job, ended):
        ledger.create_closing(Closing(kind="cancel", at=world.clock.now()))
    sweep(store)
    assert [info.key for info in store.list(CLOSE)] == [f"{CLOSE}open"]
    harness.close()
