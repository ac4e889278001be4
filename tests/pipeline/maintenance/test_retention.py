"""Removing what a root needs no more: the rules one by one, and that no interruption breaks them."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.adapters.folder.store import FolderStore
from pipeline.ingest.files.folder_inbox import FolderInbox
from pipeline.ingest.files.source import FileIngestSource
from pipeline.ingest.intake import Intake
from pipeline.jobs.retry import choose_rows
from pipeline.jobs.submit import DifferentJob, submit
from pipeline.jobs.summaries import find_ledger, list_jobs, summarize_job
from pipeline.ledger.active_index import mark
from pipeline.ledger.ledger import JOBS, JobLedger, ResultsRemoved, shard_key
from pipeline.maintenance.retention import RemovedKind, RetentionSettings, RetentionSweep
from pipeline.ports import ObjectStore, World
from pipeline.results.export import export
from pipeline.results.shard_history import checkpoint_key
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from schemas.jobs.outcome import JobStatus
from schemas.models import CatalogEntry, ModelPin
from tests.pipeline.dying_store import Killed, WatchedStore, dies_at
from tests.pipeline.made_jobs import end_job, order, plan_by_hand
from tests.pipeline.simulation import MemoryStore, SeededRandomness, SimulatedClock, simulated_world

DAY = 86_400.0
RETENTION = RetentionSettings(outputs=timedelta(days=7), intake=timedelta(days=30))
RECORDS = {"job.json", "manifest.json", "tombstone.json"}


def ledger_of(store: ObjectStore, name: str) -> JobLedger:
    return JobLedger(store, f"{JOBS}{name}/")


def planned(world: World, name: str, batch: str | None = None) -> JobLedger:
    """A job under way: planned, with a lost planner's shard, one part and a checkpoint there."""
    ledger = ledger_of(world.store, name)
    changes = {}
    if batch is not None:
        world.store.create(batch, b"{}\n")
        world.store.create(batch.removesuffix(".jsonl") + "x.parquet", b"records")
        file = InputFile(uri=world.store.locate(batch), size=3, sha256="0" * 64)
        changes["input"] = InputRef(uri=file.uri, format=InputFormat.JSONL, files=(file,))
    submit(order(**changes), ledger, world, job_id=name)
    plan_by_hand(ledger, world, [[0, 1], [2]], rejected=[3], **changes)
    ledger.create(shard_key("lost", 1), b"lost")
    ledger.create(checkpoint_key(1, "0" * 16, 0), b"log")
    ledger.create("results/part-00001.parquet", b"rows")
    ledger.create("progress.json", b"{}")
    return ledger


def below(store: ObjectStore, ledger: JobLedger) -> set[str]:
    return {info.key.removeprefix(ledger.prefix) for info in store.list(ledger.prefix)}


def run(world: World, chosen: RetentionSettings = RETENTION, *, dry_run: bool = False) -> Counter[RemovedKind]:
    return RetentionSweep(world, chosen, dry_run=dry_run).run().objects


def test_given_an_open_job_when_collected_a_thousand_days_later_then_nothing_of_it_is_touched(world: World) -> None:
    ledger = planned(world, "job-1", "intake/kafka/c/t/00000/lines/0-a.jsonl")
    world.clock.sleep(1000 * DAY)
    before = {info.key for info in world.store.list("")}
    assert run(world) == {}
    assert {info.key for info in world.store.list("")} == before
    world.store.delete("active/job-1")
    assert run(world, dry_run=True) == {}
    assert run(world) == {}
    assert {info.key for info in world.store.list("")} == before, "also when its marker was lost"
    assert ledger.manifest() is None


def test_given_an_ended_job_when_collected_then_only_leftovers_are_removed(world: World) -> None:
    ledger = planned(world, "job-1", "intake/kafka/c/t/00000/lines/0-a.jsonl")
    named = {shard.key for segment in ledger.segments() for shard in segment.shards}
    end_job(ledger, world.clock.now())
    found = run(world)
    assert found == {RemovedKind.LOST_PLAN: 1}, "the sweep of markers has cleared the work"
    left = below(world.store, ledger)
    assert named <= left
    assert {"job.json", "manifest.json", "results/part-00001.parquet", "plan/00000.json"} <= left
    assert not [name for name in left if name.startswith("work/0") or "lost" in name]
    assert world.store.info("intake/kafka/c/t/00000/lines/0-a.jsonl") is not None

    ledger.create(checkpoint_key(1, "1" * 16, 3), b"a worker that did not know of the end")
    assert run(world) == {RemovedKind.WORK: 1}
    assert run(world) == {}


def test_given_results_that_are_too_old_when_collected_then_a_tombstone_has_the_reason(
    world: World, tmp_path: Path
) -> None:
    ledger = planned(world, "job-1", "intake/kafka/c/t/00000/lines/0-a.jsonl")
    end_job(ledger, world.clock.now())
    world.clock.sleep(6 * DAY)
    run(world)
    ledger.check_results()
    world.clock.sleep(1 * DAY)
    would = RetentionSweep(world, RETENTION, dry_run=True).run()
    assert would.jobs == ["job-1"]
    assert would.num_bytes[RemovedKind.RESULTS] > 0
    assert ledger.tombstone() is None
    done = RetentionSweep(world, RETENTION).run()
    assert (done.jobs, done.objects) == (would.jobs, would.objects)
    assert below(world.store, ledger) == RECORDS

    summary = summarize_job(find_ledger(world.store, "job-1"))
    assert summary.status is JobStatus.CANCELLED
    assert summary.results_removed_at == world.clock.now()
    assert [found.problem for found in list_jobs(world.store)] == [None]
    with pytest.raises(ResultsRemoved, match=r"results/: the results were removed at 2026-01-08"):
        export(ledger, tmp_path / "out.jsonl")
    with pytest.raises(ResultsRemoved, match="submit the input again"):
        choose_rows(ledger)
    assert world.store.info("intake/kafka/c/t/00000/lines/0-a.jsonl") is not None, "the source may see the event again"

    world.clock.sleep(23 * DAY)
    assert run(world) == {RemovedKind.BATCH: 2}
    assert run(world) == {}
    assert below(world.store, ledger) == RECORDS


def test_given_results_without_an_end_of_time_then_they_stay(world: World) -> None:
    ledger = planned(world, "job-1")
    end_job(ledger, world.clock.now())
    world.clock.sleep(10_000 * DAY)
    run(world, RetentionSettings())
    assert "results/part-00001.parquet" in below(world.store, ledger)


def test_given_jobs_with_their_own_retention_when_collected_then_it_overrides_the_roots(
    world: World,
) -> None:
    for name, days in (("job-1", 2), ("job-2", 20), ("job-3", None)):
        ledger = ledger_of(world.store, name)
        lifetime = None if days is None else timedelta(days=days)
        submit(order(output_expires_after=lifetime), ledger, world, job_id=name)
        assert ledger.job().output_expires_after == lifetime
        ledger.create("results/part-00000.parquet", b"rows")
        end_job(ledger, world.clock.now())

    gone = list[list[str]]()
    for days in (1, 1, 5, 12, 1):
        world.clock.sleep(days * DAY)
        gone.append(RetentionSweep(world, RETENTION).run().jobs)
    assert gone == [[], ["job-1"], ["job-3"], [], ["job-2"]]

    other = ledger_of(world.store, "job-4")
    submit(order(output_expires_after=timedelta(days=2)), other, world, job_id="job-4")
    end_job(other, world.clock.now())
    world.clock.sleep(2 * DAY)
    assert RetentionSweep(world, RetentionSettings()).run().jobs == ["job-4"], "also where no lifetime is set"
    with pytest.raises(DifferentJob, match="output_expires_after was 2 days, 0:00:00, now None"):
        submit(order(), other, world)


def test_given_two_jobs_of_one_batch_when_one_is_old_then_companion_objects_stay_for_the_other(world: World) -> None:
    one = planned(world, "job-1", "intake/kafka/c/t/00000/lines/0-a.jsonl")
    planned(world, "job-2", "intake/kafka/c/t/00000/lines/0-b.jsonl")
    planned(world, "job-3", "intake/kafka/c/t/00000/lines/01-b.jsonl")
    end_job(one, world.clock.now())
    world.clock.sleep(40 * DAY)
    assert run(world)[RemovedKind.BATCH] == 1
    left = [info.key.rpartition("/")[2] for info in world.store.list("intake/")]
    assert left == ["0-ax.parquet", "0-b.jsonl", "0-bx.parquet", "01-b.jsonl", "01-bx.parquet"]
    end_job(ledger_of(world.store, "job-2"), world.clock.now())
    world.clock.sleep(40 * DAY)
    assert run(world)[RemovedKind.BATCH] == 3


def test_given_a_job_whose_input_is_the_users_when_collected_then_the_input_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "intake" / "a.jsonl"
    theirs.parent.mkdir()
    theirs.write_text("{}\n")
    with FolderStore(tmp_path / "root") as store:
        world = World(store, SimulatedClock(), SeededRandomness(), store.scratch)
        file = InputFile(uri=str(theirs), size=3, sha256="0" * 64)
        ledger = ledger_of(store, "job-1")
        found = InputRef(uri=file.uri, format=InputFormat.JSONL, files=(file,))
        submit(order(input=found), ledger, world, job_id="job-1")
        end_job(ledger, world.clock.now())
        world.clock.sleep(100 * DAY)
        run(world)
        assert ledger.tombstone() is not None
    assert theirs.exists()


def test_given_ingested_files_when_one_is_gone_then_only_its_marker_is_removed(tmp_path: Path) -> None:
    with FolderStore(tmp_path / "root") as store:
        clock = SimulatedClock()
        world = World(store, clock, SeededRandomness(), store.scratch)
        pin = ModelPin(name="tiny", source="/m", digest="sha256:1", dtype="float32")
        store.create("catalog/x.json", CatalogEntry(pin=pin, max_model_len=9).to_json())
        incoming = tmp_path / "root" / "incoming"
        incoming.mkdir()
        for name in ("a.jsonl", "b.jsonl", "c.txt"):
            (incoming / name).write_text("{}\n")
        source = FileIngestSource(FolderInbox(store, clock), Intake(world), world)
        for _ in range(2):
            source.sweep()
            clock.sleep(2.0)
        assert len(list(store.list("taken/"))) == 3
        assert run(world) == {}
        (incoming / "a.jsonl").unlink()
        assert run(world) == {RemovedKind.MARKER: 1}
        assert run(world) == {}
        (incoming / "a.jsonl").write_text("{}\n")
        again = FileIngestSource(FolderInbox(store, clock), Intake(world), world)
        for _ in range(2):
            again.sweep()
            clock.sleep(2.0)
        assert len(list(store.folders(JOBS))) == 3, "two, and the one that was dropped anew"


def test_given_foreign_objects_in_a_jobs_folder_when_its_results_go_then_they_stay(world: World) -> None:
    ledger = planned(world, "job-1")
    end_job(ledger, world.clock.now())
    ledger.create("notes.txt", b"mine")
    world.clock.sleep(8 * DAY)
    run(world)
    assert below(world.store, ledger) == RECORDS | {"notes.txt"}


class UploadingStore(MemoryStore):
    """Knows of uploads that began at these moments."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[datetime] = []

    def abort_stale_uploads(self, before: datetime) -> int:
        stale = [at for at in self.uploads if at < before]
        self.uploads = [at for at in self.uploads if at >= before]
        return len(stale)


def test_given_a_store_with_uploads_left_behind_when_collected_then_old_ones_go(world: World) -> None:
    store = UploadingStore()
    there = replace(world, store=store)
    now = world.clock.now()
    store.uploads = [now - timedelta(days=3), now - timedelta(days=1)]
    assert run(there, dry_run=True) == {}
    assert run(there) == {RemovedKind.UPLOAD: 1}
    assert store.uploads == [now - timedelta(days=1)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_given_any_root_when_collections_are_cut_off_anywhere_then_open_jobs_are_whole_and_the_end_is_the_same(
    seed: int,
) -> None:
    """Jobs of all ages and states; collectors that die at random calls, while time passes only between whole runs."""
    chance = random.Random(seed)
    world = simulated_world(Path("/tmp"), seed)
    store = world.store
    assert isinstance(store, MemoryStore)
    open_jobs = []
    for number in range(chance.randrange(1, 5)):
        name = f"job-{number}"
        batch = chance.choice([None, f"intake/kafka/c/t/00000/lines/{number % 2}-{number}.jsonl"])
        ledger = ledger_of(store, name)
        if chance.random() < 0.2:
            mark(ledger)  # a source that died
            continue
        world.clock.sleep(chance.choice([0.0, 10 * DAY]))
        ledger = planned_in_memory(world, name, batch)
        if chance.random() < 0.6:
            end_job(ledger, world.clock.now())
            if chance.random() < 0.5:
                store.delete(f"active/{name}")
        else:
            open_jobs.append(ledger)
            if chance.random() < 0.3:
                store.delete(f"active/{name}")
    world.clock.sleep(chance.choice([0.0, 8 * DAY, 50 * DAY]))
    whole = MemoryStore(store.objects)
    run(replace(world, store=whole))

    untouched = {
        key: data for key, data in store.objects.items() if any(key.startswith(job.prefix) for job in open_jobs)
    }
    for _ in range(chance.randrange(1, 6)):
        watched = WatchedStore(store, dies_at(chance.randrange(1, 40)))
        with suppress(Killed):
            run(replace(world, store=watched))
        assert {key: store.objects.get(key) for key in untouched} == untouched
    run(world)
    assert store.objects == whole.objects
    assert run(world) == {}
    for job in open_jobs:
        assert store.info(f"active/{job.name}") is not None
        uris = [file.uri.removeprefix("memory:") for file in job.job().input.files]
        assert all(store.info(uri) is not None for uri in uris if uri.startswith("intake/"))


def planned_in_memory(world: World, name: str, batch: str | None) -> JobLedger:
    """As `planned`, with everything a planner writes put there by hand: no files are built."""
    ledger = ledger_of(world.store, name)
    changes = {}
    if batch is not None:
        world.store.create(batch, b"{}\n")
        file = InputFile(uri=world.store.locate(batch), size=3, sha256="0" * 64)
        changes["input"] = InputRef(uri=file.uri, format=InputFormat.JSONL, files=(file,))
    submit(order(**changes), ledger, world, job_id=name)
    ledger.create(shard_key("lost", 1), b"lost")
    ledger.create(checkpoint_key(1, "0" * 16, 0), b"log")
    ledger.create("results/part-00001.parquet", b"rows")
    return ledger
