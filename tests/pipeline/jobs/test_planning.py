"""From an input file to a planned job: segment by segment the plan lands in the ledger, with parts of refused rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.inputs.pinning import pin_input
from pipeline.jobs.manifest import check_parts
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import submit
from pipeline.jobs.summaries import summarize_job
from pipeline.ledger.ledger import JobLedger, part_key
from pipeline.planner import InputError, InvalidInput
from pipeline.ports import ObjectInfo, StoreError, World
from pipeline.results.part_files import PartEntry, read_part
from schemas.jobs.job import Job, JobSettings, OnInvalid
from schemas.jobs.outcome import JobStatus
from schemas.requests.limits import PlanSettings
from tests.pipeline.made_jobs import MODEL, all_rows, computed, order, report
from tests.pipeline.simulated_harness import PipelineHarness, finish
from tests.pipeline.simulation import MemoryStore, simulated_world


class FailingStore(MemoryStore):
    """A store that takes `left` more calls, then fails; None: it has recovered."""

    def __init__(self, objects: dict[str, bytes], left: int | None) -> None:
        super().__init__(objects)
        self.left = left

    def _call(self) -> None:
        if self.left == 0:
            raise StoreError("the disk is full")
        if self.left is not None:
            self.left -= 1

    def create(self, key: str, data: bytes | Path) -> bool:
        try:
            self._call()
        except StoreError:
            if isinstance(data, Path):  # it was given away
                data.unlink()
            raise
        return super().create(key, data)

    def read(self, key: str) -> bytes:
        self._call()
        return super().read(key)

    def info(self, key: str) -> ObjectInfo | None:
        self._call()
        return super().info(key)


class MeetingStore(MemoryStore):
    """A store at whose `at`th call, before it is done, `meet` happens."""

    def __init__(self, objects: dict[str, bytes], at: int) -> None:
        super().__init__(objects)
        self.calls = 0
        self.at = at
        self.meet: Callable[[], object] | None = None

    def create(self, key: str, data: bytes | Path) -> bool:
        self.calls += 1
        if self.calls >= self.at and self.meet is not None:
            meet, self.meet = self.meet, None
            meet()
        return super().create(key, data)


def line(row: int) -> str:
    body = {"model": MODEL, "prompt": f"prompt {row}", "max_tokens": 8}
    return json.dumps({"custom_id": f"id-{row}", "method": "POST", "url": "/v1/completions", "body": body})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join("{broken" if row % 5 == 3 else line(row) for row in range(25)))
    return path


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "scratch").mkdir()
    return simulated_world(tmp_path / "scratch")


def accept(world: World, source: Path, **settings: Any) -> tuple[JobLedger, Job]:
    ledger = JobLedger(world.store)
    plan = PlanSettings(segment_rows=10, shard_tokens=32)
    wanted = order(input=pin_input(source), settings=JobSettings(plan=plan, **settings))
    return ledger, submit(wanted, ledger, world).job


def planned_rows(ledger: JobLedger) -> list[int]:
    rows: list[int] = []
    for segment in ledger.segments():
        for shard in segment.shards:
            rows += pq.read_table(pa.BufferReader(ledger.read_shard(shard)))["row"].to_pylist()
    return sorted(rows)


def parts_of(ledger: JobLedger) -> dict[int, PartEntry]:
    return {number: read_part(ledger, number) for number, _ in ledger.parts()}


def refused_rows(ledger: JobLedger) -> list[int]:
    """Rows in the parts that stand, in the order of parts and rows."""
    return [row["row"] for row in all_rows(ledger)]


def check_planned(ledger: JobLedger) -> None:
    """The plan is whole, and with its refused rows holds each row once."""
    assert planned_rows(ledger) == [row for row in range(25) if row % 5 != 3]
    assert refused_rows(ledger) == [3, 8, 13, 18, 23]
    numbers = [number for segment in ledger.segments() for number in segment.parts]
    assert numbers == list(range(len(numbers)))
    assert ledger.planned_parts() == set(numbers)
    assert parts_of(ledger).keys() == {segment.rejects.number for segment in ledger.segments() if segment.rejects}


def test_the_plan_and_the_parts_of_refused_rows_hold_each_row_once(world: World, source: Path) -> None:
    ledger, job = accept(world, source)
    summary = plan_job(ledger, job, world)
    assert summary is not None
    assert (summary.total, summary.rejected) == (25, 5)
    check_planned(ledger)
    part = pq.read_table(pa.BufferReader(world.store.read(part_key(0))))
    assert part["row"].to_pylist() == [3, 8]
    assert set(part["error_code"].to_pylist()) == {"invalid_json"}
    assert "line 4" in part["error_message"][0].as_py()
    assert [part.rows for part in parts_of(ledger).values()] == [2, 2, 1]
    assert ledger.status() is JobStatus.IN_PROGRESS
    assert list(world.scratch.iterdir()) == []


def test_a_job_that_is_planned_is_not_planned_again(world: World, source: Path) -> None:
    ledger, job = accept(world, source)
    plan_job(ledger, job, world)
    assert isinstance(world.store, MemoryStore)
    before = list(world.store.log)
    assert plan_job(ledger, job, world) is None
    assert world.store.log == before


@pytest.mark.slow
def test_given_a_planner_that_died_at_any_write_then_the_next_one_makes_the_plan_whole(
    world: World, source: Path
) -> None:
    ledger, job = accept(world, source)
    plan_job(ledger, job, world)
    assert isinstance(world.store, MemoryStore)
    log, objects = world.store.log, world.store.objects
    for length in range(2, len(log)):
        survivor = MemoryStore({key: objects[key] for key in log[:length]})
        again, own = JobLedger(survivor), World(survivor, world.clock, world.random, world.scratch)
        begun = part_key(0) in log[:length]
        assert again.status() is (JobStatus.IN_PROGRESS if begun else JobStatus.VALIDATING)
        plan_job(again, job, own)
        check_planned(again)
        for segment in again.segments():
            stored = ledger.segment(segment.index)
            assert stored is not None
            assert (segment == stored) is (f"plan/{segment.index:05d}.json" in log[:length])
        assert again.status() is JobStatus.IN_PROGRESS
        with pytest.raises(Exception, match="parts and plan differ"):
            check_parts(again, job, list(again.segments()), parts_of(again))


@pytest.mark.parametrize("on_invalid", [OnInvalid.ROW, OnInvalid.JOB])
@pytest.mark.slow
def test_given_a_store_that_fails_at_any_call_then_planning_again_makes_the_plan_whole(
    world: World, source: Path, on_invalid: OnInvalid
) -> None:
    if on_invalid is OnInvalid.JOB:
        source.write_text("\n".join(line(row) for row in range(25)))
    _, job = accept(world, source, on_invalid=on_invalid)
    assert isinstance(world.store, MemoryStore)
    accepted = dict(world.store.objects)
    calls = 0
    while True:
        store = FailingStore(accepted, calls)
        own = World(store, world.clock, world.random, world.scratch)
        try:
            plan_job(JobLedger(store), job, own)
        except StoreError:
            assert list(world.scratch.iterdir()) == []
        else:
            break
        store.left = None
        again = JobLedger(store)
        stood = list(again.segments())
        plan_job(again, job, own)
        assert list(again.segments())[: len(stood)] == stood
        if on_invalid is OnInvalid.ROW:
            check_planned(again)
        else:
            assert planned_rows(again) == list(range(25))
            assert parts_of(again).keys() == {0}
        calls += 1
    assert calls > 15


@pytest.mark.slow
def test_given_planners_that_race_then_the_segment_that_stands_first_decides(world: World, source: Path) -> None:
    """Whenever the second planner comes by and does all of its work, each segment has one owner, and the shards and
    refused rows of that owner are the ones that count."""
    _, job = accept(world, source)
    assert isinstance(world.store, MemoryStore)
    accepted = dict(world.store.objects)
    owners: set[tuple[str, ...]] = set()
    for meeting in range(3, 40):
        store = MeetingStore(accepted, meeting)
        own = World(store, world.clock, world.random, world.scratch)
        raced = JobLedger(store)
        store.meet = partial(plan_job, raced, job, own)
        plan_job(raced, job, own)
        check_planned(raced)
        attempts = [segment.attempt for segment in raced.segments()]
        owners.add(tuple("ab"[attempts[0] != attempt] for attempt in attempts))
        for segment in raced.segments():
            assert all(shard.key.startswith(f"plans/{segment.attempt}/") for shard in segment.shards)
            assert segment.rejects is not None
            assert store.objects[part_key(segment.rejects.number)] == store.objects[segment.rejects.key]
        if store.meet is not None:  # planning ended before the other one came
            break
    assert {"aaa", "abb", "aab"} == {"".join(owner) for owner in owners}


def test_the_first_results_stand_long_before_the_last_line_is_read(world: World, source: Path) -> None:
    """Given a job of three segments, when the first one stands, then its shards are dispatched and committed although
    nothing behind it was planned, and the job ends when the rest is there."""
    ledger, job = accept(world, source)
    harness = PipelineHarness(world, ledger)
    harness.dispatcher.add(ledger)
    assert plan_job(ledger, job, world, max_segments=1) is not None
    assert [segment.last for segment in ledger.segments()] == [False]
    client = harness.client("w")
    for _ in range(5):
        harness.dispatcher.tick()
        while (work := client.take(0)) is not None:
            client.commit(work, computed(work), report(work))
    assert refused_rows(ledger) == [3, 8, *(row for row in range(10) if row % 5 != 3)]
    progress = harness.dispatcher.progress(job.id)
    assert progress is not None
    assert (progress.status, progress.counts.total, progress.counts.pending) == (JobStatus.IN_PROGRESS, 10, 0)
    assert ledger.status() is JobStatus.IN_PROGRESS
    assert summarize_job(ledger).counts == progress.counts
    plan_job(ledger, job, world)
    assert finish(harness, client).counts.total == 25
    assert sorted(row["row"] for row in all_rows(ledger)) == list(range(25))


def test_a_job_that_invalid_lines_stop_is_checked_whole_before_anything_counts(world: World, source: Path) -> None:
    source.write_text("\n".join(line(row) for row in range(25)))
    ledger, job = accept(world, source, on_invalid=OnInvalid.JOB)
    assert isinstance(world.store, MemoryStore)
    summary = plan_job(ledger, job, world, max_segments=1)
    assert summary is not None
    assert summary.segments[-1].last
    log = world.store.log
    first = log.index("plan/00000.json")
    assert sum("/shards/" in key for key in log[first:]) == 0, "all of the input was read before"


def test_invalid_lines_end_a_strict_job_before_anything_is_planned(world: World, source: Path) -> None:
    ledger, job = accept(world, source, on_invalid=OnInvalid.JOB)
    with pytest.raises(InvalidInput, match="5 lines are invalid; the first is line 4"):
        plan_job(ledger, job, world)
    assert ledger.status() is JobStatus.FAILED
    manifest = ledger.manifest()
    assert manifest is not None
    assert [error.line for error in manifest.errors] == [4, 9, 14, 19, 24]
    assert list(ledger.segments()) == []
    assert list(ledger.parts()) == []
    assert list(world.scratch.iterdir()) == []
    assert plan_job(ledger, job, world) is None, "it has ended"
    source.write_text(line(1))
    corrected = submit(order(input=pin_input(source)), ledger, world)
    assert corrected.created


def test_an_input_that_changed_after_it_was_accepted_is_not_planned(world: World, source: Path) -> None:
    ledger, job = accept(world, source)
    source.write_text(source.read_text() + "\n" + line(99))
    with pytest.raises(InputError, match="when the job was accepted"):
        plan_job(ledger, job, world)
    assert ledger.status() is JobStatus.VALIDATING


def test_an_empty_input_is_a_job_without_rows(world: World, source: Path) -> None:
    source.write_text("")
    ledger, job = accept(world, source)
    summary = plan_job(ledger, job, world)
    assert summary is not None
    assert summary.total == 0
    assert read_part(ledger, 0).rows == 0


def test_columns_of_a_parquet_input_are_carried_through_rejects_and_shards(world: World, tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    table = pa.table(
        {
            "custom_id": ["a", "b", "a"],
            "prompt": ["one", "two", "three"],
            "label": [1, 2, 3],
            "text": ["t1", "t2", "t3"],
        }
    )
    pq.write_table(table, path)
    ledger, job = accept(world, path)
    plan_job(ledger, job, world)
    part = pq.read_table(pa.BufferReader(world.store.read(part_key(0))))
    assert part.select(["row", "error_code", "label", "input_text"]).to_pylist() == [
        {"row": 2, "error_code": "duplicate_custom_id", "label": 3, "input_text": "t3"}
    ]
    (segment,) = ledger.segments()
    shards = pa.concat_tables(pq.read_table(pa.BufferReader(ledger.read_shard(shard))) for shard in segment.shards)
    carried = {row["custom_id"]: (row["label"], row["input_text"]) for row in shards.to_pylist()}
    assert carried == {"a": (1, "t1"), "b": (2, "t2")}
