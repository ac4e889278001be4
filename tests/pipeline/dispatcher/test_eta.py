"""Forecasts of when open jobs end; a job that would be late is refused before it is planned."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import WorkerState, World, queue_name
from pipeline.worker_client.ports import WorkerLoad
from schemas.jobs.job import Closing, Tier
from schemas.jobs.progress import Progress
from tests.pipeline.made_jobs import PIN, computed, plan_by_hand, report
from tests.pipeline.simulated_harness import LIFETIME, PipelineHarness
from tests.pipeline.simulation import ChaoticQueue, MemoryStore, simulated_world

ROW = 12  # tokens of a row that was planned by hand


AT_ONCE = DispatchSettings(eta_interval_seconds=0.0)
"""A forecast that moved is written with the next look."""


def cached(ledger: JobLedger) -> Progress:
    progress = ledger.progress()
    assert progress is not None
    return progress


def forecast_seconds(dispatcher: Dispatcher, world: World, *ledgers: JobLedger) -> list[float | None]:
    """The forecasts of all jobs that a poll makes, in seconds from now."""
    now = world.clock.now()
    dispatcher.tick()
    world.clock.sleep(2.5)
    dispatcher.tick()
    etas = [cached(ledger).eta for ledger in ledgers]
    return [None if eta is None else (eta - now).total_seconds() for eta in etas]


@pytest.fixture
def harness(tmp_path: Path) -> PipelineHarness:
    world = simulated_world(tmp_path)
    return PipelineHarness(world, JobLedger(world.store), settings=AT_ONCE)


def test_the_forecast_follows_remaining_tokens_and_throughput(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [list(range(10)), list(range(10, 20))])
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    assert cached(harness.ledger).eta is None, "no worker has measured anything"

    client = harness.client("w")
    first = client.take(0)
    assert first is not None
    client.begin(first)
    client.send_heartbeat([first], WorkerLoad(tokens_per_second=6.0))
    harness.world.clock.sleep(3.0)
    assert forecast_seconds(harness.dispatcher, harness.world, harness.ledger) == [pytest.approx(20 * ROW / 6.0)]

    client.send_heartbeat([first], WorkerLoad(6.0, {(first.job.id, first.shard): 0.25}))
    harness.world.clock.sleep(3.0)
    assert forecast_seconds(harness.dispatcher, harness.world, harness.ledger) == [
        pytest.approx((2.5 + 10) * ROW / 6.0)
    ]

    client.commit(first, computed(first), report(first))
    client.send_heartbeat([], WorkerLoad(12.0))
    harness.world.clock.sleep(3.0)
    assert forecast_seconds(harness.dispatcher, harness.world, harness.ledger) == [pytest.approx(10 * ROW / 12.0)]

    harness.world.clock.sleep(LIFETIME + 1)  # no worker is left
    assert forecast_seconds(harness.dispatcher, harness.world, harness.ledger) == [None]


def test_a_job_that_is_being_closed_has_no_forecast_and_delays_no_other(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    beats = MemoryHeartbeats(world.clock, LIFETIME)
    dispatcher = Dispatcher(world, ChaoticQueue(), beats, settings=AT_ONCE)
    ledgers = [JobLedger(world.store, f"jobs/{name}/") for name in ("first", "second")]
    for number, ledger in enumerate(ledgers):
        plan_by_hand(ledger, world, [list(range(10))], metadata={"number": str(number)})
        dispatcher.add(ledger)
        world.clock.sleep(1.0)
    beats.send_heartbeat(WorkerState("w", frozenset({PIN.key}), tokens_per_second=1.0))
    assert forecast_seconds(dispatcher, world, *ledgers) == [10 * ROW, 20 * ROW]
    beats.send_heartbeat(
        WorkerState("w", frozenset({PIN.key}), frozenset({(ledgers[0].job().id, 1)}), tokens_per_second=1.0)
    )
    ledgers[0].create_closing(Closing(kind="cancel", at=world.clock.now()))
    world.clock.sleep(3.0)
    assert forecast_seconds(dispatcher, world, *ledgers) == [None, 10 * ROW]


def test_a_job_of_an_adapter_waits_for_those_of_its_model_and_other_adapters(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    beats = MemoryHeartbeats(world.clock, LIFETIME)
    dispatcher = Dispatcher(world, ChaoticQueue(), beats, settings=AT_ONCE)
    pins = PIN, PIN.with_adapter(PIN.name, "a", "a"), PIN.with_adapter(PIN.name, "b", "b")
    ledgers = [JobLedger(world.store, f"jobs/{number}/") for number in range(3)]
    for ledger, pin in zip(ledgers, pins, strict=True):
        plan_by_hand(ledger, world, [list(range(10))], models=(pin,))
        dispatcher.add(ledger)
        world.clock.sleep(1.0)
    beats.send_heartbeat(WorkerState("w", frozenset(pin.key for pin in pins), tokens_per_second=1.0))
    assert forecast_seconds(dispatcher, world, *ledgers) == [10 * ROW, 20 * ROW, 30 * ROW]


def test_a_forecast_that_holds_is_not_written_again_and_again(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [list(range(100))])
    harness.dispatcher.add(harness.ledger)
    harness.heartbeats.send_heartbeat(WorkerState("w", frozenset({PIN.key}), tokens_per_second=1.0))
    store = harness.world.store
    assert isinstance(store, MemoryStore)
    writes: list[str] = []
    replace: Callable[[str, bytes], None] = store.replace

    def counted(key: str, data: bytes) -> None:
        writes.append(key)
        replace(key, data)

    store.replace = counted  # type: ignore[method-assign]
    for _ in range(5):
        harness.dispatcher.tick()
        harness.world.clock.sleep(2.5)
        harness.heartbeats.send_heartbeat(WorkerState("w", frozenset({PIN.key}), tokens_per_second=1.0))
    assert len(writes) == 2, "when it began, and when the first forecast was there"


def test_forecasts_that_all_move_at_once_are_not_all_written_at_once(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    harness = PipelineHarness(world, JobLedger(world.store))
    plan_by_hand(harness.ledger, world, [list(range(100))])
    harness.dispatcher.add(harness.ledger)
    etas = []
    for speed in range(1, 9):
        harness.heartbeats.send_heartbeat(WorkerState("w", frozenset({PIN.key}), tokens_per_second=float(speed)))
        harness.dispatcher.tick()
        world.clock.sleep(2.5)
        etas.append(cached(harness.ledger).eta)
    assert len(set(etas[1:])) == 2, "every ten seconds"


def test_the_forecast_of_a_new_job_depends_on_its_tier_and_tenant(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    beats = MemoryHeartbeats(world.clock, LIFETIME)
    dispatcher = Dispatcher(world, ChaoticQueue(), beats, settings=DispatchSettings(weights={"heavy": 3.0}))
    ledger = JobLedger(world.store, "jobs/open/")
    job = plan_by_hand(ledger, world, [list(range(100))], tier=Tier.BULK)
    dispatcher.add(ledger)
    beats.send_heartbeat(WorkerState("w", frozenset({PIN.key}), tokens_per_second=100.0))
    dispatcher.tick()
    dispatcher.tick()

    def seconds(**changes: object) -> float | None:
        new = job.model_copy(update={"id": "new", "created_at": world.clock.now() + timedelta(seconds=1), **changes})
        end = dispatcher.forecast_end(new, {PIN.key: 300})
        return None if end is None else (end - world.clock.now()).total_seconds()

    assert seconds(tier=Tier.STANDARD) == pytest.approx(300 / 95)
    assert seconds(tier=Tier.BULK) == pytest.approx((100 * ROW + 300) / 100)
    assert seconds(tier=Tier.BULK, tenant="other") == pytest.approx(300 / 50)
    assert seconds(tier=Tier.BULK, tenant="heavy") == pytest.approx(300 / 75)
    assert dispatcher.forecast_end(job.model_copy(update={"id": "new"}), {"other model": 300}) is None


@pytest.mark.parametrize(("seconds", "first"), [(300.0, ["late"] * 4), (50_000.0, ["late", "other"] * 2)])
def test_given_a_deadline_at_risk_then_its_job_goes_before_its_tenants_turn(
    tmp_path: Path, seconds: float, first: list[str]
) -> None:
    world, queue = simulated_world(tmp_path), MemoryQueue()
    beats = MemoryHeartbeats(world.clock, LIFETIME)
    dispatcher = Dispatcher(world, queue, beats, settings=DispatchSettings(backlog=1))
    for name in ("late", "other"):
        ledger = JobLedger(world.store, f"jobs/{name}/")
        due = world.clock.now() + timedelta(seconds=seconds) if name == "late" else None
        plan_by_hand(ledger, world, [[row] for row in range(9)], tenant=name, deadline=due)
        dispatcher.add(ledger)
    beats.send_heartbeat(WorkerState("w", frozenset({PIN.key}), tokens_per_second=1.0))
    dispatcher._forecaster.refresh(
        (), beats.workers(), world.clock.now()
    )  # the speed is known when the first shard goes
    went = []
    while len(went) < 4:
        dispatcher.tick()
        while (task := queue.take([queue_name(PIN.key, Tier.STANDARD)], 0.0)) is not None:
            went.append(task.job)
            beats.send_heartbeat(WorkerState("w", frozenset({PIN.key}), frozenset({(task.job, task.shard)}), 0, 1.0))
    assert went == first


@pytest.mark.parametrize(("seconds", "then"), [(60.0, "saved"), (140.0, "nearer")])
def test_given_up_deadlines_go_after_jobs_that_can_be_in_time(tmp_path: Path, seconds: float, then: str) -> None:
    # Nine rows of twelve tokens each, at a token a second: 108 s.
    world, queue = simulated_world(tmp_path), MemoryQueue()
    beats = MemoryHeartbeats(world.clock, LIFETIME)
    dispatcher = Dispatcher(world, queue, beats, settings=DispatchSettings(backlog=1))
    for name, left in (("nearer", seconds), ("saved", 400.0)):
        ledger = JobLedger(world.store, f"jobs/{name}/")
        due = world.clock.now() + timedelta(seconds=left)
        plan_by_hand(ledger, world, [[row] for row in range(9)], tenant=name, deadline=due)
        dispatcher.add(ledger)
    beats.send_heartbeat(WorkerState("w", frozenset({PIN.key}), tokens_per_second=1.0))
    went: list[tuple[str, int]] = []
    while len(went) < 5:
        dispatcher.tick()  # the first puts a shard before anything is known of the speed
        while (task := queue.take([queue_name(PIN.key, Tier.STANDARD)], 0.0)) is not None:
            went.append((task.job, task.shard))
            beats.send_heartbeat(WorkerState("w", frozenset({PIN.key}), frozenset(went), 0, 1.0))
    assert [job for job, _ in went[1:]] == [then] * 4
