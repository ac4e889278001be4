"""Adapters for one process: the queue, the heartbeats, and the store of the simulated histories."""

from __future__ import annotations

import threading
import time

import pytest

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ports import ShardTask, WorkerState
from tests.pipeline.contracts.store_contract import MakeStore, StoreContract
from tests.pipeline.made_jobs import held
from tests.pipeline.simulation import MemoryStore, SimulatedClock


class TestMemoryStoreContract(StoreContract):
    """The simulated store fulfils the contract of the real ones, or the histories would prove nothing."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        store = MemoryStore()
        return lambda: store


def test_the_queue_hands_out_in_order_and_waits_until_the_timeout() -> None:
    queue = MemoryQueue()
    assert queue.take(["q"], 0) is None
    started = time.monotonic()
    assert queue.take(["q"], 0.05) is None
    assert time.monotonic() - started >= 0.04
    queue.put("q", ShardTask("job", 1))
    queue.put("q", ShardTask("job", 2))
    assert [queue.take(["q"], 0), queue.take(["q"], 240.0), queue.take(["q"], 0)] == [
        ShardTask("job", 1),
        ShardTask("job", 2),
        None,
    ]


def test_the_queue_wakes_a_waiting_worker() -> None:
    queue = MemoryQueue()
    threading.Timer(0.05, queue.put, ["q", ShardTask("job", 7)]).start()
    assert queue.take(["q"], 240.0) == ShardTask("job", 7)


def test_queues_are_polled_in_the_requested_order() -> None:
    queue = MemoryQueue()
    queue.put("bulk", ShardTask("job", 1))
    queue.put("bulk", ShardTask("job", 2))
    queue.put("urgent", ShardTask("job", 3))
    assert queue.take(["other"], 0) is None
    assert [queue.take(["urgent", "bulk"], 0) for _ in range(2)] == [ShardTask("job", 3), ShardTask("job", 1)]
    assert queue.take(["bulk", "urgent"], 0) == ShardTask("job", 2)


def state(name: str, *shards: tuple[str, int]) -> WorkerState:
    return WorkerState(name, held=frozenset(shards))


def test_shards_are_held_as_long_as_their_worker_says_so() -> None:
    clock = SimulatedClock()
    beats = MemoryHeartbeats(clock, lifetime=10.0)
    beats.send_heartbeat(state("a", ("job", 1), ("job", 2)))
    beats.send_heartbeat(state("b", ("job", 3)))
    assert held(beats) == {("job", 1), ("job", 2), ("job", 3)}
    clock.sleep(9.0)
    beats.send_heartbeat(state("a", ("job", 2)))
    clock.sleep(2.0)
    assert [worker.name for worker in beats.workers()] == ["a"]
    assert held(beats) == {("job", 2)}, "a let go of 1, and b is silent"
    clock.sleep(9.0)
    assert held(beats) == set()


def test_the_systems_clock_and_randomness() -> None:
    clock = SystemClock()
    before, wall = clock.monotonic(), clock.now()
    clock.sleep(0.01)
    assert clock.monotonic() - before >= 0.01
    assert clock.now() > wall
    assert wall.utcoffset() is not None
    assert len({SystemRandomness().token(16) for _ in range(100)}) == 100
