"""Planning with former answers: rows that take one get their results in planning, the others are in shards."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import submit
from pipeline.ledger.ledger import JobLedger
from pipeline.planner import SourceFile
from pipeline.ports import World
from pipeline.results.former_answers import StoredFormerAnswers
from schemas.jobs.job import Job, JobSettings
from schemas.jobs.results import ResultRow, RowStatus, results_table
from schemas.requests.limits import PlanSettings
from tests.pipeline.made_jobs import MODEL, all_rows, order
from tests.pipeline.simulation import MemoryStore, simulated_world

ROWS = 25
EQUAL = {row for row in range(ROWS) if row % 2}
"""Rows with one sampled prompt; the prompts of the others are greedy, and two of them equal."""


def line(row: int) -> str:
    body = {"model": MODEL, "prompt": "prompt" if row in EQUAL else f"prompt {row % 20}", "max_tokens": 8}
    body |= {} if row in EQUAL else {"temperature": 0}
    return json.dumps({"custom_id": f"id-{row}", "method": "POST", "url": "/v1/completions", "body": body})


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "scratch").mkdir()
    return simulated_world(tmp_path / "scratch")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join("{broken" if row == 8 else line(row) for row in range(ROWS)))
    return path


def accept(world: World, source: Path) -> tuple[JobLedger, Job]:
    ledger = JobLedger(world.store)
    settings = JobSettings(plan=PlanSettings(segment_rows=10, shard_tokens=32))
    return ledger, submit(order(input=pin_input(source), settings=settings), ledger, world).job


def shard_rows(ledger: JobLedger) -> dict[int, str]:
    """The keys of the rows in shards."""
    found: dict[int, str] = {}
    for segment in ledger.segments():
        for shard in segment.shards:
            table = pq.read_table(pa.BufferReader(ledger.read_shard(shard)))
            found |= zip(
                table["row"].to_pylist(), (key.hex() for key in table["request_hash"].to_pylist()), strict=True
            )
    return found


def former_of(keys: list[str], folder: Path) -> StoredFormerAnswers:
    """Former answers with these keys; their texts are their positions."""
    folder.mkdir()
    rows = (
        ResultRow(
            None, row, RowStatus.SUCCEEDED, 200, text=str(row), response='{"model": "other"}', request_key=key,
            prompt_tokens=3, cached_tokens=2, completion_tokens=1, attempt=2,
        )
        for row, key in enumerate(keys)
    )  # fmt: skip
    pq.write_table(results_table(rows), folder / "former.parquet")
    files = [SourceFile("former.parquet", lambda: (folder / "former.parquet").open("rb"))]
    return StoredFormerAnswers(files, folder, 100, "job-former")


@pytest.mark.slow
def test_given_former_answers_when_planning_dies_at_any_write_then_each_sampled_one_is_taken_once(
    world: World, source: Path, tmp_path: Path
) -> None:
    ledger, job = accept(world, source)
    plan_job(ledger, job, world)
    keys = shard_rows(ledger)
    sampled = next(keys[row] for row in EQUAL)
    greedy = [keys[0], keys[10], keys[24]]  # row 20 equals row 0, and row 4 row 24
    former = [sampled] * 9 + greedy

    world = simulated_world(world.scratch, seed=1)
    assert isinstance(world.store, MemoryStore)
    ledger, job = accept(world, source)
    plan_job(ledger, job, world, former=former_of(former, tmp_path / "whole"))
    log, objects = world.store.log, world.store.objects
    for length in range(2, len(log) + 1):
        survivor = MemoryStore({key: objects[key] for key in log[:length]})
        again, own = JobLedger(survivor), World(survivor, world.clock, world.random, world.scratch)
        plan_job(again, job, own, former=former_of(former, tmp_path / str(length)))

        results = {row["row"]: row for row in all_rows(again)}
        reused = {row: result["text"] for row, result in results.items() if result["reused_from"] is not None}
        assert {row for row in reused if row not in EQUAL} == {0, 20, 4, 24, 10}
        assert [reused[row] for row in (0, 20, 4, 24, 10)] == ["9", "9", "11", "11", "10"]
        assert sorted(text for row, text in reused.items() if row in EQUAL) == [str(place) for place in range(9)]
        assert {row for row in reused if row in EQUAL} == set(sorted(EQUAL)[:9])
        assert sorted([*shard_rows(again), *reused, 8]) == list(range(ROWS)), "each row once"
        assert sum(segment.reused for segment in again.segments()) == len(reused)
        parts = [row["row"] for row in all_rows(again)]
        assert parts == sorted(parts)


def test_given_a_reused_row_when_planned_then_its_result_costs_nothing_and_says_whose_it_is(
    world: World, source: Path, tmp_path: Path
) -> None:
    ledger, job = accept(world, source)
    plan_job(ledger, job, world)
    key = shard_rows(ledger)[0]
    world = simulated_world(world.scratch, seed=1)
    ledger, job = accept(world, source)
    plan_job(ledger, job, world, former=former_of([key], tmp_path / "former"))

    (result, refused, same) = all_rows(ledger)
    assert (result["row"], refused["row"], same["row"]) == (0, 8, 20)
    assert (result["custom_id"], result["text"], result["model"]) == ("id-0", "0", MODEL)
    assert json.loads(result["response"]) == {"model": MODEL}
    assert (result["prompt_tokens"], result["cached_tokens"], result["completion_tokens"]) == (0, 0, 0)
    assert (result["request_key"], result["reused_from"]) == (key, "job-former")
    assert (result["created_at"], result["started_at"], result["attempt"]) == (job.created_at, None, None)
    assert (refused["request_key"], refused["reused_from"]) == (None, None)
