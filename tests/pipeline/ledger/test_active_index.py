"""Markers of open jobs: after any crash or race, an open job in a root has a marker, and an ended one loses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.dispatcher.dispatcher import Dispatcher
from pipeline.jobs.submit import submit
from pipeline.jobs.summaries import list_jobs
from pipeline.ledger.active_index import SweepResult, delete_markers, mark, open_jobs, sweep
from pipeline.ledger.ledger import JOB, MANIFEST, JobLedger
from pipeline.ledger.records import AttemptRecord
from pipeline.ports import ObjectStore, World
from pipeline.results.shard_history import checkpoint_key
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.checkpoints import CheckpointHead, FinishedRows, encode
from tests.pipeline.dying_store import Killed, WatchedStore, dies_at, lets_in
from tests.pipeline.made_jobs import MODELS, computed, order, plan_by_hand, report
from tests.pipeline.simulation import START, MemoryStore, SeededRandomness, SimulatedClock

MakeWorld = Callable[[], World]
MARKER = "active/job-1"


@pytest.fixture(params=["memory", pytest.param("folder", marks=pytest.mark.exhaustive)])
def make_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeWorld]:
    """Worlds with empty stores."""
    folders = list[FolderStore]()

    def make() -> World:
        if request.param == "memory":
            return World(MemoryStore(), SimulatedClock(), SeededRandomness(), tmp_path)
        folders.append(FolderStore(tmp_path / str(len(folders))))
        return World(folders[-1], SimulatedClock(), SeededRandomness(), folders[-1].scratch)

    yield make
    for folder in folders:
        folder.close()


def job_in(store: ObjectStore, name: str = "job-1") -> JobLedger:
    return JobLedger(store, f"jobs/{name}/")


def check(store: ObjectStore) -> None:
    """Check the invariants, which hold at any moment and after any crash."""
    ledger = job_in(store)
    is_open = store.info(ledger.prefix + JOB) is not None and store.info(ledger.prefix + MANIFEST) is None
    assert not is_open or store.info(MARKER) is not None, "an open job without a marker is never found"
    assert [found.name for found in open_jobs(store)] == ["job-1"] * is_open
    assert [found.id for found in list_jobs(store, active=True)] == ["job-1"] * is_open


def left(store: ObjectStore) -> list[str]:
    """Keys of markers, and of attempts' objects."""
    return [info.key for info in store.list("") if info.key.startswith("active/") or "/work/0" in info.key]


def at_every_call(make: MakeWorld, prepare: Callable[[World], None], act: Callable[[World], object]) -> Iterator[World]:
    """Worlds in which `act` crashed before its first store call, before its second, and so on, up to a complete one."""
    for nth in range(1, 1000):
        world = make()
        prepare(world)
        watched = WatchedStore(world.store, dies_at(nth))
        with suppress(Killed):
            act(replace(world, store=watched))
        yield world
        if len(watched.calls) < nth:
            assert nth > 3
            return
    raise AssertionError("it never ends")


def accept(world: World, *, fresh: bool = False) -> bool:
    return submit(order(), job_in(world.store), world, job_id="job-1", fresh=fresh).created


def compute(world: World) -> None:
    """Compute all parts of a job of three shards. An attempt on the first was given up, and still writes
    checkpoints."""
    accept(world)
    ledger = job_in(world.store)
    job = plan_by_hand(ledger, world, [[0, 1], [2], [3]], rejected=[4])
    record = ledger.begin_attempt(
        1, lambda number: AttemptRecord(attempt=number, attempt_id="0" * 16, worker="slow", started_at=START)
    )

    def log(sequence: int, generated: int) -> None:
        head = CheckpointHead(
            job=job.id, shard=1, attempt_id=record.attempt_id, sequence=sequence, generated=generated, exposed=5
        )
        key = checkpoint_key(1, record.attempt_id, sequence)
        assert ledger.create(key, encode(head, FinishedRows([], []), []))

    log(0, 10)
    queue, beats = MemoryQueue(), MemoryHeartbeats(world.clock, 10.0)
    dispatcher = Dispatcher(world, queue, beats)
    client = ShardClient("w", world, lambda _: ledger, queue, beats, lambda: False, models=MODELS)
    dispatcher.add(ledger)
    while sum(1 for _ in ledger.parts()) < 4:
        dispatcher.tick()
        while (work := client.take(0)) is not None:
            client.begin(work)
            assert client.commit(work, computed(work), report(work))
    log(1, 18)
    assert ledger.manifest() is None


def end(world: World) -> None:
    """End a job with all parts, as a dispatcher does."""
    dispatcher = Dispatcher(world, MemoryQueue(), MemoryHeartbeats(world.clock, 10.0))
    dispatcher.add(job_in(world.store))
    dispatcher.tick()


def test_given_a_root_when_a_job_comes_and_ends_then_its_marker_comes_first_and_goes_last(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    watched = WatchedStore(world.store)
    compute(replace(world, store=watched))
    created = [key for call, key in watched.calls if call == "create"]
    assert created.index(MARKER) < created.index("jobs/job-1/job.json")
    assert left(world.store)[0] == MARKER
    assert len(left(world.store)) > 2, "what attempts left"

    watched.calls.clear()
    end(replace(world, store=watched))
    assert left(world.store) == []
    assert [call for call in watched.calls if call[0] in ("create", "delete")][-1] == ("delete", MARKER)
    manifest = job_in(world.store).manifest()
    assert manifest is not None
    assert manifest.usage.repeated == 18, "it was counted before it was removed"


def test_given_a_death_at_any_call_when_a_job_is_submitted_then_it_is_marked_if_it_stands(
    make_world: MakeWorld,
) -> None:
    for world in at_every_call(make_world, lambda _: None, accept):
        check(world.store)
        accept(world)
        check(world.store)
        assert job_in(world.store).find_job() is not None


@pytest.mark.slow
def test_given_a_death_at_any_call_when_a_job_ends_then_the_same_order_again_removes_what_is_left(
    make_world: MakeWorld,
) -> None:
    for world in at_every_call(make_world, compute, end):
        check(world.store)
        if job_in(world.store).manifest() is None:
            end(world)
        accept(world)
        check(world.store)
        assert left(world.store) == []
        manifest = job_in(world.store).manifest()
        assert manifest is not None
        assert (manifest.counts.total, manifest.usage.repeated) == (5, 18)


@pytest.mark.slow
def test_given_a_death_at_any_call_when_a_job_ends_then_a_sweep_removes_what_is_left(make_world: MakeWorld) -> None:
    for world in at_every_call(make_world, compute, end):
        ended = job_in(world.store).manifest() is not None
        stale = world.store.info(MARKER) is not None
        assert stale or left(world.store) == [], "the marker goes last"
        assert sweep(world.store) == SweepResult(removed=int(ended and stale))
        assert not ended or left(world.store) == []
        check(world.store)


@pytest.mark.slow
def test_given_two_dispatchers_when_one_ends_the_job_at_any_call_of_the_other_then_both_know_one_outcome(
    make_world: MakeWorld,
) -> None:
    nth = calls = 1
    while nth <= calls:
        world = make_world()
        compute(world)
        watched = WatchedStore(world.store, lets_in(nth, lambda world=world: end(world)))  # type: ignore[misc]
        end(replace(world, store=watched))
        nth, calls = nth + 1, len(watched.calls)
        manifest = job_in(world.store).manifest()
        assert manifest is not None
        assert manifest.usage.repeated == 18, "the slower dispatcher finds less, and must not write the outcome"
        assert left(world.store) == []
    assert nth > 20


@pytest.mark.slow
def test_given_a_death_at_any_call_when_a_job_is_made_afresh_then_what_stands_is_marked_unless_it_has_ended(
    make_world: MakeWorld,
) -> None:
    def ended(world: World) -> None:
        compute(world)
        end(world)

    for world in at_every_call(make_world, ended, lambda world: accept(world, fresh=True)):
        check(world.store)
        accept(world, fresh=True)
        check(world.store)
        assert [ledger.name for ledger in open_jobs(world.store)] == ["job-1"]


def test_given_jobs_that_have_ended_when_open_ones_are_listed_then_the_others_are_not_read(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    compute(world)
    end(world)
    for name in ("job-3", "job-2"):
        submit(order(), job_in(world.store, name), world, job_id=name)
    watched = WatchedStore(world.store)
    assert [ledger.name for ledger in open_jobs(watched)] == ["job-2", "job-3"], "the newest first: ids sort so"
    assert {key for _, key in watched.calls} == {
        "job.json", "active/",
        *(f"jobs/{name}/{record}" for name in ("job-2", "job-3") for record in ("job.json", "manifest.json")),
    }  # fmt: skip


@pytest.mark.slow
def test_given_markers_that_went_astray_when_swept_then_both_sides_are_mended(make_world: MakeWorld) -> None:
    def astray(world: World) -> None:
        compute(world)
        end(world)
        store = world.store
        mark(job_in(store))  # of a job that has ended
        mark(job_in(store, "job-0"))  # of none
        submit(order(), job_in(store, "job-2"), world, job_id="job-2")
        delete_markers(job_in(store, "job-2"))
        submit(order(), job_in(store, "job-3"), world, job_id="job-3")

    world = make_world()
    astray(world)
    assert [ledger.name for ledger in open_jobs(world.store)] == ["job-3"]
    assert sweep(world.store) == SweepResult(marked=1, removed=2)
    assert sweep(world.store) == SweepResult()

    for world in at_every_call(make_world, astray, lambda world: sweep(world.store)):
        assert world.store.info("active/job-3") is not None
        sweep(world.store)
        assert left(world.store) == ["active/job-2", "active/job-3"]


def test_given_a_sweep_at_any_call_of_a_submission_and_the_other_way_round_then_the_new_job_is_marked(
    make_world: MakeWorld,
) -> None:
    def sweeps(store: ObjectStore, world: World) -> None:
        sweep(store)

    def submits(store: ObjectStore, world: World) -> None:
        accept(replace(world, store=store))

    for first, second in ((submits, sweeps), (sweeps, submits)):
        nth = calls = 1
        while nth <= calls:
            world = make_world()
            mark(job_in(world.store))  # left by a crashed ingest source
            watched = WatchedStore(
                world.store,
                lets_in(nth, lambda world=world, second=second: second(world.store, world)),  # type: ignore[misc]
            )
            first(watched, world)
            nth, calls = nth + 1, len(watched.calls)
            check(world.store)
            accept(world)
            check(world.store)
        assert nth > 4


def test_given_an_output_folder_when_its_job_comes_and_ends_then_there_is_no_marker(make_world: MakeWorld) -> None:
    world = make_world()
    ledger = JobLedger(world.store)
    assert list(open_jobs(world.store)) == []
    plan_by_hand(ledger, world, [], rejected=[0])
    assert [found.prefix for found in open_jobs(world.store)] == [""]
    assert [job.id for job in list_jobs(world.store, active=True)] == [ledger.job().id]
    dispatcher = Dispatcher(world, MemoryQueue(), MemoryHeartbeats(world.clock, 10.0))
    dispatcher.add(ledger)
    dispatcher.tick()
    assert list(open_jobs(world.store)) == []
    assert sweep(world.store) == SweepResult()
    assert not [info for info in world.store.list("") if info.key.startswith("active/")]
