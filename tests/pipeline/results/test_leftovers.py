"""Attempts' objects under work/ are deleted when the job has ended, even after slow or crashed attempts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.dispatcher.dispatcher import Dispatcher
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import submit
from pipeline.ledger.active_index import mark
from pipeline.ledger.ledger import JobLedger
from pipeline.planner import InvalidInput
from pipeline.worker_client.ports import CheckpointWork, ShardWork
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.job import JobSettings
from schemas.jobs.outcome import JobStatus
from tests.pipeline.made_jobs import computed, order, report
from tests.pipeline.simulated_harness import PipelineHarness, broken_store, finish, taken
from tests.pipeline.simulation import simulated_world


def left(harness: PipelineHarness) -> list[str]:
    """The attempts' objects, by name."""
    return [info.key.rsplit("/", 1)[-1] for info in harness.ledger.store.list("work/0")]


def log(client: ShardClient, work: ShardWork) -> None:
    client.checkpoint(work, CheckpointWork(FinishedRows([], []), [], generated=10, exposed=5))


def outlived(harness: PipelineHarness) -> tuple[ShardClient, ShardWork]:
    """An attempt that was slower than another, which ended the job."""
    slow, work = taken(harness, [[0, 1], [2]], "slow")
    slow.begin(work)
    log(slow, work)
    harness.world.clock.sleep(11.0)
    manifest = finish(harness, harness.client("w"))
    assert manifest.repeated_at_most >= manifest.usage.repeated == 10
    assert left(harness) == []
    assert len(harness.ledger.runs()) == 1, "the records of its runs stay"
    return slow, work


def test_given_a_slow_attempt_that_logs_after_the_end_when_it_gives_up_then_it_removes_what_it_wrote(
    harness: PipelineHarness,
) -> None:
    slow, work = outlived(harness)
    log(slow, work)
    slow.record(work, [0])
    assert len(left(harness)) == 2
    slow.release(work, 30)
    assert left(harness) == []


def test_given_a_slow_attempt_when_its_commit_comes_after_the_end_then_it_leaves_nothing(
    harness: PipelineHarness,
) -> None:
    slow, work = outlived(harness)
    before = dict(broken_store(harness).objects)
    assert slow.commit(work, computed(work), report(work)) is False
    assert broken_store(harness).objects == before


def test_given_a_slow_attempt_that_logs_after_the_end_and_dies_when_the_order_comes_again_then_nothing_is_left(
    harness: PipelineHarness,
) -> None:
    slow, work = outlived(harness)
    manifest = harness.ledger.manifest()
    log(slow, work)
    assert len(left(harness)) == 1
    assert not submit(order(), harness.ledger, harness.world).created
    assert left(harness) == []
    log(slow, work)
    again = Dispatcher(harness.world, harness.queue, harness.heartbeats)
    again.add(harness.ledger)
    assert again.finished()
    assert left(harness) == []
    assert harness.ledger.manifest() == manifest


def test_given_work_that_is_still_needed_when_another_attempt_gives_up_then_it_stays(harness: PipelineHarness) -> None:
    client, work = taken(harness, [[0, 1]], "w")
    client.begin(work)
    log(client, work)
    client.release(work, 12)
    assert len(left(harness)) == 3, "the attempt, its checkpoint, and that it ended"
    submit(order(), harness.ledger, harness.world)
    assert len(left(harness)) == 3
    assert finish(harness, harness.client("next")).usage.repeated == 12


def test_given_a_job_in_a_root_that_is_refused_as_a_whole_then_its_marker_goes(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"custom_id": "a"}) + "\n")
    world = simulated_world(tmp_path)
    ledger = JobLedger(world.store, "jobs/job-1/")
    wanted = order(input=pin_input(source), settings=JobSettings(on_invalid="job"))
    job = submit(wanted, ledger, world, job_id="job-1").job
    assert mark(ledger) is False, "it is marked"
    with pytest.raises(InvalidInput):
        plan_job(ledger, job, world)
    assert ledger.status() is JobStatus.FAILED
    assert mark(ledger) is True, "it was not any more"
