"""Changes of open jobs are read at once; reads that can wait are spread over several ticks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.dispatcher.poller import MAX_DEFERRABLE_READS, MAX_PARTS_PER_POLL
from pipeline.jobs.submit import submit
from pipeline.ledger.ledger import JobLedger, LedgerError, part_key, segment_key
from pipeline.ports import ShardTask, World
from pipeline.worker_client.shard_client import ShardClient
from tests.pipeline.made_jobs import MODELS, QUEUE, computed, order, plan_by_hand, report

ANSWER = 0.02


class SlowStore(FolderStore):
    """A folder store that answers as slowly as a bucket.

    Attributes:
        most: the highest number of concurrent requests.
        requests: how often each object was requested.
    """

    def __init__(self, root: Path) -> None:
        self.most = self._under_way = 0
        self.requests: Counter[str] = Counter()
        self.answer = 0.0
        self._counting = threading.Lock()
        super().__init__(root)

    def open(self, key: str) -> BinaryIO:
        self._wait(key)
        return super().open(key)

    def replace(self, key: str, data: bytes) -> None:
        self._wait(key)
        super().replace(key, data)

    def _wait(self, key: str) -> None:
        with self._counting:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            self.requests[key] += 1
        time.sleep(self.answer)
        with self._counting:
            self._under_way -= 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SlowStore]:
    with SlowStore(tmp_path / "root") as store:
        yield store


@pytest.fixture
def world(store: SlowStore) -> World:
    return World(store, SystemClock(), SystemRandomness(), store.scratch)


def planned(world: World, name: str, shards: int) -> JobLedger:
    ledger = JobLedger(world.store, f"jobs/{name}/")
    plan_by_hand(ledger, world, [[row] for row in range(shards)])
    return ledger


def commit(world: World, ledger: JobLedger, shards: int) -> None:
    """Commit as a worker without heartbeats."""
    queue = MemoryQueue()
    beats = MemoryHeartbeats(world.clock, 60.0)
    client = ShardClient("w", world, lambda _: ledger, queue, beats, lambda: False, models=MODELS)
    for shard in range(1, shards + 1):
        queue.put(QUEUE, ShardTask(ledger.job().id, shard))
        work = client.take(0)
        assert work is not None
        client.commit(work, computed(work), report(work))


def dispatcher(world: World, together: ThreadPoolExecutor | None = None) -> Dispatcher:
    beats = MemoryHeartbeats(world.clock, 60.0)
    settings = DispatchSettings(isolate=True, cache_interval_seconds=0.0)
    return Dispatcher(world, MemoryQueue(), beats, settings=settings, together=together)


@pytest.mark.slow
def test_given_a_slow_store_many_requests_run_concurrently(store: SlowStore, world: World) -> None:
    ledgers = [planned(world, f"job-{number}", 12) for number in range(3)]
    for ledger in ledgers:
        commit(world, ledger, 12)
    store.answer = ANSWER
    with ThreadPoolExecutor(16) as together:
        harness = dispatcher(world, together)
        for ledger in ledgers:
            harness.add(ledger)
        harness.tick()
    assert harness.finished()
    assert all(ledger.manifest() is not None for ledger in ledgers)
    assert store.most >= 8


@pytest.mark.slow
def test_given_a_large_job_that_is_taken_up_then_its_parts_are_read_over_several_ticks(
    store: SlowStore, world: World
) -> None:
    shards = MAX_PARTS_PER_POLL * 2
    ledger = planned(world, "large", shards + 1)
    commit(world, ledger, shards)
    harness = dispatcher(world)
    harness.add(ledger)
    done = []
    for _ in range(4):
        harness.tick({"large"})
        progress = harness.progress("large")
        assert progress is not None
        done.append(progress.shards_done)
    assert done[0] == MAX_PARTS_PER_POLL < done[1] <= 2 * MAX_PARTS_PER_POLL
    assert done[-1] == shards


@pytest.mark.slow
def test_given_jobs_that_wait_to_be_planned_a_tick_reads_few_of_their_plans(store: SlowStore, world: World) -> None:
    names = [f"job-{number:03}" for number in range(5 * MAX_DEFERRABLE_READS)]
    harness = dispatcher(world)
    for name in names:
        ledger = JobLedger(world.store, f"jobs/{name}/")
        submit(order(), ledger, world, job_id=name)
        harness.add(ledger)
    plans, mine = [f"jobs/{name}/{segment_key(0)}" for name in names], names[-1]
    store.requests.clear()
    for turn in range(1, 6):
        harness.tick({mine})
        assert sum(store.requests[plan] for plan in plans) == turn * (MAX_DEFERRABLE_READS + 1)
    assert store.requests[plans[-1]] == 5, "its turn has come, and it can't wait"
    assert min(store.requests[plan] for plan in plans) == 1, "the others are polled in turn"


def test_given_a_damaged_part_only_its_job_is_paused(store: SlowStore, world: World) -> None:
    good, bad = planned(world, "good", 2), planned(world, "bad", 2)
    commit(world, good, 2)
    commit(world, bad, 2)
    key = bad.prefix + part_key(1)
    store.delete(key)
    store.create(key, b"no parquet at all")
    with ThreadPoolExecutor(4) as together:
        harness = dispatcher(world, together)
        harness.add(good)
        harness.add(bad)
        harness.tick()
        assert good.manifest() is not None
        assert bad.manifest() is None
        assert harness.finished()
        strict = Dispatcher(world, MemoryQueue(), MemoryHeartbeats(world.clock, 60.0), together=together)
        strict.add(bad)
        with pytest.raises(LedgerError, match="part-00001"):
            strict.tick()


def test_given_a_lost_lease_a_tick_ends_between_two_jobs(world: World) -> None:
    ledgers = [planned(world, f"job-{number}", 1) for number in range(4)]
    for ledger in ledgers:
        commit(world, ledger, 1)
    harness = dispatcher(world)
    for ledger in ledgers:
        harness.add(ledger)
    answers = iter([True, True, False])
    harness.tick(still=lambda: next(answers))
    assert [ledger.manifest() is not None for ledger in ledgers] == [True, True, False, False]
