"""Retries are jobs of their own; merged with the first one they give each row the best result there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.dispatcher.dispatcher import Dispatcher
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import plan_job
from pipeline.jobs.retry import NothingToRetry, choose_rows
from pipeline.jobs.submit import DifferentJob, submit
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import World
from pipeline.results.export import NotItsRetry, export, order_retries
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.job import Closing, Job, JobSettings
from schemas.jobs.outcome import Usage
from schemas.jobs.results import ResultRow, RowStatus
from schemas.jobs.row_selection import RowSelection
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.limits import PlanSettings
from tests.pipeline.made_jobs import MODEL, all_rows, computed, order, report
from tests.pipeline.simulated_harness import PipelineHarness
from tests.pipeline.simulation import simulated_world


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "scratch").mkdir()
    return simulated_world(tmp_path / "scratch")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """40 lines: each tenth is broken, and line 25 repeats the id of line 22."""
    path = tmp_path / "in.jsonl"
    lines = []
    for row in range(40):
        name = f"id-{22 if row == 25 else row}"
        body = {"model": MODEL, "prompt": f"question {row}", "max_tokens": 7}
        line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
        lines.append("{broken" if row % 10 == 9 else json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
    return path


def begin(
    world: World, source: Path, folder: str, rows: RowSelection | None = None, of: str | None = None
) -> PipelineHarness:
    """A planned job in `folder`, in segments of 16 lines."""
    ledger = JobLedger(world.store, f"{folder}/")
    plan = PlanSettings(segment_rows=16, shard_tokens=60)
    settings = JobSettings(plan=plan, rows=rows)
    job = submit(order(input=pin_input(source), settings=settings, retry_of=of), ledger, world).job
    plan_job(ledger, job, world)
    harness = PipelineHarness(world, ledger)
    harness.dispatcher.add(ledger)
    return harness


def work(harness: PipelineHarness, failing: dict[int, RowErrorCode], shards: int = 10**6, mark: str = "") -> None:
    """Answer so many shards; some rows fail."""
    client = harness.client("w")
    while not harness.dispatcher.finished() and shards:
        harness.dispatcher.tick()
        while shards and (taken := client.take(0)) is not None:
            done = computed(taken, mark=mark)
            rows = [_outcome(row, failing) for row in done.rows]
            client.commit(taken, FinishedRows(rows, [Usage(completion=7)] * len(rows)), report(taken))
            shards -= 1


def _outcome(row: ResultRow, failing: dict[int, RowErrorCode]) -> ResultRow:
    if row.row in failing:
        return ResultRow.from_error(row.row, row.custom_id, RowError(failing[row.row], "no"), model=MODEL)
    if row.status is RowStatus.SUCCEEDED:
        return row
    return ResultRow(row.custom_id, row.row, RowStatus.SUCCEEDED, 200, text="x", response='{"id": "x"}', model=MODEL)


def cancel(harness: PipelineHarness) -> None:
    harness.ledger.create_closing(Closing(kind="cancel", at=harness.world.clock.now()))
    harness.world.clock.sleep(60.0)
    harness.dispatcher.tick()
    assert harness.dispatcher.finished()


def rows_in(selection: RowSelection | None) -> list[int]:
    return [] if selection is None else np.flatnonzero(selection.mask()).tolist()


def statuses(ledger: JobLedger) -> dict[int, str]:
    return {row["row"]: row["status"] for row in all_rows(ledger)}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_given_an_ended_job_when_its_rows_are_chosen_then_those_that_may_succeed_are(
    world: World, source: Path
) -> None:
    harness = begin(world, source, "first")
    failing = {3: RowErrorCode.ENGINE_ERROR, 12: RowErrorCode.CONTEXT_LENGTH_EXCEEDED, 4: RowErrorCode.REQUEST_TIMEOUT}
    work(harness, failing, shards=3)
    with pytest.raises(NothingToRetry, match="has not ended"):
        choose_rows(harness.ledger)
    cancel(harness)

    cancelled = [row for row, status in statuses(harness.ledger).items() if status == "cancelled"]
    failed = [row for row, status in statuses(harness.ledger).items() if status == "failed" and row in failing]
    assert cancelled
    assert failed
    again = [row for row in failed if row != 12]
    assert rows_in(choose_rows(harness.ledger).rows) == sorted(cancelled + again)
    assert rows_in(choose_rows(harness.ledger, {RowStatus.CANCELLED}).rows) == sorted(cancelled)
    assert rows_in(choose_rows(harness.ledger, {RowStatus.FAILED}).rows) == sorted(again)
    assert rows_in(choose_rows(harness.ledger, {RowStatus.FAILED}, other_model=True).rows) == sorted(failed)
    everything = choose_rows(harness.ledger, include_invalid=True)
    assert rows_in(everything.rows) == sorted(cancelled + failed + [9, 19, 29, 39, 25])
    assert choose_rows(harness.ledger).left_out["invalid_json"] == 4
    assert choose_rows(harness.ledger).left_out["duplicate_custom_id"] == 1
    with pytest.raises(NothingToRetry, match="no row is worth another try"):
        choose_rows(harness.ledger, {RowStatus.EXPIRED})


def test_given_a_retry_when_it_is_planned_then_its_rows_keep_their_index_and_nothing_else_is_answered(
    world: World, source: Path
) -> None:
    chosen = np.zeros(40, dtype=np.bool_)
    chosen[[2, 9, 17, 25, 33]] = True
    selection = RowSelection.of(chosen)
    harness = begin(world, source, "again", selection)
    work(harness, {})

    found = {row["row"]: row for row in all_rows(harness.ledger)}
    manifest = harness.ledger.manifest()
    assert manifest is not None
    assert manifest.counts.total == len(found) == 5
    assert {row: found[row]["custom_id"] for row in (2, 17, 33)} == {2: "id-2", 17: "id-17", 33: "id-33"}
    assert found[9]["error_code"] == "invalid_json"
    assert found[25]["error_code"] == "duplicate_custom_id", "line 22 has the id, though this job leaves it out"
    segments = list(harness.ledger.segments())
    assert segments[-1].end_row == 40
    assert sum(segment.unselected for segment in segments) == 35
    other = order(input=pin_input(source), settings=harness.ledger.job().settings.model_copy(update={"rows": None}))
    with pytest.raises(DifferentJob, match=r"settings\.rows was 5 rows below 34"):
        submit(other, harness.ledger, world)


def test_given_a_chain_of_retries_when_merged_then_each_row_has_its_best_result_in_input_order(
    world: World, source: Path, tmp_path: Path
) -> None:
    first = begin(world, source, "first")
    work(first, dict.fromkeys((0, 1, 2, 3, 20), RowErrorCode.ENGINE_ERROR))
    job = first.ledger.job()
    second = retry(world, source, "second", first, job)
    work(second, dict.fromkeys((1, 20), RowErrorCode.REQUEST_TIMEOUT), mark=" second")
    third = retry(world, source, "third", second, second.ledger.job())
    work(third, {20: RowErrorCode.ENGINE_ERROR}, mark=" third")

    for fan_in in (2, 32):
        done = export(first.ledger, tmp_path / "all.jsonl", retries=[third.ledger, second.ledger], fan_in=fan_in)
        lines = lines_of(tmp_path / "all.jsonl")
        assert len(lines) == 40
        names = [None if row % 10 == 9 else f"id-{22 if row == 25 else row}" for row in range(40)]
        assert [line["custom_id"] for line in lines] == names
        failed = {row: line["error"]["code"] for row, line in enumerate(lines) if line["error"]}
        assert failed == {
            9: "invalid_json", 19: "invalid_json", 29: "invalid_json", 39: "invalid_json",
            25: "duplicate_custom_id", 20: "engine_error",
        }  # fmt: skip
        assert (done.succeeded, done.others) == (34, 6)
    ids = [line["id"] for line in lines]
    assert len(set(ids)) == 40

    # Jobs that are no retries of this job are refused.
    with pytest.raises(NotItsRetry, match="all retries between"):
        export(first.ledger, tmp_path / "no", retries=[third.ledger])
    with pytest.raises(NotItsRetry, match="given already"):
        export(first.ledger, tmp_path / "no", retries=[first.ledger])
    with pytest.raises(NotItsRetry, match="holds no retry"):
        export(second.ledger, tmp_path / "no", retries=[first.ledger])
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("seconds", [60.0, -3600.0, 0.0])
def test_given_a_clock_that_was_set_back_between_retries_when_merged_then_the_latest_is_still_the_last_of_the_chain(
    world: World, source: Path, tmp_path: Path, seconds: float
) -> None:
    codes = [RowErrorCode.ENGINE_ERROR, RowErrorCode.REQUEST_TIMEOUT, RowErrorCode.CONTENT_FILTER]
    first = begin(world, source, "first")
    work(first, {20: RowErrorCode.ENGINE_ERROR, 30: RowErrorCode.ENGINE_ERROR})
    chain = [first]
    for number, code in enumerate(codes):
        chain.append(retry(world, source, f"retry-{number}", chain[-1], chain[-1].ledger.job(), seconds))
        work(chain[-1], {20: code, 30: code})

    retries = [harness.ledger for harness in (chain[2], chain[3], chain[1])]
    assert order_retries(first.ledger, retries) == [harness.ledger for harness in chain[1:]]
    export(first.ledger, tmp_path / "all", retries=retries)
    assert lines_of(tmp_path / "all")[20]["error"]["code"] == codes[-1]
    with pytest.raises(NotItsRetry, match=f"retry-1.*: holds a retry of {chain[1].ledger.job().id}, not one of"):
        order_retries(first.ledger, [chain[2].ledger, chain[3].ledger])


def retry(
    world: World, source: Path, folder: str, before: PipelineHarness, job: Job, seconds: float = 60.0
) -> PipelineHarness:
    """A job of the rows that `before` did not answer, made so many seconds later."""
    world.clock.sleep(seconds)
    return begin(world, source, folder, choose_rows(before.ledger).rows, of=job.id)


@pytest.mark.slow
def test_given_some_retries_of_one_job_when_one_has_not_ended_then_answers_win_and_else_the_latest_reason(
    world: World, source: Path, tmp_path: Path
) -> None:
    first = begin(world, source, "first")
    work(first, dict.fromkeys(range(30), RowErrorCode.ENGINE_ERROR))
    job = first.ledger.job()
    one = retry(world, source, "one", first, job)
    other = retry(world, source, "other", first, job)
    last = retry(world, source, "last", first, job)
    work(one, dict.fromkeys(range(4), RowErrorCode.REQUEST_TIMEOUT))
    work(other, {}, shards=1)
    work(last, dict.fromkeys(range(30), RowErrorCode.ENGINE_ERROR))

    answered = {row for row, status in statuses(other.ledger).items() if status == "succeeded"}
    assert 0 < len(answered) < 26
    export(first.ledger, tmp_path / "all", retries=[last.ledger, other.ledger, one.ledger])
    failed = {row: line["error"]["code"] for row, line in enumerate(lines_of(tmp_path / "all")) if line["error"]}
    failed = {row: code for row, code in failed.items() if code not in ("invalid_json", "duplicate_custom_id")}
    assert failed == {row: "engine_error" for row in range(4) if row not in answered}


def test_given_an_interrupted_plan_of_a_retry_when_planned_again_then_it_is_the_same(
    world: World, source: Path
) -> None:
    chosen = np.zeros(40, dtype=np.bool_)
    chosen[[1, 18, 35]] = True
    harness = begin(world, source, "again", RowSelection.of(chosen))
    before = [segment.model_dump(exclude={"attempt", "shards", "rejects"}) for segment in harness.ledger.segments()]
    world.store.delete("again/plan/00001.json")
    world.store.delete("again/plan/00002.json")
    plan_job(harness.ledger, harness.ledger.job(), world)
    after = [segment.model_dump(exclude={"attempt", "shards", "rejects"}) for segment in harness.ledger.segments()]
    assert after == before
    harness.dispatcher = Dispatcher(world, harness.queue, harness.heartbeats)
    harness.dispatcher.add(harness.ledger)
    work(harness, {})
    assert sorted(statuses(harness.ledger)) == [1, 18, 35]
