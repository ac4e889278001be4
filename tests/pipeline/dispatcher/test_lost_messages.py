"""Lost messages: a shard that no worker holds is put again, after a time-out that grows up to a maximum."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from pipeline.adapters.celery.shard_queue import CeleryQueueSettings
from pipeline.dispatcher.dispatcher import DispatchSettings
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import Clock, ShardTask
from tests.pipeline.made_jobs import plan_by_hand
from tests.pipeline.simulated_harness import LIFETIME, PipelineHarness, finish
from tests.pipeline.simulation import ChaoticQueue, simulated_world


class ExpiringQueue(ChaoticQueue):
    """A queue whose messages expire, as on a broker, when no worker takes them."""

    def __init__(self, clock: Clock, lifetime: float) -> None:
        super().__init__()
        self._clock, self._lifetime = clock, lifetime
        self._ends: deque[float] = deque()

    def put(self, queue: str, task: ShardTask) -> None:
        super().put(queue, task)
        self._ends.append(self._clock.monotonic() + self._lifetime)

    def expire(self) -> None:
        while self._ends and self._ends[0] <= self._clock.monotonic():
            self._ends.popleft()
            del self.tasks[0]


def test_a_lost_message_is_queued_again_after_growing_timeouts_up_to_the_maximum(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [[0]])
    harness.dispatcher.add(harness.ledger)
    put_at = []
    for _ in range(600):
        harness.dispatcher.tick()
        if harness.queue.tasks:
            put_at.append(harness.world.clock.monotonic())
            harness.queue.lose(0)
        harness.world.clock.sleep(1.0)
    assert put_at == [0.0, 30.0, 90.0, 210.0, 330.0, 450.0, 570.0]


def test_given_no_worker_for_a_night_then_the_shards_that_wait_are_on_the_queue_whenever_the_first_one_comes(
    tmp_path: Path,
) -> None:
    """Messages run out meanwhile. What waits for a message fills the backlog, so no other shard would be there either,
    nor one of a job that comes in the morning."""
    world = simulated_world(tmp_path)
    queue = ExpiringQueue(world.clock, CeleryQueueSettings("memory://").message_lifetime_seconds)
    harness = PipelineHarness(world, JobLedger(world.store), queue)
    plan_by_hand(harness.ledger, world, [[0], [1], [2]])
    harness.dispatcher.add(harness.ledger)
    for _ in range(10 * 60):
        queue.expire()
        harness.dispatcher.tick()
        assert {task.shard for task in queue.tasks} == {1, 2}, f"after {world.clock.monotonic():g} s"
        world.clock.sleep(60.0)
    assert len(queue.tasks) < 20, "the same shards are not put over and over"
    assert finish(harness, harness.client("first")).counts.total == 3
    assert world.clock.monotonic() <= 36_000.0 + LIFETIME


def test_given_a_message_that_was_lost_four_times_then_a_good_worker_still_ends_the_job_within_minutes(
    harness: PipelineHarness,
) -> None:
    """The shard was seen in a dying worker's hands before it was lost for the last time: it is put at once, but its
    grown time-out still applies."""
    plan_by_hand(harness.ledger, harness.world, [[0, 1]], rejected=[2])
    harness.dispatcher.add(harness.ledger)
    for _ in range(4):
        harness.dispatcher.tick()
        harness.queue.lose(0)
        harness.world.clock.sleep(300.0)
    harness.dispatcher.tick()
    dying = harness.client("dying")
    assert dying.take(0) is not None
    harness.dispatcher.tick()
    harness.world.clock.sleep(LIFETIME + 1)
    harness.dispatcher.tick()
    assert [task.shard for task in harness.queue.tasks] == [1]
    harness.queue.lose(0)
    began = harness.world.clock.monotonic()
    assert finish(harness, harness.client("good")).counts.total == 3
    assert harness.world.clock.monotonic() - began <= DispatchSettings().max_retry_timeout_seconds + 1.0
