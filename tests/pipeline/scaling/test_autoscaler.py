"""The autoscaler's observations of a root, its stored state, and the targets of its decisions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.ingest.intake import Intake, JobDraft
from pipeline.inputs.open import pin_uri
from pipeline.lane.memory import MemoryLane
from pipeline.ports import Heartbeats, PipelineError
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.scaling.autoscaler import SCALING_KEY, Autoscaler, PoolDecision
from pipeline.scaling.backlog import BacklogMetrics, BacklogReader
from pipeline.scaling.cloudwatch import CloudWatch
from pipeline.scaling.pool_observer import FirstTokens, observe, observe_root, pools_of
from schemas.jobs.job import Tier
from schemas.jobs.job_options import JobOptions
from schemas.settings.autoscaling import AutoscaleOptions, PoolOptions, ScalingLimits
from schemas.workers.lane import LaneRequest
from schemas.workers.metrics import HistogramSample, TierMetrics, WorkerMetrics
from tests.pipeline.scaling.test_backlog import MODEL, OTHER, ScalingHarness, cloudwatch, published  # noqa: F401
from tests.waiting import HANG_SECONDS

LIMITS = ScalingLimits(max_workers=9)
ONE_POOL = AutoscaleOptions(pools={"gpu": PoolOptions(models=("m", "other"), limits=LIMITS)})


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ScalingHarness]:
    made = ScalingHarness(tmp_path)
    yield made
    made.store.close()


class RecordingTarget:
    """A target that records the decisions."""

    def __init__(self) -> None:
        self.all: list[dict[str, PoolDecision]] = []

    def put(self, _metrics: BacklogMetrics, decisions: Sequence[PoolDecision]) -> None:
        self.all.append({one.pool: one for one in decisions})


def scaler(
    harness: ScalingHarness,
    options: AutoscaleOptions = AutoscaleOptions(),  # noqa: B008
    *targets: Any,
    **more: Any,
) -> Autoscaler:
    look = BacklogReader(harness.world, harness.heartbeats, assumed=100.0)
    return Autoscaler(harness.world, look, harness.heartbeats, options, targets, **more)


def metrics(ttft: tuple[int, ...] = (), waiting: int = 0, used: int = 0) -> WorkerMetrics:
    return WorkerMetrics(
        model="m", tiers={Tier.INTERACTIVE: TierMetrics(ttft=HistogramSample(counts=ttft))},
        kv_blocks=100, kv_blocks_used=used, lane_open=3, lane_waiting=waiting,
    )  # fmt: skip


def observed(harness: ScalingHarness, before: FirstTokens = FirstTokens()) -> tuple[Any, FirstTokens]:  # noqa: B008
    look = BacklogReader(harness.world, harness.heartbeats, assumed=100.0)
    seen = observe_root(look, harness.heartbeats, harness.world.clock.now())
    (pool,) = pools_of(ONE_POOL, {"m", "other"})
    return observe(pool, seen, before)


def test_given_an_open_job_then_what_is_left_of_it_is_demanded_at_the_measured_speed(harness: ScalingHarness) -> None:
    job = harness.submit("one", "m")
    tokens = job.input.size // 4
    assert observed(harness)[0].work == pytest.approx(tokens / 100)
    harness.send_heartbeat("w1", MODEL, 400.0)
    found, _ = observed(harness)
    assert (found.work, found.live) == (pytest.approx(tokens / 400), 1)
    (demand,) = found.demands
    assert demand.due is None
    assert 0 <= demand.waited < 60
    assert not demand.bulk


def test_given_a_job_of_two_models_of_a_pool_then_it_counts_once_at_the_slower_one(harness: ScalingHarness) -> None:
    job = harness.submit("both", "m", "other")
    harness.send_heartbeat("w1", MODEL, 400.0)
    harness.send_heartbeat("w2", OTHER, 200.0)
    found, _ = observed(harness)
    assert (found.work, found.live) == (pytest.approx(job.input.size // 4 / 200), 2)


def test_given_a_worker_that_ends_then_it_is_not_live(harness: ScalingHarness) -> None:
    harness.send_heartbeat("w1", MODEL, 400.0)
    (state,) = harness.heartbeats.workers()
    harness.heartbeats.send_heartbeat(replace(state, draining=True))
    assert observed(harness)[0].live == 0


def test_given_worker_metrics_then_callers_kv_and_late_first_tokens_are_observed(harness: ScalingHarness) -> None:
    harness.send_heartbeat("w1", MODEL, 400.0)
    harness.heartbeats.report_metrics("w1", metrics((100,), waiting=2, used=50))
    found, first = observed(harness)
    assert (found.ttft_p95, found.callers, found.callers_waiting, found.kv_used) == (None, 5, 2, 0.5)
    # 100 were there before; of the next 40 a tenth took up to 2 s (bucket 13), the others a millisecond.
    harness.heartbeats.report_metrics("w1", metrics((136, *[0] * 12, 4)))
    found, after = observed(harness, first)
    assert found.ttft_p95 == 2.0
    # Too few since: they count with those that follow.
    harness.heartbeats.report_metrics("w1", metrics((146, *[0] * 12, 4)))
    found, waiting = observed(harness, after)
    assert found.ttft_p95 is None
    assert waiting == after


def test_given_more_open_jobs_than_a_status_shows_then_the_oldest_ones_deadline_still_starts_workers(
    harness: ScalingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an old job of `other` behind more new ones of `m` than people are shown, over several pages."""
    old = harness.submit("old", "other")
    monkeypatch.setattr("pipeline.scaling.open_work.MAX_JOBS", 2)
    monkeypatch.setattr("pipeline.scaling.open_work.PAGE_JOBS", 2)
    for number in range(5):
        harness.submit(f"new-{number}", "m")
    target = RecordingTarget()
    scaler(harness, AutoscaleOptions(), target).decide_once()
    other = target.all[0]["other"]
    assert (other.desired, other.observed.work) == (1, pytest.approx(old.input.size // 4 / 100))
    assert len(target.all[0]["m"].observed.demands) == 5


def test_given_a_pool_of_none_when_a_caller_waits_on_the_lane_then_a_worker_is_started_and_stays(
    harness: ScalingHarness,
) -> None:
    lane = MemoryLane(harness.world.clock)
    lane.send(LaneRequest("r1", MODEL.key, {"messages": []}))
    look = BacklogReader(harness.world, harness.heartbeats, assumed=100.0, lane=lane)
    target = RecordingTarget()
    autoscaler = Autoscaler(harness.world, look, harness.heartbeats, AutoscaleOptions(), [target])
    autoscaler.decide_once()
    waked = target.all[0]["m"]
    assert (waked.desired, waked.observed.callers_waiting, waked.decision.reason) == (1, 1, "callers wait")
    assert target.all[0]["other"].desired == 0
    # The worker comes, and the request is its own: it counts once, and the worker stays.
    harness.send_heartbeat("w1", MODEL, None)
    harness.heartbeats.report_metrics("w1", metrics(waiting=1))
    autoscaler.decide_once()
    later = target.all[1]["m"]
    assert (later.desired, later.observed.callers_waiting, later.decision.retained) == (1, 1, 1)


def test_given_no_settings_then_each_model_is_a_pool_and_a_named_one_takes_its_models(harness: ScalingHarness) -> None:
    assert [pool.name for pool in pools_of(AutoscaleOptions(), {"m", "other"})] == ["m", "other"]
    assert [(pool.name, pool.limits.max_workers) for pool in pools_of(ONE_POOL, {"m", "other", "third"})] == [
        ("gpu", 9),
        ("third", 8),
    ]
    # Its first worker is being started, and has published nothing yet.
    assert pools_of(ONE_POOL, set()) == []


def test_given_a_decision_then_the_next_process_goes_on_from_it(harness: ScalingHarness) -> None:
    harness.submit("one", "m")
    target = RecordingTarget()
    scaler(harness, AutoscaleOptions(), target).decide_once()
    first = target.all[0]["m"]
    assert (first.desired, first.decision.before, first.observed.live) == (1, 0, 0)
    assert target.all[0]["other"].desired == 0
    # Another process, a moment later: the worker is awaited, not requested again.
    scaler(harness, AutoscaleOptions(), target).decide_once()
    second = target.all[1]["m"]
    assert (second.desired, second.decision.before) == (1, 1)
    assert second.decision.memory.changed == first.decision.memory.changed
    assert [start.count for start in second.decision.memory.starting] == [1]


def test_given_speeds_that_were_measured_then_they_outlive_workers_and_processes(harness: ScalingHarness) -> None:
    job = harness.submit("one", "m")
    harness.send_heartbeat("w1", MODEL, 500.0)
    scaler(harness).decide_once()
    harness.heartbeats.leave("w1")
    target = RecordingTarget()
    scaler(harness, AutoscaleOptions(), target).decide_once()
    assert target.all[0]["m"].observed.work == pytest.approx(job.input.size // 4 / 500)


def test_given_a_dry_run_then_nothing_is_written(harness: ScalingHarness) -> None:
    harness.submit("one", "m")
    dry = scaler(harness, keep=False)
    assert [one.desired for one in dry.decide_once()] == [1, 0]
    assert harness.store.info(SCALING_KEY) is None
    assert dry.decide_once()[0].decision.before == 1, "its own state stays in memory"


def test_given_a_damaged_state_then_it_is_ignored(harness: ScalingHarness) -> None:
    harness.store.replace(SCALING_KEY, b"{nonsense")
    harness.submit("one", "m")
    assert [one.desired for one in scaler(harness).decide_once()] == [1, 0]


def test_given_unavailable_heartbeats_then_nothing_is_decided(harness: ScalingHarness) -> None:
    class UnavailableHeartbeats(MemoryHeartbeats):
        def workers(self) -> Any:
            raise ServiceUnavailable("Redis: is away")

    target = RecordingTarget()
    unavailable: Heartbeats = UnavailableHeartbeats(harness.world.clock, 60.0)
    look = BacklogReader(harness.world, unavailable, assumed=100.0)
    with pytest.raises(PipelineError):
        Autoscaler(harness.world, look, unavailable, AutoscaleOptions(), [target]).decide_once()
    assert target.all == []
    assert harness.store.info(SCALING_KEY) is None


def test_given_a_target_that_fails_then_the_others_are_called_and_it_goes_on(harness: ScalingHarness) -> None:
    stop, target = threading.Event(), RecordingTarget()

    class FailingTarget:
        calls = 0

        def put(self, _metrics: BacklogMetrics, _decisions: Sequence[PoolDecision]) -> None:
            FailingTarget.calls += 1
            if FailingTarget.calls == 3:
                stop.set()
            raise ServiceUnavailable("CloudWatch: is away")

    again = scaler(harness, AutoscaleOptions(interval_seconds=0.01), FailingTarget(), target)
    thread = threading.Thread(target=again.run, args=(stop,))
    thread.start()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()
    assert len(target.all) == 3


def test_given_a_deadline_then_it_is_what_is_left_until_it(harness: ScalingHarness) -> None:
    source = harness.folder / "late.jsonl"
    harness.submit("late", "m")
    due = harness.world.clock.now() + timedelta(hours=2)
    draft = JobDraft(pin_uri(str(source)), JobOptions(model="m", deadline=due, tier=Tier.BULK), "default", "with")
    Intake(harness.world).accept(draft)
    demands = {demand.bulk: demand for demand in observed(harness)[0].demands}
    assert demands[True].due == pytest.approx(7_200, abs=30)
    assert demands[False].due is None


def test_given_decisions_when_published_then_cloudwatch_has_them_by_installation_and_pool(
    harness: ScalingHarness,
    cloudwatch: Any,  # noqa: F811
    unique_name: Callable[[], str],
) -> None:
    space = unique_name()
    harness.submit("one", "m")
    decisions = scaler(harness, ONE_POOL, CloudWatch(space, "here", "us-east-1")).decide_once()
    assert published(cloudwatch, space, "DesiredWorkers", Installation="here", Pool="gpu") == decisions[0].desired == 1
    per_worker = published(cloudwatch, space, "BacklogSecondsPerWorker", Installation="here", Pool="gpu")
    assert per_worker == pytest.approx(decisions[0].observed.work)
    assert published(cloudwatch, space, "BacklogSeconds", Installation="here", Model="m") == pytest.approx(per_worker)
    assert published(cloudwatch, space, "DesiredWorkers", Installation="elsewhere", Pool="gpu") is None
