"""The reconcile loop, in histories where the queue loses, repeats and reorders, and workers die, stall and race."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.jobs.event_sink import JobEvent
from pipeline.ledger.ledger import JobLedger, LedgerError, part_key
from pipeline.ports import Clock, PipelineError, WorkerState
from pipeline.worker_client.ports import ShardWork
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.events import JobChanged, ProgressMade, ShardCommitted
from schemas.jobs.job import Closing, Tier
from schemas.jobs.outcome import JobStatus, Usage
from tests.pipeline.made_jobs import EXPOSED, PIN, all_rows, computed, order, plan_by_hand, report
from tests.pipeline.simulated_harness import LIFETIME, PipelineHarness, broken_store, commit_all, finish, taken
from tests.pipeline.simulation import START, ChaoticQueue, SimulatedClock, simulated_world

WEIGHTS = {
    "tick": 3, "take": 4, "commit": 4, "wait": 2, "stall": 1, "wake": 3,
    "beat": 1, "lose": 1, "repeat": 1, "mix": 1, "die": 1,
}  # fmt: skip
EVENTS = [event for event, weight in WEIGHTS.items() for _ in range(weight)]


@dataclass
class Worker:
    client: ShardClient
    works: list[ShardWork] = field(default_factory=list)
    stalled: bool = False


def act(harness: PipelineHarness, workers: list[Worker], chaos: random.Random, deaths: list[Worker]) -> int:
    """One random event; the tokens that a lost race repeated."""
    worker = chaos.choice(workers)
    event = chaos.choice(EVENTS)
    if event == "tick":
        harness.dispatcher.tick()
    elif event == "take" and not worker.stalled and len(worker.works) < 3:
        if (work := worker.client.take(0)) is not None:
            worker.client.begin(work)
            worker.works.append(work)
    elif event == "commit" and worker.works and not worker.stalled:
        work = worker.works.pop(chaos.randrange(len(worker.works)))
        if not worker.client.commit(work, computed(work, mark=work.attempt_id), report(work)):
            return 7 * work.table.num_rows
    elif event == "beat" and not worker.stalled:
        worker.client.send_heartbeat(worker.works)
    elif event == "lose":
        harness.queue.lose(chaos.randrange(100))
    elif event == "repeat":
        harness.queue.repeat(chaos.randrange(100))
    elif event == "mix":
        harness.queue.shuffle(chaos.randrange(100))
    elif event == "wait":
        harness.world.clock.sleep(chaos.choice([0.1, 3.0, 40.0]))
        harness.dispatcher.tick()
    elif event == "die" and chaos.random() < 0.3:
        deaths.append(Worker(worker.client, list(worker.works)))
        worker.client, worker.works = harness.client(f"reborn-{len(deaths)}"), []
    elif event == "stall":
        # Long enough to be given up: its shards go to another, and later it comes back and commits them too.
        worker.stalled = True
        harness.world.clock.sleep(LIFETIME + 1)
        harness.dispatcher.tick()
    elif event == "wake":
        worker.stalled = False
    return 0


def release_all(workers: list[Worker]) -> int:
    """Release the shards of all live workers; returns the tokens that were computed in vain."""
    tokens = 0
    for worker in workers:
        for work in worker.works:
            worker.client.release(work, 7 * work.table.num_rows)
            tokens += 7 * work.table.num_rows
    return tokens


class ResettableHeartbeats:
    """Heartbeats on a server that can be emptied."""

    lifetime = LIFETIME

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        self._heartbeats = MemoryHeartbeats(self._clock, LIFETIME)
        self.send_heartbeat, self.leave = self._heartbeats.send_heartbeat, self._heartbeats.leave
        self.workers, self.since = self._heartbeats.workers, self._heartbeats.since


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shard_sizes=st.lists(st.integers(1, 6), max_size=12),
    rejected=st.integers(0, 4),
    events=st.integers(20, 120),
)
def test_each_row_has_exactly_one_result_under_random_faults(
    tmp_path_factory: pytest.TempPathFactory, seed: int, shard_sizes: list[int], rejected: int, events: int
) -> None:
    chaos = random.Random(seed)
    world = simulated_world(tmp_path_factory.mktemp("scratch"), seed)
    harness = PipelineHarness(world, JobLedger(world.store))
    rows = list(range(sum(shard_sizes) + rejected))
    chaos.shuffle(rows)
    refused, left, shards = sorted(rows[:rejected]), rows[rejected:], []
    for size in shard_sizes:
        shards.append(left[:size])
        left = left[size:]
    job = plan_by_hand(harness.ledger, world, shards, refused)
    harness.dispatcher.add(harness.ledger)
    workers, deaths, repeated = [Worker(harness.client(f"w{index}")) for index in range(2)], [], 0
    committed: dict[str, bytes] = {}
    for _ in range(events):
        if harness.dispatcher.finished():
            break
        repeated += act(harness, workers, chaos, deaths)
        progress = harness.dispatcher.progress(job.id)
        assert progress is None or progress.counts.total in (0, rejected, len(rows))
        for key, body in committed.items():
            assert world.store.read(key) == body, "a committed part changed"
        committed = {info.key: world.store.read(info.key) for info in world.store.list("results/")}
    if harness.dispatcher.finished():
        deaths += workers  # what they still hold can only be bounded
    else:
        repeated += release_all(workers)
    manifest = finish(harness, harness.client("last"))

    results = all_rows(harness.ledger)
    assert sorted(result["row"] for result in results) == sorted(rows)
    assert all(result["custom_id"] in (None, f"id-{result['row']}") for result in results)
    assert manifest.counts.total == len(rows)
    assert manifest.counts.failed == rejected + sum(row % 5 == 4 for row in rows if row not in refused)
    assert manifest.counts.succeeded + manifest.counts.failed == len(rows)
    assert manifest.usage.completion == 7 * (len(rows) - rejected)
    assert manifest.usage.repeated == repeated
    lost = 2 * EXPOSED * sum(bool(dead.works) for dead in deaths)
    assert manifest.usage.repeated <= manifest.repeated_at_most <= manifest.usage.repeated + lost
    assert harness.dispatcher.outcome(job.id) == manifest
    metrics, tier = harness.metrics, "standard"
    assert {status: metrics.rows()[tier, status] for status in ("succeeded", "failed")} == {
        "succeeded": manifest.counts.succeeded, "failed": manifest.counts.failed,
    }  # fmt: skip
    for kind in Usage.model_fields:
        counted = sum(tokens for (_, _, of_kind), tokens in metrics.tokens().items() if of_kind == kind)
        assert counted == getattr(manifest.usage, kind), kind
    assert metrics.ended() == {(tier, "completed"): 1}


def test_the_backlog_stays_short_and_in_the_planners_order(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [[n] for n in range(10)])
    harness.dispatcher.add(harness.ledger)
    for _ in range(5):
        harness.dispatcher.tick()
    assert [task.shard for task in harness.queue.tasks] == [1, 2]
    client = harness.client("w")
    taken = client.take(0)
    assert taken is not None
    harness.dispatcher.tick()
    assert [task.shard for task in harness.queue.tasks] == [2, 3], "a shard that is held makes room for the next"


def test_given_a_server_that_lost_its_data_then_queued_shards_are_put_again_once_heartbeats_are_stored(
    tmp_path: Path,
) -> None:
    world = simulated_world(tmp_path)
    harness = PipelineHarness(world, JobLedger(world.store), settings=DispatchSettings(settle_seconds=6.0))
    server = ResettableHeartbeats(world.clock)
    harness.heartbeats = server  # type: ignore[assignment]  # of the same port
    harness.dispatcher = Dispatcher(world, harness.queue, server, settings=harness.settings)
    client, work = taken(harness, [[0], [1], [2]], "w")
    harness.dispatcher.tick()
    world.clock.sleep(1.0)
    harness.queue.tasks.clear()
    server.forget()
    put_at = []
    for _ in range(20):
        client.send_heartbeat([work])
        harness.dispatcher.tick()
        put_at += [(world.clock.monotonic(), task.shard) for task in harness.queue.tasks]
        harness.queue.tasks.clear()
        world.clock.sleep(1.0)
    assert put_at == [(7.0, 2), (7.0, 3)], (
        "when the server has stored heartbeats for a while, without waiting for the retry time-out"
    )


def test_a_dead_workers_shards_are_queued_again_at_once(harness: PipelineHarness) -> None:
    dies, work = taken(harness, [[0]], "dies")
    dies.begin(work)
    harness.dispatcher.tick()
    assert harness.queue.tasks == []
    harness.world.clock.sleep(LIFETIME + 0.1)
    harness.dispatcher.tick()
    assert [task.shard for task in harness.queue.tasks] == [1]
    again = harness.client("next").take(0)
    assert again is not None
    assert again.attempt == 2


def test_a_worker_that_lives_keeps_its_shards_however_long_they_take(harness: PipelineHarness) -> None:
    client, work = taken(harness, [[0]], "slow")
    for _ in range(100):
        harness.world.clock.sleep(3.0)
        client.send_heartbeat([work])
        harness.dispatcher.tick()
    assert harness.queue.put_count == 1


def test_a_message_repeated_while_the_shard_is_held_or_done_is_dropped(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [[0]])
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    harness.queue.repeat(0)
    harness.queue.repeat(0)
    client = harness.client("w")
    work = client.take(0)
    assert work is not None
    harness.queue.tasks, later = harness.queue.tasks[:1], harness.queue.tasks[1:]
    assert client.take(0) is None, "held"
    assert client.commit(work, computed(work), report(work)) is True
    harness.queue.tasks = later
    assert client.take(0) is None, "done"


def test_urgent_jobs_go_first(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    wanted = {
        "bulk": order(tier=Tier.BULK),
        "late": order(tier=Tier.STANDARD, deadline=START + timedelta(hours=9)),
        "soon": order(tier=Tier.STANDARD, deadline=START + timedelta(hours=1)),
        "none": order(tier=Tier.STANDARD),
    }
    queue = ChaoticQueue()
    dispatcher = Dispatcher(world, queue, MemoryHeartbeats(world.clock, 10), settings=DispatchSettings(backlog=10))
    names = {}
    for name, one in wanted.items():
        ledger = JobLedger(world.store, f"jobs/{name}/")
        job = plan_by_hand(ledger, world, [[0], [1]], tier=one.tier, deadline=one.deadline)
        names[job.id] = name
        dispatcher.add(ledger)
    dispatcher.tick()
    assert [names[task.job] for task in queue.tasks] == [
        name for name in ("soon", "late", "none", "bulk") for _ in range(2)
    ]


def test_nothing_is_dispatched_before_its_segment_stands(harness: PipelineHarness) -> None:
    job = plan_by_hand(harness.ledger, harness.world, [[0]])
    store = harness.world.store
    before = store.read("plan/00000.json")
    for missing in ("plan/00000.json", part_key(0)):
        store.delete(missing)
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    progress = harness.dispatcher.progress(job.id)
    assert harness.queue.tasks == []
    assert progress is not None
    assert progress.status is JobStatus.VALIDATING
    store.create("plan/00000.json", before)
    harness.dispatcher.tick()
    assert len(harness.queue.tasks) == 1


def test_given_a_planner_that_died_before_part_0_then_it_is_made_from_what_stands_before_work_begins(
    harness: PipelineHarness,
) -> None:
    plan_by_hand(harness.ledger, harness.world, [[0]], rejected=[1, 2])
    before = harness.world.store.read(part_key(0))
    harness.world.store.delete(part_key(0))
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    assert harness.world.store.read(part_key(0)) == before
    assert len(harness.queue.tasks) == 1
    assert finish(harness, harness.client("w")).counts.failed == 2


def test_given_stored_refused_rows_that_were_damaged_then_they_become_no_part(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [[0]], rejected=[1])
    segment = harness.ledger.segment(0)
    assert segment is not None
    assert segment.rejects is not None
    objects = broken_store(harness).objects
    objects[segment.rejects.key] += b"x"
    del objects[part_key(0)]
    harness.dispatcher.add(harness.ledger)
    with pytest.raises(LedgerError, match="not those that were planned"):
        harness.dispatcher.tick()
    assert part_key(0) not in objects
    assert list(harness.world.scratch.iterdir()) == []


def test_a_job_of_refused_rows_only_ends_without_a_worker(harness: PipelineHarness) -> None:
    job = plan_by_hand(harness.ledger, harness.world, [], rejected=[0, 1])
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    manifest = harness.dispatcher.outcome(job.id)
    assert manifest is not None
    assert (manifest.counts.total, manifest.counts.failed, manifest.engine_seconds) == (2, 2, 0.0)
    assert manifest.tokens_per_second is None


def test_an_empty_job_ends_with_nothing(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [])
    harness.dispatcher.add(harness.ledger)
    assert finish(harness, harness.client("w")).counts.total == 0


def test_given_a_part_that_no_plan_has_then_it_is_refused(harness: PipelineHarness) -> None:
    commit_all(harness)
    objects = broken_store(harness).objects
    objects[part_key(77)] = objects[part_key(1)]
    dispatcher = Dispatcher(harness.world, harness.queue, harness.heartbeats)
    dispatcher.add(harness.ledger)
    with pytest.raises(PipelineError, match=r"part-00077.*no such part is planned"):
        dispatcher.tick()


def test_progress_is_cached_now_and_then_and_always_at_the_end(harness: PipelineHarness) -> None:
    commit_all(harness)
    assert isinstance(harness.world.clock, SimulatedClock)
    harness.dispatcher.tick()
    cached = harness.ledger.progress()
    assert cached is not None
    assert cached.status is JobStatus.COMPLETED
    assert (cached.counts.total, cached.counts.pending, cached.shards_done) == (6, 0, 2)


def test_events_are_emitted_once_and_in_order(harness: PipelineHarness) -> None:
    received: list[JobEvent] = []

    class Listener:
        def emit(self, event: JobEvent) -> None:
            received.append(event)

    harness.dispatcher = Dispatcher(harness.world, harness.queue, harness.heartbeats, Listener())
    plan_by_hand(harness.ledger, harness.world, [[0, 1], [2]], rejected=[3])
    harness.dispatcher.add(harness.ledger)
    finish(harness, harness.client("w"))
    assert [event.status for event in received if isinstance(event, JobChanged)] == [
        JobStatus.IN_PROGRESS, JobStatus.COMPLETED,
    ]  # fmt: skip
    shards = [event for event in received if isinstance(event, ShardCommitted)]
    assert [(event.shard, event.rows) for event in shards] == [(0, 1), (1, 2), (2, 1)]
    progress = [event for event in received if isinstance(event, ProgressMade)]
    assert [(event.counts.total, event.counts.pending) for event in progress] == [(4, 3), (4, 0)]
    assert len({event.id for event in received}) == len(received)


def test_given_a_job_that_is_cancelled_while_a_worker_holds_a_shard_then_each_status_is_emitted(
    harness: PipelineHarness,
) -> None:
    emitted: list[JobEvent] = []

    class Listener:
        def emit(self, event: JobEvent) -> None:
            emitted.append(event)

    harness.dispatcher = Dispatcher(harness.world, harness.queue, harness.heartbeats, Listener())
    plan_by_hand(harness.ledger, harness.world, [[0, 1]], rejected=[])
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    held = frozenset({(harness.ledger.job().id, 1)})
    harness.heartbeats.send_heartbeat(WorkerState("w", frozenset({PIN.key}), held))
    harness.ledger.create_closing(Closing(kind="cancel", at=harness.world.clock.now()))

    for _ in range(30):  # until the worker's time to release the shard is over
        if not harness.dispatcher.finished():
            harness.dispatcher.tick()
            harness.world.clock.sleep(1.0)

    assert [event.status for event in emitted if isinstance(event, JobChanged)] == [
        JobStatus.IN_PROGRESS, JobStatus.CANCELLING, JobStatus.CANCELLED,
    ]  # fmt: skip


@pytest.mark.parametrize(("workers", "waiting"), [(0, 2), (8, 2), (12, 3), (40, 9)])
def test_given_a_large_fleet_then_its_queue_holds_a_shard_for_each_four_workers(
    tmp_path: Path, workers: int, waiting: int
) -> None:
    world = simulated_world(tmp_path)
    harness = PipelineHarness(world, JobLedger(world.store))
    plan_by_hand(harness.ledger, world, [[row] for row in range(9)])
    harness.dispatcher.add(harness.ledger)
    for number in range(workers):
        harness.client(f"w{number}").send_heartbeat([])
    harness.dispatcher.tick()
    client = harness.client("taking")
    assert sum(client.take(0) is not None for _ in range(9)) == waiting
