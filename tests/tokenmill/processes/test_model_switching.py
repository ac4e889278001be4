"""When a worker of several models changes from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import START
from pipeline.ports import ShardTask, queue_name
from pipeline.worker_client.ports import BY_URGENCY, ShardWork
from schemas.jobs.job import Tier
from schemas.workers.lane import HandBackEvent, LaneRequest
from tests.pipeline.simulation import SimulatedClock
from tokenmill.processes.model_switching import POLL_SECONDS, ModelRotation, RotatingShardSource

A, B, C = ((name, queue_name(name, Tier.BULK)) for name in "abc")


class Shards:
    """A source of a model's shards; `left` of them."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.asked: list[Sequence[Tier]] = []

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        self.asked.append(tiers)
        self.left -= 1
        return object() if self.left >= 0 else None  # type: ignore[return-value]

    def finished(self) -> bool:
        return False


@pytest.fixture
def queue() -> MemoryQueue:
    return MemoryQueue()


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def lane(clock: SimulatedClock) -> MemoryLane:
    return MemoryLane(clock)


@pytest.fixture
def turns(queue: MemoryQueue, lane: MemoryLane, clock: SimulatedClock) -> ModelRotation:
    turns = ModelRotation(["a", "b", "c"], queue, lane.worker("w"), clock, switch_after=60.0)
    turns.begin()
    return turns


def test_an_idle_model_is_replaced_by_the_next_with_requests(queue: MemoryQueue, turns: ModelRotation) -> None:
    source = RotatingShardSource(Shards(1), turns)
    queue.put(C[1], ShardTask("job", 7))
    assert source.take(0) is not None
    assert not source.finished(), "it has work"
    assert source.take(0) is None
    assert source.finished()
    assert turns.loaded == "c"
    assert queue.take([C[1]], 0) is None, "nobody else is to load the model for the same shard"
    turns.begin()
    assert queue.take([C[1]], 0) == ShardTask("job", 7)


def test_without_anything_to_do_a_model_stays(queue: MemoryQueue, clock: SimulatedClock, turns: ModelRotation) -> None:
    source = RotatingShardSource(Shards(0), turns)
    for _ in range(5):
        clock.sleep(100.0)
        assert source.take(0) is None
        assert not source.finished()
    assert turns.loaded == "a"
    queue.put(B[1], ShardTask("job", 1))
    clock.sleep(POLL_SECONDS)
    source.take(0)
    assert source.finished()
    assert turns.loaded == "b"


def test_a_model_that_always_has_work_makes_room_after_a_while(
    queue: MemoryQueue, clock: SimulatedClock, turns: ModelRotation
) -> None:
    shards = Shards(100)
    source = RotatingShardSource(shards, turns)
    queue.put(B[1], ShardTask("job", 1))
    for _ in range(59):
        assert source.take(0) is not None
        clock.sleep(1.0)
    assert not source.finished()
    clock.sleep(1.0)
    assert source.take(0) is not None, "it is worked on before the change"
    assert source.finished()
    left = shards.left
    assert source.take(0) is None
    assert shards.left == left, "no more are taken"
    assert turns.loaded == "b"


def test_a_model_with_a_lane_request_is_loaded_and_the_request_waits_for_it(
    lane: MemoryLane, clock: SimulatedClock, turns: ModelRotation
) -> None:
    busy = [True]
    source = RotatingShardSource(Shards(0), turns, lambda: busy[0])
    asked = LaneRequest("r1", "b", {})
    lane.send(asked)
    source.take(0)
    assert not source.finished(), "callers of the loaded model are being answered"
    busy[0] = False
    clock.sleep(POLL_SECONDS)
    source.take(0)
    assert source.finished()
    assert turns.loaded == "b"
    (event,) = lane.read({"r1": START}, 0)
    assert isinstance(event, HandBackEvent), "its caller is to send it again"
    lane.send(replace(asked, attempt=2))
    turns.begin()
    assert RotatingShardSource(Shards(0), turns).take(0) is None
    assert [one.attempt for one in lane.worker("w").take(["b"], 1, 0)] == [2]


def test_that_nothing_more_urgent_is_there_does_not_mean_that_there_is_nothing(
    queue: MemoryQueue, turns: ModelRotation
) -> None:
    source = RotatingShardSource(Shards(0), turns)
    queue.put(B[1], ShardTask("job", 1))
    assert source.take(0, (Tier.STANDARD,)) is None
    assert not source.finished()
