"""Scheduled collections: in time, by one of several processes, and stopped in time at shutdown."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

from pipeline.jobs.submit import submit
from pipeline.ledger.active_index import delete_markers
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.maintenance.retention import RetentionSettings
from pipeline.maintenance.scheduler import RetentionScheduler, RetentionSchedulerSettings
from pipeline.ports import StoreError, World
from pipeline.runtime.availability import ServiceUnavailable
from tests.pipeline.dying_store import WatchedStore
from tests.pipeline.made_jobs import end_job, order

DAY = 86_400.0
RETENTION = RetentionSettings(outputs=timedelta(days=7))


def ended(world: World, name: str = "job-1") -> JobLedger:
    ledger = JobLedger(world.store, f"{JOBS}{name}/")
    submit(order(), ledger, world, job_id=name)
    ledger.create("results/part-00000.parquet", b"rows")
    end_job(ledger, world.clock.now())
    delete_markers(ledger)
    return ledger


class SharedLease:
    """A lease as on a server: taken when it is free, and free again when it expires."""

    def __init__(self, world: World, lifetime: float) -> None:
        self._clock = world.clock
        self._lifetime = lifetime
        self.holder, self.until, self.away = "", 0.0, False

    def of(self, name: str) -> Contender:
        return Contender(self, name)

    def renew(self, name: str) -> bool:
        if self.away:
            raise ServiceUnavailable("redis: not there")
        now = self._clock.monotonic()
        if self.holder in ("", name) or now >= self.until:
            self.holder, self.until = name, now + self._lifetime
        return self.holder == name


class Contender:
    """One contender's side of the lease."""

    def __init__(self, shared: SharedLease, name: str) -> None:
        self._shared = shared
        self._name = name

    def renew(self) -> bool:
        return self._shared.renew(self._name)

    def release(self) -> None:
        raise AssertionError("the next holder would collect at once")


def test_given_results_that_get_old_when_time_goes_by_then_they_are_collected_some_day(world: World) -> None:
    ledger, stop = ended(world), threading.Event()
    scheduler = RetentionScheduler(world, RETENTION)
    assert not scheduler.poll(stop), "not at the very start"
    days = list[float]()
    while ledger.tombstone() is None:
        world.clock.sleep(60.0)
        if scheduler.poll(stop):
            days.append(world.clock.monotonic() / DAY)
    assert len(days) == 8, "once a day"
    assert 7.0 <= days[-1] < 7.1


def test_given_two_that_could_when_time_goes_by_then_one_collects_and_the_other_follows_when_it_is_gone(
    world: World,
) -> None:
    shared, stop = SharedLease(world, DAY), threading.Event()
    schedulers = {name: RetentionScheduler(world, RETENTION, lease=shared.of(name)) for name in ("a", "b")}
    done = list[str]()

    def go(days: float) -> None:
        until = world.clock.monotonic() + days * DAY
        while world.clock.monotonic() < until:
            world.clock.sleep(60.0)
            done.extend(name for name, scheduler in schedulers.items() if scheduler.poll(stop))

    go(2.1)
    assert len(done) == 3
    del schedulers[done[-1]]
    schedulers["c"] = RetentionScheduler(
        world, RETENTION, lease=shared.of("c")
    )  # started again, at once: that is no reason to
    go(0.8)
    assert len(done) == 3
    go(0.2)
    assert len(done) == 4


def test_given_a_failure_when_it_is_over_then_it_is_retried_the_same_day_and_not_all_the_time(world: World) -> None:
    ledger, stop, tries = ended(world), threading.Event(), 0
    failing = True

    def fails(nth: int) -> None:
        nonlocal tries
        tries += nth == 1
        if failing:
            raise StoreError("s3://bucket: not there")

    def go(hours: int) -> bool:
        done = False
        for _ in range(hours * 60):
            world.clock.sleep(60.0)
            store.calls.clear()
            done |= scheduler.poll(stop)
        return done

    shared = SharedLease(world, DAY)
    store = WatchedStore(world.store, fails)
    there = replace(world, store=store)
    scheduler = RetentionScheduler(there, RetentionSettings(outputs=timedelta(0)), lease=shared.of("a"))
    shared.away = True
    assert not go(2), "without the lease's server another may be collecting"
    assert tries == 0
    shared.away = False
    assert not go(7)
    assert tries == 3
    failing = False
    assert go(3)
    assert ledger.tombstone() is not None


def test_given_a_running_collection_when_stopped_then_it_ends_soon_and_the_next_resumes(world: World) -> None:
    ledgers = [ended(world, f"job-{number}") for number in range(5)]
    stop = threading.Event()
    chosen = RetentionSettings(outputs=timedelta(0))

    def stops(nth: int) -> None:
        if any(ledger.tombstone() is not None for ledger in ledgers):
            stop.set()

    there = replace(world, store=WatchedStore(world.store, stops))
    scheduler = RetentionScheduler(there, chosen, RetentionSchedulerSettings(interval_seconds=0.0))
    scheduler.poll(stop)
    assert sum(ledger.tombstone() is not None for ledger in ledgers) == 1
    scheduler.run(stop)
    assert sum(ledger.tombstone() is not None for ledger in ledgers) == 1, "it was stopped"
    stop.clear()
    RetentionScheduler(world, chosen, RetentionSchedulerSettings(interval_seconds=0.0)).poll(stop)
    assert all(ledger.tombstone() is not None for ledger in ledgers)
