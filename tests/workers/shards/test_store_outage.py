"""A store that is unavailable for a while, or a full disk: the worker waits, and loses no rows."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from pipeline.adapters.folder.durable import LOCAL_DISK
from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import ShardTask, StoreUnavailable, World
from pipeline.results.shard_history import read_history
from pipeline.worker_client.ports import CheckpointWork, WorkerLoad
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.checkpoints import FinishedRows
from schemas.workers.metrics import WorkerMetrics
from tests.pipeline.made_jobs import MODELS, QUEUE, computed, plan_by_hand, report
from tests.pipeline.simulation import MemoryStore, simulated_world
from tests.waiting import HANG_SECONDS
from workers.model.loaded_model import LoadedModel
from workers.settings import WorkerSettings
from workers.shards.store_outage import READ_FAILURE_SECONDS, OutageTolerantClient
from workers.shards.worker import ShardWorker


class StoreAway(StoreUnavailable):
    """An outage of the store."""


@pytest.fixture
def model(model_folder: Path) -> LoadedModel:
    config = EngineConfig(
        dtype="float32", max_model_len=128, cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=4)
    )
    return LoadedModel.load(model_folder, name="tiny", config=config)


def failing_client(kit: Any, calls: int) -> Any:
    """A sink and source whose store is unavailable for the first calls of each kind."""

    class FailingClient(kit.MemorySink):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.left: dict[str, int] = dict.fromkeys(("begin", "checkpoint", "commit", "take", "find_revoked"), calls)
            shards = [
                kit.make_work([kit.chat(f"{n} {row}", max_tokens=5) for row in range(6)], shard=n, first_row=6 * n)
                for n in (1, 2)
            ]
            self.source = kit.ListSource(shards)

        def fail(self, what: str) -> None:
            if self.left[what]:
                self.left[what] -= 1
                raise StoreAway(f"{what}: away")

        def begin(self, *args: Any) -> None:
            self.fail("begin")
            super().begin(*args)

        def checkpoint(self, *args: Any) -> None:
            self.fail("checkpoint")
            super().checkpoint(*args)

        def commit(self, *args: Any) -> bool:
            self.fail("commit")
            won: bool = super().commit(*args)
            return won

        def take(self, *args: Any) -> Any:
            self.fail("take")
            return self.source.take(*args)

        def finished(self) -> bool:
            return bool(self.source.finished())

        def find_revoked(self, *args: Any) -> Any:
            self.fail("find_revoked")
            return super().find_revoked(*args)

    return FailingClient()


def test_given_a_store_that_is_away_for_a_while_then_the_worker_waits_and_all_rows_are_committed(
    model: LoadedModel, kit: Any
) -> None:
    sink, clock = failing_client(kit, 3), kit.FakeClock()
    tolerant = OutageTolerantClient(sink, clock, threading.Event())
    settings = WorkerSettings(checkpoint_seconds=0.0)
    with capture_logs() as logs:
        progress = ShardWorker(model, tolerant, tolerant, clock, settings, helper=kit.InlineExecutor()).run()
    assert sorted(sink.rows) == list(range(6, 18))
    assert (progress.counts.failed, progress.counts.succeeded) == (0, 12)
    assert not any(sink.left.values()), "each kind of call met the outage"
    events = [line["event"] for line in logs if "the store can" in line["event"]]
    assert len(events) <= 3 * len(sink.left), "two lines for each outage, and not one for each try"
    assert events[-1] == "the store can be used again: the worker continues"
    assert tolerant.outage is None


def test_given_an_outage_when_heartbeats_are_sent_then_they_have_its_reason(kit: Any) -> None:
    # Given a write that waits for the store, on another thread
    clock, stop, tries = kit.FakeClock(), threading.Event(), threading.Semaphore(0)
    has_room = threading.Event()

    class FullDiskSink(kit.MemorySink):  # type: ignore[misc,name-defined]
        def begin(self, *args: Any) -> None:
            if not has_room.is_set():
                tries.release()
                raise StoreAway("no room")
            super().begin(*args)

    sink = FullDiskSink()
    tolerant = OutageTolerantClient(sink, clock, stop)
    work = kit.make_work([kit.chat()])
    load = WorkerLoad(metrics=WorkerMetrics(model="tiny"))
    writer = threading.Thread(target=tolerant.begin, args=(work,))
    writer.start()
    try:
        assert tries.acquire(timeout=HANG_SECONDS)
        assert tries.acquire(timeout=HANG_SECONDS), "the first failure is noted by now"
        tolerant.send_heartbeat([work], load)
        # When something can be read meanwhile, as on a disk that is full, then the outage is not over
        tolerant.find_revoked([work])
        tolerant.send_heartbeat([work], load)
    finally:
        has_room.set()
        writer.join()
    tolerant.send_heartbeat([work], load)
    tolerant.send_heartbeat([work], WorkerLoad())
    assert [found.metrics and found.metrics.store_outage for found in sink.loads] == ["no room", "no room", None, None]


def test_given_a_failed_read_when_no_other_read_follows_then_the_outage_expires(kit: Any) -> None:
    sink, clock = failing_client(kit, 1), kit.FakeClock()
    tolerant = OutageTolerantClient(sink, clock, threading.Event())
    assert tolerant.take(0) is None
    assert tolerant.outage == "take: away"
    sink.source.left.clear()
    assert tolerant.take(0) is None
    assert tolerant.outage == "take: away", "the store may be unavailable though no shard came"
    clock.sleep(READ_FAILURE_SECONDS)
    assert tolerant.take(0) is None
    assert tolerant.outage is None


def test_given_an_outage_without_end_then_no_shard_is_begun_and_a_stop_ends_the_worker(
    model: LoadedModel, kit: Any
) -> None:
    stop, clock = threading.Event(), kit.FakeClock()
    sink = failing_client(kit, 10**9)
    sink.left["take"] = 0
    tries = 0

    class StoppingClock(kit.FakeClock):  # type: ignore[misc,name-defined]
        def sleep(self, seconds: float) -> None:
            nonlocal tries
            tries += 1
            clock.sleep(seconds)
            if tries > 50:
                stop.set()

    tolerant = OutageTolerantClient(sink, StoppingClock(), stop)
    with pytest.raises(StoreAway, match="away"):
        ShardWorker(model, tolerant, tolerant, clock, helper=kit.InlineExecutor()).run(stop)
    assert model.engine.stats().generated == 0, "no row is computed without a begin record"


class LostConfirmationsStore(MemoryStore):
    """A store that makes each write and then raises `StoreUnavailable`."""

    lost = 0

    def create(self, key: str, data: bytes | Path) -> bool:
        done = super().create(key, data)
        if self.lost:
            self.lost -= 1
            raise StoreAway("the answer was lost")
        return done


def test_given_lost_confirmations_when_writes_are_repeated_then_each_finds_itself(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    store = LostConfirmationsStore()
    world = World(store, world.clock, world.random, world.scratch)
    ledger, queue = JobLedger(store), MemoryQueue()
    job = plan_by_hand(ledger, world, [[0, 1, 2]])
    client = ShardClient(
        "w", world, lambda _: ledger, queue, MemoryHeartbeats(world.clock, 10.0), lambda: False, models=MODELS
    )
    tolerant = OutageTolerantClient(client, world.clock, threading.Event())
    queue.put(QUEUE, ShardTask(job.id, 1))
    work = tolerant.take(0)
    assert work is not None

    def repeated(write: Callable[[], Any]) -> Any:
        store.lost = 2
        return write()

    repeated(lambda: tolerant.begin(work))
    assert len(ledger.attempts(1)) == 1
    for generated in (3, 7):
        new = CheckpointWork(FinishedRows([], []), (), generated, 3)
        repeated(lambda new=new: tolerant.checkpoint(work, new))
    assert len([key for key in store.objects if f"{work.attempt_id}-" in key]) == 2
    assert read_history(ledger, 1).logged == {work.attempt_id: 7}
    assert repeated(lambda: tolerant.commit(work, computed(work), report(work))) is True, "the part is its own"
    assert ledger.ended(1) == []


def test_given_a_full_disk_then_the_error_may_pass(tmp_path: Path) -> None:
    class FullDisk(type(LOCAL_DISK)):  # type: ignore[misc]
        full = False

        def write_new(self, *args: Any, **more: Any) -> Any:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write_new(*args, **more)

    disk = FullDisk()
    with FolderStore(tmp_path / "root", disk=disk) as store:
        disk.full = True
        with pytest.raises(StoreUnavailable, match="No space left on device; free some space"):
            store.create("key", b"data")
        disk.full = False
        assert store.create("key", b"data") is True
