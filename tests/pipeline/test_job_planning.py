"""From an input file to a planned job: the planner's plan lands in the ledger, refused rows in part 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.ledger import JobLedger, part_key
from pipeline.manifest import check_parts
from pipeline.pinning import pin_input
from pipeline.planner import InputError, InvalidInput
from pipeline.planning import plan_job
from pipeline.ports import World
from pipeline.results import read_part
from pipeline.submit import submit
from schemas.job import Job, JobSettings, JobStatus, OnInvalid, PlanSettings
from tests.pipeline.made_jobs import MODEL, order
from tests.pipeline.simulation import MemoryStore, simulated_world


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


def test_the_plan_and_part_0_hold_each_row_once(world: World, source: Path) -> None:
    ledger, job = accept(world, source)
    summary = plan_job(ledger, job, world)
    assert summary is not None
    assert (summary.total, summary.rejected) == (25, 5)
    assert planned_rows(ledger) == [row for row in range(25) if row % 5 != 3]
    part = pq.read_table(pa.BufferReader(world.store.read(part_key(0))))
    assert part["row"].to_pylist() == [3, 8, 13, 18, 23]
    assert set(part["error_code"].to_pylist()) == {"invalid_json"}
    assert "line 4" in part["error_message"][0].as_py()
    assert ledger.status() is JobStatus.IN_PROGRESS
    assert list(world.scratch.iterdir()) == []


def test_a_job_that_is_planned_is_not_planned_again(world: World, source: Path) -> None:
    ledger, job = accept(world, source)
    plan_job(ledger, job, world)
    assert isinstance(world.store, MemoryStore)
    before = list(world.store.log)
    assert plan_job(ledger, job, world) is None
    assert world.store.log == before


def test_given_a_planner_that_died_at_any_write_then_the_next_one_makes_the_plan_whole(
    world: World, source: Path
) -> None:
    ledger, job = accept(world, source)
    plan_job(ledger, job, world)
    assert isinstance(world.store, MemoryStore)
    log, objects, whole = world.store.log, world.store.objects, planned_rows(ledger)
    for length in range(2, len(log)):
        survivor = MemoryStore({key: objects[key] for key in log[:length]})
        again, own = JobLedger(survivor), World(survivor, world.clock, world.random, world.scratch)
        assert again.status() is JobStatus.VALIDATING
        plan_job(again, job, own)
        assert planned_rows(again) == whole
        parts = {0: read_part(again, 0)}
        assert parts[0].rows == 5
        for segment in again.segments():
            kept = ledger.segment(segment.index)
            assert kept is not None
            assert (segment == kept) is (f"plan/{segment.index:05d}.json" in log[:length])
        assert again.status() is JobStatus.IN_PROGRESS
        with pytest.raises(Exception, match="parts and plan differ"):
            check_parts(again, job, list(again.segments()), parts)


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
