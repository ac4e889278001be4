"""The manifest adds up what the parts say, and a job whose parts contradict its plan is never ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.jobs.manifest import BrokenInvariant
from pipeline.jobs.submit import submit
from pipeline.ledger.ledger import JobLedger, LedgerError, part_key, work_key
from pipeline.ledger.records import AttemptRecord, PartSummary, ShardReport
from pipeline.ports import ShardTask
from pipeline.results import part_builder
from pipeline.worker_client import shard_client
from pipeline.worker_client.ports import CheckpointWork
from schemas.jobs.checkpoints import FinishedRows
from tests.pipeline.made_jobs import EXPOSED, QUEUE, computed, order, plan_by_hand, report
from tests.pipeline.simulated_harness import LIFETIME, PipelineHarness, broken_store, commit_all, finish, taken
from tests.pipeline.simulation import MemoryStore, simulated_world


def test_the_manifest_has_times_rates_and_cost(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    harness = PipelineHarness(world, JobLedger(world.store), settings=DispatchSettings(price_per_hour=3.6))
    plan_by_hand(harness.ledger, world, [[0, 1], [2]])
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    client = harness.client("w")
    first = client.take(0)
    world.clock.sleep(2.0)
    second = client.take(0)
    assert first is not None
    assert second is not None
    world.clock.sleep(8.0)
    client.commit(first, computed(first), report(first, seconds=5))  # engine 0 to 5
    client.commit(second, computed(second), report(second, seconds=6))  # engine 2 to 8
    world.clock.sleep(100.0)
    manifest = finish(harness, client)
    assert manifest.wall_seconds == 10.0
    assert manifest.engine_seconds == 8.0, "shards overlap in the running batch; time is not counted twice"
    assert manifest.tokens_per_second == pytest.approx(21 / 8)
    assert manifest.total_tokens_per_second == pytest.approx((21 + 15) / 8)
    assert manifest.busy_seconds == 11.0, "5 of one shard and 6 of the other"
    assert (manifest.cost, manifest.price_per_hour) == (pytest.approx(0.011), pytest.approx(3.6))
    assert manifest.cost_per_million_tokens == pytest.approx(0.011 / (21 + 15) * 1e6)
    assert manifest.engine == {"block_size": 16}
    assert manifest.versions["torch"] == "2.13.0"
    assert [file.rows for file in manifest.files] == [0, 2, 1]
    assert manifest.usage.repeated == manifest.repeated_at_most == 0


def test_given_a_newer_workers_records_with_more_fields_when_an_older_dispatcher_reads_them_then_the_job_ends(
    harness: PipelineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an upgrade that begins with the workers."""

    class NewerAttempt(AttemptRecord):
        machine: str = "m1"

    class NewerSummary(PartSummary):
        joules: float = 9.5

    newer, work = taken(harness, [[0, 1], [2]], "newer")
    with monkeypatch.context() as patched:
        patched.setattr(shard_client, "AttemptRecord", NewerAttempt)
        patched.setattr(part_builder, "PartSummary", NewerSummary)
        newer.begin(work)
        assert newer.commit(work, computed(work), report(work))
    assert b"joules" in harness.ledger.store.read(part_key(1))
    assert b"machine" in harness.ledger.store.read(work_key(1, "attempt-0001.json"))
    manifest = finish(harness, harness.client("older"))
    assert (manifest.counts.total, manifest.counts.succeeded) == (3, 3)
    assert (manifest.usage.prompt, manifest.usage.completion) == (15, 21)


def test_the_time_between_two_runs_is_not_billed(harness: PipelineHarness) -> None:
    client, work = taken(harness, [[0], [1]], "w")
    harness.world.clock.sleep(7.0)
    client.commit(work, computed(work), report(work))
    harness.world.clock.sleep(86_400.0)
    submit(order(), harness.ledger, harness.world)
    assert finish(harness, harness.client("next day")).wall_seconds == pytest.approx(7.0, abs=2.0)


def test_an_attempt_that_died_without_a_word_is_bounded(harness: PipelineHarness) -> None:
    dies, work = taken(harness, [[0, 1]], "dies")
    dies.begin(work)
    harness.world.clock.sleep(LIFETIME + 1)
    manifest = finish(harness, harness.client("w"))
    assert (manifest.usage.repeated, manifest.repeated_at_most) == (0, 2 * EXPOSED)


def test_given_a_death_after_all_was_logged_when_the_next_attempt_has_nothing_to_compute_then_it_is_bounded_too(
    harness: PipelineHarness,
) -> None:
    dies, work = taken(harness, [[0, 1]], "dies")
    dies.begin(work)
    dies.checkpoint(work, CheckpointWork(computed(work), [], generated=14, exposed=9))
    harness.dispatcher.tick()
    harness.world.clock.sleep(LIFETIME + 1)
    harness.dispatcher.tick()
    client = harness.client("w")
    again = client.take(0)
    assert again is not None
    assert client.commit(again, FinishedRows([], []), ShardReport())
    manifest = finish(harness, client)
    assert (manifest.usage.completion, manifest.usage.repeated, manifest.repeated_at_most) == (14, 0, 2 * 9)


def test_given_an_attempt_that_goes_on_after_another_went_on_from_it_then_all_that_it_sampled_is_counted(
    harness: PipelineHarness,
) -> None:
    slow, work = taken(harness, [[0, 1]], "slow")
    nothing = FinishedRows([], [])
    slow.begin(work)
    slow.checkpoint(work, CheckpointWork(nothing, [], generated=10, exposed=10))
    harness.queue.put(QUEUE, ShardTask(work.job.id, work.shard))
    client = harness.client("w", isolated=True)
    again = client.take(0)
    assert again is not None
    client.begin(again)
    slow.checkpoint(work, CheckpointWork(nothing, [], generated=18, exposed=8))
    assert client.commit(again, computed(again), report(again))
    assert finish(harness, client).usage.repeated == 18


def test_given_an_attempt_that_lost_when_it_cleans_up_then_what_the_winner_never_saw_is_counted(
    harness: PipelineHarness,
) -> None:
    plan_by_hand(harness.ledger, harness.world, [[0, 1]])
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    first, winner, loser = (
        harness.client("dies"),
        harness.client("wins", isolated=True),
        harness.client("loses", isolated=True),
    )
    works = []
    for client in (first, winner):
        harness.queue.put(QUEUE, ShardTask(harness.ledger.job().id, 1))
        works.append(client.take(0))
    dead, won = works
    assert dead is not None
    assert won is not None
    first.begin(dead)
    first.checkpoint(dead, CheckpointWork(FinishedRows([], []), [], generated=10, exposed=10))
    harness.queue.put(QUEUE, ShardTask(harness.ledger.job().id, 1))
    lost = loser.take(0)
    assert lost is not None
    assert lost.history.logged == {dead.attempt_id: 10}
    for client, work in ((winner, won), (loser, lost)):
        client.begin(work)
        assert client.commit(work, computed(work), report(work)) is (work is won)
    assert finish(harness, winner).usage.repeated == 10 + 14


def test_given_a_part_of_another_shard_then_the_job_is_not_ended(harness: PipelineHarness) -> None:
    commit_all(harness)
    objects = broken_store(harness).objects
    objects[part_key(1)] = objects[part_key(2)]
    with pytest.raises(LedgerError, match="damaged or renamed"):
        harness.dispatcher.tick()
    assert harness.ledger.manifest() is None


def test_given_a_part_of_another_job_then_the_job_is_not_ended(harness: PipelineHarness, tmp_path: Path) -> None:
    commit_all(harness)
    other = PipelineHarness(simulated_world(tmp_path, seed=9), JobLedger(MemoryStore()))
    other.ledger = JobLedger(other.world.store)
    commit_all(other)
    broken_store(harness).objects[part_key(1)] = broken_store(other).objects[part_key(1)]
    with pytest.raises(BrokenInvariant, match="belongs to job"):
        harness.dispatcher.tick()
    assert harness.ledger.manifest() is None


def test_given_a_plan_that_promises_more_rows_then_the_job_is_not_ended(harness: PipelineHarness) -> None:
    commit_all(harness)
    objects = broken_store(harness).objects
    text = objects["plan/00000.json"].decode()
    objects["plan/00000.json"] = (
        text.replace('"rejected": 1', '"rejected": 2')
        .replace('"rows": 1', '"rows": 2')
        .replace('"end_row": 6', '"end_row": 7')
        .encode()
    )
    dispatcher = Dispatcher(harness.world, harness.queue, harness.heartbeats)
    dispatcher.add(harness.ledger)
    with pytest.raises(BrokenInvariant, match="holds 1 results for 2 rows"):
        dispatcher.tick()
    assert harness.ledger.manifest() is None
