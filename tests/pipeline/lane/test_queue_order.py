"""The order in which a worker takes from a model's sub-queues."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeline.lane.memory import MemoryLane
from pipeline.lane.queue_order import QueueOrder, queues_of_no_worker
from schemas.settings.kv_transfer import Role
from schemas.workers.lane import LaneRequest
from tests.pipeline.simulation import SimulatedClock

STEAL_AFTER = 0.25


def send(lane: MemoryLane, queue: str, count: int) -> None:
    for number in range(count):
        lane.send(LaneRequest(f"{queue.strip('@') or 'general'}-{number}", "m", {}, queue=queue))


def take(lane: MemoryLane, order: QueueOrder, calls: int) -> list[str]:
    """The kinds of requests that so many calls take, each with room for one."""
    worker = lane.worker("w")
    return [one.id.partition("-")[0] for _ in range(calls) for one in worker.take(order.next(), 1, 0)]


def test_given_a_busy_worker_then_no_queue_starves() -> None:
    clock = SimulatedClock()
    lane, order = MemoryLane(clock), QueueOrder(["m"], "w", STEAL_AFTER)
    for queue in ("", "@dead", "@w"):
        send(lane, queue, 100)
    assert set(take(lane, order, 40)) == {"w", "general"}, "the others' are for others"
    clock.sleep(60.0)
    counts = Counter(take(lane, order, 80))
    assert counts["general"] >= 30
    assert counts["w"] >= 30
    assert counts["dead"] >= 5


def test_given_a_busy_worker_of_several_models_then_none_starves_and_its_own_requests_come_before_those_of_others() -> (
    None
):
    clock = SimulatedClock()
    lane, order = MemoryLane(clock), QueueOrder(["m", "n", "o"], "w", STEAL_AFTER)
    for number in range(30):
        for model in ("m", "n", "o"):
            lane.send(LaneRequest(f"{model}-{number}", model, {}))
            lane.send(LaneRequest(f"stolen-{model}-{number}", model, {}, queue="@other"))
    clock.sleep(STEAL_AFTER)
    counts = Counter(take(lane, order, 30))
    assert min(counts[model] for model in "mno") >= 8
    assert not counts["stolen"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_given_a_busy_worker_with_a_role_then_no_queue_starves(role: Role) -> None:
    clock = SimulatedClock()
    lane, order = MemoryLane(clock), QueueOrder(["m"], "w", STEAL_AFTER, role, help_after_seconds=1.0)
    for queue in ("", "decode", "@dead"):
        send(lane, queue, 100)
    own = {"prefill": "general", "decode": "decode"}[role]
    assert set(take(lane, order, 40)) == {own}
    clock.sleep(60.0)
    counts = Counter(take(lane, order, 64))
    assert counts[own] >= 50
    assert min(counts["general"], counts["decode"], counts["dead"]) >= 4


def test_given_nothing_of_its_own_then_a_worker_takes_what_has_waited_for_another() -> None:
    clock = SimulatedClock()
    lane, order = MemoryLane(clock), QueueOrder(["m"], "w", STEAL_AFTER)
    send(lane, "@other", 3)
    assert take(lane, order, 16) == []
    clock.sleep(STEAL_AFTER)
    assert take(lane, order, 16) == ["other"] * 3


def test_a_worker_that_has_not_loaded_a_model_sees_its_general_and_its_stealable_requests() -> None:
    clock = SimulatedClock()
    lane = MemoryLane(clock)
    worker = lane.worker("w")
    send(lane, "@other", 1)
    assert worker.take(queues_of_no_worker("m", STEAL_AFTER), 9, 0) == []
    clock.sleep(STEAL_AFTER)
    send(lane, "", 1)
    assert [one.id for one in worker.take(queues_of_no_worker("m", STEAL_AFTER), 9, 0)] == ["general-0", "other-0"]


@pytest.mark.parametrize(
    ("role", "at_once", "later"), [("decode", "decode", "general"), ("prefill", "general", "decode")]
)
def test_a_model_that_is_not_loaded_is_polled_by_the_workers_role(role: Role, at_once: str, later: str) -> None:
    clock = SimulatedClock()
    lane = MemoryLane(clock)
    worker = lane.worker("w")
    for queue in ("", "decode"):
        send(lane, queue, 1)
    queues = queues_of_no_worker("m", STEAL_AFTER, role, 5.0)
    assert [one.id for one in worker.take(queues, 9, 0)] == [f"{at_once}-0"]
    clock.sleep(5.0)
    assert [one.id for one in worker.take(queues, 9, 0)] == [f"{later}-0"]
