"""A dispatcher's metrics of its jobs: each row is counted only by the dispatcher that saw its commit."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from pipeline.dispatcher.dispatch_counts import DispatchMetrics
from pipeline.dispatcher.dispatcher import DispatchSettings
from pipeline.ledger.ledger import JobLedger
from schemas.jobs.job import Closing, Tier
from schemas.models import ModelPin
from tests.pipeline.made_jobs import MODEL, computed, order, plan_by_hand, report
from tests.pipeline.simulated_harness import PipelineHarness, finish
from tests.pipeline.simulation import simulated_world

TIER = "standard"


@pytest.fixture
def harness(tmp_path: Path) -> PipelineHarness:
    world = simulated_world(tmp_path)
    return PipelineHarness(
        world, JobLedger(world.store), settings=DispatchSettings(cache_interval_seconds=0.0, backlog=2)
    )


def work(harness: PipelineHarness, shards: int, name: str = "w") -> None:
    """A worker commits so many shards."""
    client = harness.client(name)
    for _ in range(shards):
        harness.dispatcher.tick()
        taken = client.take(0)
        assert taken is not None
        client.begin(taken)
        client.commit(taken, computed(taken), report(taken))
        harness.dispatcher.tick()
    harness.dispatcher.tick()


def test_a_dispatcher_that_takes_over_counts_only_new_parts(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [[n, n + 1] for n in range(0, 12, 2)], rejected=[12, 13, 14])
    harness.dispatcher.add(harness.ledger)
    work(harness, 2)
    before = harness.metrics.rows()
    assert before[TIER, "succeeded"] + before[TIER, "failed"] == 3 + 4
    harness.world.clock.sleep(60.0)
    other = PipelineHarness(harness.world, harness.ledger, harness.queue, harness.settings)
    other.dispatcher.add(harness.ledger)
    manifest = finish(other, other.client("next"))
    after = other.metrics.rows()
    assert after[TIER, "succeeded"] + after[TIER, "failed"] == 8
    for status in ("succeeded", "failed"):
        assert before[TIER, status] + after[TIER, status] == getattr(manifest.counts, status)
    counted = [sum(n for (_, _, kind), n in metrics.tokens().items() if kind == "completion")
            for metrics in (harness.metrics, other.metrics)]  # fmt: skip
    assert sum(counted) == manifest.usage.completion
    assert (harness.metrics.ended(), other.metrics.ended()) == ({}, {(TIER, "completed"): 1})


def test_shard_states_add_up_to_the_shards_without_a_part(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [[n] for n in range(9)])
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    client = harness.client("w")
    assert client.take(0) is not None
    harness.dispatcher.tick()
    standing = harness.metrics.snapshot
    assert standing is not None
    assert standing.shards == {(TIER, "held"): 1, (TIER, "queued"): 2, (TIER, "waiting"): 6}
    assert standing.jobs == {(TIER, "in_progress"): 1}
    assert standing.backlog == {(MODEL, TIER): 9 * 12}
    assert standing.oldest == {TIER: harness.ledger.job().created_at}


def test_a_job_without_waiting_shards_is_not_reported_as_waiting(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [[0]])
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    client = harness.client("w")
    assert client.take(0) is not None
    harness.dispatcher.tick()
    standing = harness.metrics.snapshot
    assert standing is not None
    assert (standing.oldest, standing.shards[TIER, "held"]) == ({}, 1)


def test_a_dispatcher_that_does_not_lead_has_no_snapshot(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [[0]])
    harness.dispatcher.add(harness.ledger)
    work(harness, 1)
    rows = harness.metrics.rows()
    harness.dispatcher.stand_by()
    assert harness.metrics.snapshot is None
    assert harness.metrics.rows() == rows, "what it has counted stays"


def test_closed_rows_are_counted_by_their_status(harness: PipelineHarness) -> None:
    job = plan_by_hand(harness.ledger, harness.world, [[0, 1], [2, 3, 4]])
    harness.dispatcher.add(harness.ledger)
    work(harness, 1)
    harness.ledger.create_closing(Closing(kind="cancel", at=job.created_at))
    harness.world.clock.sleep(60.0)
    harness.dispatcher.tick()
    assert harness.dispatcher.finished()
    assert harness.metrics.rows()[TIER, "cancelled"] == 3
    assert harness.metrics.ended() == {(TIER, "cancelled"): 1}


def test_cost_comes_from_manifests_and_duration_from_the_creation_time(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    settings, metrics = DispatchSettings(price_per_hour=36.0), DispatchMetrics()
    harness = PipelineHarness(world, JobLedger(world.store), settings=settings, metrics=metrics)
    plan_by_hand(harness.ledger, world, [[0], [1]], tier=Tier.BULK)
    harness.dispatcher.add(harness.ledger)
    world.clock.sleep(100.0)
    manifest = finish(harness, harness.client("w"))
    assert manifest.cost is not None
    assert harness.metrics.cost() == {("tiny", "bulk"): pytest.approx(manifest.cost)}
    assert manifest.cost > 0
    took = harness.metrics.job_durations["bulk"].read()
    assert (sum(took.counts), took.seconds) == (1, pytest.approx(world.clock.monotonic(), abs=2.0))


def test_a_model_name_that_only_a_user_gave_is_reported_as_other(harness: PipelineHarness) -> None:
    pins = (ModelPin(name="served", source="/models/served", digest="sha256:2", dtype="float32"),)
    job = plan_by_hand(harness.ledger, harness.world, [[0]], models=pins)  # its rows name a model that no worker serves
    assert job.models == pins
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    standing = harness.metrics.snapshot
    assert standing is not None
    assert set(standing.backlog) == {("other", TIER)}


def test_an_unplanned_job_reports_a_backlog_estimated_from_its_input(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    harness = PipelineHarness(world, JobLedger(world.store), settings=DispatchSettings(cache_interval_seconds=0.0))
    plan_by_hand(harness.ledger, world, [[0]])
    world.store.delete("plan/00000.json")
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    world.clock.sleep(timedelta(hours=1).total_seconds())
    standing = harness.metrics.snapshot
    assert standing is not None
    assert standing.jobs == {(TIER, "validating"): 1}
    assert standing.backlog == {(MODEL, TIER): order().input.size // 4}
    assert TIER in standing.oldest
