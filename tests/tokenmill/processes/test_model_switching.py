"""When a worker of several models changes from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import START, LaneQueue
from pipeline.ports import ShardTask, queue_name
from pipeline.worker_client.ports import BY_URGENCY, ShardWork
from schemas.jobs.job import Tier
from schemas.workers.lane import HandBackEvent, LaneRequest
from tests.pipeline.simulation import SimulatedClock
from tokenmill.processes.model_switching import POLL_SECONDS, ModelRotation, RotatingShardSource

A, B, C = ((name, queue_name(name, Tier.BULK)) for name in "abc")


class FakeShardSource:
    """A source of a model's shards; `left` of them."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.requested_tiers: list[Sequence[Tier]] = []

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        self.requested_tiers.append(tiers)
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
def rotation(queue: MemoryQueue, lane: MemoryLane, clock: SimulatedClock) -> ModelRotation:
    rotation = ModelRotation(["a", "b", "c"], queue, lane.worker("w"), clock, switch_after=60.0)
    rotation.begin()
    return rotation


def test_an_idle_model_is_replaced_by_the_next_with_requests(queue: MemoryQueue, rotation: ModelRotation) -> None:
    source = RotatingShardSource(FakeShardSource(1), rotation)
    queue.put(C[1], ShardTask("job", 7))
    assert source.take(0) is not None
    assert not source.finished(), "it has work"
    assert source.take(0) is None
    assert source.finished()
    assert rotation.loaded == "c"
    assert queue.take([C[1]], 0) is None, "no other worker is to load the model for the same shard"
    rotation.begin()
    assert queue.take([C[1]], 0) == ShardTask("job", 7)


def test_without_anything_to_do_a_model_stays(
    queue: MemoryQueue, clock: SimulatedClock, rotation: ModelRotation
) -> None:
    source = RotatingShardSource(FakeShardSource(0), rotation)
    for _ in range(5):
        clock.sleep(100.0)
        assert source.take(0) is None
        assert not source.finished()
    assert rotation.loaded == "a"
    queue.put(B[1], ShardTask("job", 1))
    clock.sleep(POLL_SECONDS)
    source.take(0)
    assert source.finished()
    assert rotation.loaded == "b"


def test_a_model_is_loaded_for_a_shard_of_one_of_its_adapters(queue: MemoryQueue, clock: SimulatedClock) -> None:
    rotation = ModelRotation(["a", "b"], queue, None, clock, switch_after=60.0, adapters={"b": ["b-legal"]})
    legal = queue_name("b-legal", Tier.BULK)
    queue.put(legal, ShardTask("job", 7))

    assert rotation.over(idle=True)

    assert rotation.loaded == "b"
    rotation.begin()
    assert queue.take([legal], 0) == ShardTask("job", 7)


def test_a_model_that_always_has_work_makes_room_after_a_while(
    queue: MemoryQueue, clock: SimulatedClock, rotation: ModelRotation
) -> None:
    shards = FakeShardSource(100)
    source = RotatingShardSource(shards, rotation)
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
    assert rotation.loaded == "b"


def test_a_model_with_a_lane_request_is_loaded_and_the_request_waits_for_it(
    lane: MemoryLane, clock: SimulatedClock, rotation: ModelRotation
) -> None:
    busy = [True]
    source = RotatingShardSource(FakeShardSource(0), rotation, lambda: busy[0])
    request = LaneRequest("r1", "b", {})
    lane.send(request)
    source.take(0)
    assert not source.finished(), "callers of the loaded model are being answered"
    busy[0] = False
    clock.sleep(POLL_SECONDS)
    source.take(0)
    assert source.finished()
    assert rotation.loaded == "b"
    (event,) = lane.read({"r1": START}, 0)
    assert isinstance(event, HandBackEvent), "its caller is to send it again"
    lane.send(replace(request, attempt=2))
    rotation.begin()
    assert RotatingShardSource(FakeShardSource(0), rotation).take(0) is None
    assert [one.attempt for one in lane.worker("w").take([LaneQueue("b")], 1, 0)] == [2]


def test_that_nothing_more_urgent_is_there_does_not_mean_that_there_is_nothing(
    queue: MemoryQueue, rotation: ModelRotation
) -> None:
    source = RotatingShardSource(FakeShardSource(0), rotation)
    queue.put(B[1], ShardTask("job", 1))
    assert source.take(0, (Tier.STANDARD,)) is None
    assert not source.finished()
