"""Jobs that end before their time: each row still has exactly one result, and finished rows are retained."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.jobs.closing import close_shard
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import Clock
from pipeline.worker_client.ports import CheckpointWork, RevokedShards, ShardWork
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.job import Closing
from schemas.jobs.outcome import JobStatus
from tests.pipeline.made_jobs import EXPOSED, all_rows, computed, plan_by_hand, report
from tests.pipeline.simulated_harness import LIFETIME, PipelineHarness, broken_store, finish
from tests.pipeline.simulation import START, MemoryStore, simulated_world


def cancel(harness: PipelineHarness, kind: Any = "cancel") -> bool:
    return harness.ledger.create_closing(Closing(kind=kind, at=harness.world.clock.now()))


def begin(
    harness: PipelineHarness, shards: list[list[int]], rejected: list[int] | None = None, **changes: Any
) -> ShardClient:
    plan_by_hand(harness.ledger, harness.world, shards, rejected or [], **changes)
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    return harness.client("w")


def log(client: ShardClient, work: ShardWork, count: int, *, more: int = 0, final: bool = False) -> None:
    """A checkpoint of the shard's first `count` rows, and of `more` tokens of a row that goes on."""
    whole = computed(work)
    rows = FinishedRows(whole.rows[:count], whole.usages[:count])
    client.checkpoint(work, CheckpointWork(rows, (), 7 * count + more, EXPOSED, final))


def test_given_a_cancelled_job_when_a_shard_was_never_taken_then_its_rows_say_so(harness: PipelineHarness) -> None:
    begin(harness, [[1, 2], [3]], rejected=[0])
    assert cancel(harness)
    harness.world.clock.sleep(2.0)
    harness.dispatcher.tick()

    manifest = harness.ledger.manifest()
    assert manifest is not None
    assert manifest.status is harness.ledger.status() is JobStatus.CANCELLED
    assert (manifest.counts.total, manifest.counts.cancelled, manifest.counts.failed) == (4, 3, 1)
    rows = {row["row"]: row for row in all_rows(harness.ledger)}
    assert (rows[1]["status"], rows[1]["error_code"], rows[1]["status_code"]) == ("cancelled", "batch_cancelled", 409)
    assert rows[1]["error_message"].startswith("line 2 of the input: the job was cancelled")
    assert "\n" not in rows[1]["error_message"]
    assert rows[0]["error_code"] == "invalid_json"


def test_given_what_a_dead_worker_logged_when_cancelled_then_finished_rows_are_stored_and_tokens_add_up(
    harness: PipelineHarness,
) -> None:
    client = begin(harness, [[0, 1, 2, 3]])
    work = client.take(0)
    assert work is not None
    client.begin(work)
    log(client, work, 2, more=5)
    harness.world.clock.sleep(LIFETIME + 1)
    cancel(harness)
    harness.dispatcher.tick()

    manifest = harness.ledger.manifest()
    assert manifest is not None
    assert (manifest.counts.succeeded, manifest.counts.cancelled) == (2, 2)
    assert {row["row"] for row in all_rows(harness.ledger) if row["status"] == "succeeded"} == {2, 3}
    assert manifest.usage.completion == 14
    assert manifest.usage.repeated == 5, "tokens of a row that was not finished are in no answer"
    assert manifest.repeated_at_most == 5 + 2 * EXPOSED
    assert manifest.engine_seconds >= 0
    assert not [key for key in broken_store(harness).objects if key.startswith("work/") and not key.endswith(".json")]


def test_given_a_live_worker_when_cancelled_then_its_shard_is_revoked_and_the_rows_that_it_releases_count(
    harness: PipelineHarness,
) -> None:
    client = begin(harness, [[0, 1, 2], [3]])
    work = client.take(0)
    assert work is not None
    client.send_heartbeat([work])
    assert client.find_revoked([work]) == RevokedShards()
    cancel(harness)
    harness.world.clock.sleep(1.5)
    harness.dispatcher.tick()
    assert harness.ledger.manifest() is None, "its worker is given time"
    assert harness.ledger.has_part(2), "no worker holds this one"
    assert harness.ledger.status() is JobStatus.CANCELLING
    assert client.take(0) is None, "nothing is handed out any more"
    assert client.find_revoked([work]).to_release == {(work.job.id, work.shard)}

    log(client, work, 2, final=True)
    client.release(work, 14)
    harness.dispatcher.tick()

    manifest = harness.ledger.manifest()
    assert manifest is not None
    assert (manifest.counts.succeeded, manifest.counts.cancelled) == (2, 2)
    assert manifest.usage.repeated == manifest.repeated_at_most == 0


def test_given_a_worker_that_never_lets_go_when_cancelled_then_it_is_waited_for_only_so_long(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    harness = PipelineHarness(world, JobLedger(world.store), settings=DispatchSettings(grace_seconds=5.0))
    client = begin(harness, [[0, 1]])
    work = client.take(0)
    assert work is not None
    cancel(harness)
    while (manifest := harness.ledger.manifest()) is None:
        harness.world.clock.sleep(1.0)
        client.send_heartbeat([work])
        harness.dispatcher.tick()
    assert harness.world.clock.monotonic() == 6.0, "a second until it is noticed, and the grace"
    assert manifest.counts.cancelled == 2

    before = dict(broken_store(harness).objects)
    assert client.commit(work, computed(work), report(work)) is False, "the closer was first, and its part stands"
    assert all(broken_store(harness).objects[key] == body for key, body in before.items() if key.startswith("results/"))


class SlowStore(MemoryStore):
    """The same objects as another store, with writes that take a second."""

    def __init__(self, store: MemoryStore, clock: Clock) -> None:
        super().__init__()
        self.objects = store.objects
        self._clock = clock

    def create(self, key: str, data: bytes | Path) -> bool:
        self._clock.sleep(1.0)
        return super().create(key, data)


def test_given_a_large_cancelled_job_when_it_is_closed_then_others_are_served_between_its_parts(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    harness = PipelineHarness(world, JobLedger(world.store))
    begin(harness, [[n] for n in range(10)])
    cancel(harness)
    slow = replace(world, store=SlowStore(broken_store(harness), world.clock))
    dispatcher = Dispatcher(
        slow, harness.queue, harness.heartbeats, settings=DispatchSettings(closing_budget_seconds=2.5)
    )
    dispatcher.add(JobLedger(slow.store))
    took = []
    while harness.ledger.manifest() is None:
        begun = world.clock.monotonic()
        dispatcher.tick()
        took.append(world.clock.monotonic() - begun)
    assert len(took) == 4, "three parts in each tick, and the last with the job's end"
    assert max(took) <= 3.0, "no tick is for this job alone"
    assert [row["status"] for row in all_rows(harness.ledger)] == ["cancelled"] * 10


def test_given_all_parts_when_cancelled_too_late_then_the_job_is_completed(harness: PipelineHarness) -> None:
    client = begin(harness, [[0]])
    work = client.take(0)
    assert work is not None
    assert client.commit(work, computed(work), report(work))
    cancel(harness)
    harness.world.clock.sleep(2.0)
    harness.dispatcher.tick()
    manifest = harness.ledger.manifest()
    assert manifest is not None
    assert manifest.status is JobStatus.COMPLETED


def test_given_a_deadline_when_it_passes_then_the_rest_expires_and_what_stands_stays(harness: PipelineHarness) -> None:
    client = begin(harness, [[0, 1], [2, 3]], deadline=START + timedelta(hours=1))
    work = client.take(0)
    assert work is not None
    client.commit(work, computed(work), report(work))
    harness.world.clock.sleep(3590.0)
    harness.dispatcher.tick()
    assert harness.ledger.closing() is None
    harness.world.clock.sleep(11.0)
    harness.dispatcher.tick()

    closing, manifest = harness.ledger.closing(), harness.ledger.manifest()
    assert closing is not None
    assert (closing.kind, closing.at) == ("expire", START + timedelta(seconds=3601))
    assert manifest is not None
    assert manifest.status is JobStatus.EXPIRED
    assert (manifest.counts.succeeded, manifest.counts.expired) == (2, 2)
    assert {row["error_code"] for row in all_rows(harness.ledger)} == {None, "batch_expired"}


def test_given_a_deadline_when_all_was_done_in_time_then_nothing_expires(harness: PipelineHarness) -> None:
    client = begin(harness, [[0]], deadline=START + timedelta(hours=1))
    work = client.take(0)
    assert work is not None
    client.commit(work, computed(work), report(work))
    harness.world.clock.sleep(7200.0)
    harness.dispatcher.tick()
    manifest = harness.ledger.manifest()
    assert manifest is not None
    assert manifest.status is JobStatus.COMPLETED
    assert harness.ledger.closing() is None


def test_given_a_cancelled_job_when_its_deadline_passes_then_the_first_closing_counts(harness: PipelineHarness) -> None:
    begin(harness, [[0]], deadline=START + timedelta(seconds=5))
    assert cancel(harness)
    assert not cancel(harness, "expire")
    harness.world.clock.sleep(60.0)
    harness.dispatcher.tick()
    manifest = harness.ledger.manifest()
    assert manifest is not None
    assert manifest.status is JobStatus.CANCELLED


def test_given_a_job_that_is_still_being_planned_when_cancelled_then_it_ends_with_the_plan(
    harness: PipelineHarness,
) -> None:
    job = plan_by_hand(harness.ledger, harness.world, [[0], [1]])
    objects = broken_store(harness).objects
    segment = objects.pop("plan/00000.json")
    cancel(harness)
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    assert harness.ledger.manifest() is None
    progress = harness.dispatcher.progress(job.id)
    assert progress is not None
    assert progress.status is JobStatus.CANCELLING
    objects["plan/00000.json"] = segment
    harness.dispatcher.tick()
    assert harness.queue.put_count == 0
    manifest = harness.ledger.manifest()
    assert manifest is not None
    assert manifest.counts.cancelled == 2


def rest(work: ShardWork) -> FinishedRows:
    """The rows that remain to be computed of a shard that others began."""
    whole, done = computed(work), work.history.finished_rows
    left = [index for index, row in enumerate(whole.rows) if row.row not in done]
    return FinishedRows([whole.rows[index] for index in left], [whole.usages[index] for index in left])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["cancel", "expire"]))
def test_given_any_race_of_closing_and_commits_then_each_row_has_one_result_and_the_outcome_follows_from_the_parts(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kind: str
) -> None:
    chaos = random.Random(seed)
    world = simulated_world(tmp_path_factory.mktemp("scratch"), seed)
    harness = PipelineHarness(world, JobLedger(world.store))
    sizes = [chaos.randint(1, 4) for _ in range(chaos.randint(1, 6))]
    rows = list(range(sum(sizes)))
    shards = [[rows.pop(0) for _ in range(size)] for size in sizes]
    deadline = START + timedelta(seconds=chaos.uniform(1, 60)) if kind == "expire" else None
    begin(harness, shards, deadline=deadline)
    clients = [harness.client(f"w{number}") for number in range(2)]
    works: list[tuple[ShardClient, ShardWork]] = []
    closes_at, events = chaos.randrange(60), 0
    while not harness.dispatcher.finished():
        events += 1
        if kind == "cancel" and events >= closes_at:
            cancel(harness)
        act(harness, clients, works, chaos)

    manifest = harness.ledger.manifest()
    assert manifest is not None
    found = all_rows(harness.ledger)
    assert sorted(row["row"] for row in found) == list(range(sum(sizes)))
    by_status = Counter(row["status"] for row in found)
    assert manifest.counts.cancelled == by_status["cancelled"]
    assert manifest.counts.expired == by_status["expired"]
    closed = by_status["cancelled"] + by_status["expired"]
    ended = {"cancel": JobStatus.CANCELLED, "expire": JobStatus.EXPIRED}[kind]
    assert manifest.status is (ended if closed else JobStatus.COMPLETED)
    assert manifest.usage.completion == 7 * (len(found) - closed)
    stood = {info.key: world.store.read(info.key) for info in world.store.list("results/")}
    for client, work in works:  # who wakes up too late changes nothing
        client.commit(work, rest(work), report(work))
    assert {info.key: world.store.read(info.key) for info in world.store.list("results/")} == stood


def act(
    harness: PipelineHarness,
    clients: list[ShardClient],
    works: list[tuple[ShardClient, ShardWork]],
    chaos: random.Random,
) -> None:
    """One random event."""
    client = chaos.choice(clients)
    mine = [held for held in works if held[0] is client]
    event = chaos.choice(["tick", "take", "log", "commit", "release", "wait", "stall", "beat", "rival"])
    if event == "take" and (work := client.take(0)) is not None:
        works.append((client, work))
    elif event == "log" and mine:
        log(client, mine[0][1], chaos.randint(0, mine[0][1].table.num_rows), more=chaos.randint(0, 3))
    elif event == "commit" and mine:
        works.remove(mine[0])
        client.commit(mine[0][1], rest(mine[0][1]), report(mine[0][1]))
    elif event == "release" and mine:
        works.remove(mine[0])
        client.release(mine[0][1], 7)
    elif event == "beat":
        client.send_heartbeat([work for _, work in mine])
    elif event == "rival" and (closing := harness.ledger.closing()) is not None:
        segment = harness.ledger.segment(0)
        assert segment is not None
        shard = chaos.choice(segment.shards)
        close_shard(harness.ledger, harness.ledger.job(), segment, shard, closing, harness.world)
    elif event in ("wait", "stall"):
        harness.world.clock.sleep(2.0 if event == "wait" else LIFETIME + 1)
    if event in ("tick", "wait", "stall"):
        harness.dispatcher.tick()


def test_given_a_job_without_closing_when_it_ends_then_it_is_completed(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [[0, 4]], rejected=[1])
    harness.dispatcher.add(harness.ledger)
    assert finish(harness, harness.client("w")).status is JobStatus.COMPLETED
