"""A job's stored models refuse inconsistent values, and survive a round trip through JSON."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.jobs.arrow_schemas import result_schema
from schemas.jobs.events import JobChanged, ProgressMade, ShardCommitted, read_event
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from schemas.jobs.job import Closing, Job
from schemas.jobs.outcome import Counts, FileEntry, JobStatus, Manifest, Usage
from schemas.jobs.plan import PlanSegment, RejectsRef, ShardRef
from schemas.jobs.results import ResultRow, RowStatus, results_table
from schemas.models import ModelPin
from schemas.requests.errors import STATUS_CODES, RowError, RowErrorCode

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SHA = "0" * 64
SHARD = ShardRef(
    number=1, key="k", sha256=SHA, size=9, rows=5, computed_rows=4, model="demo", prompt_tokens=1, expected_tokens=2
)


def job(**fields: Any) -> Job:
    given = {
        "id": "job-1",
        "input": InputRef(uri="a.jsonl", format=InputFormat.JSONL, files=(InputFile(uri="a.jsonl", size=3),)),
        "models": (ModelPin(name="demo", source="demo", dtype="float32"),),
        "created_at": NOW,
    }
    return Job(**(given | fields))


def segment(**fields: Any) -> PlanSegment:
    given = {
        "job": "job-1",
        "index": 0,
        "attempt": "a",
        "first_row": 0,
        "end_row": 7,
        "blank_lines": 1,
        "rejected": 1,
        "rejects": RejectsRef(number=0, key="r", sha256=SHA, size=1, rows=1),
        "unique": 4,
        "shards": (SHARD,),
        "last": True,
    }
    return PlanSegment(**(given | fields))


def test_records_come_back_from_their_json() -> None:
    for record in (job(deadline=NOW, metadata={"a": "b"}), segment(), Closing(kind="cancel", at=NOW)):
        assert type(record).model_validate_json(record.to_json()) == record


def test_a_pin_of_before_there_was_quantization_reads_as_without() -> None:
    old = '{"name": "demo", "source": "demo", "dtype": "float32", "quantization": "none"}'
    assert ModelPin.model_validate_json(old) == ModelPin(name="demo", source="demo", dtype="float32")
    assert ModelPin.model_validate_json(old).kv_dtype == "auto"
    for field in ("quantization", "kv_dtype"):
        with pytest.raises(ValidationError):
            ModelPin(name="demo", source="demo", dtype="float32", **{field: "int3"})


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {str(number): "x" for number in range(17)}},
        {"metadata": {"k" * 65: "x"}},
        {"metadata": {"k": "x" * 513}},
        {"id": "../elsewhere"},
        {"created_at": datetime(2026, 1, 1)},
        {"models": ()},
        {"models": (ModelPin(name="a", source="a", dtype="float32"),) * 2},
        {"unknown": 1},
        {"version": 2},
    ],
)
def test_a_job_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        job(**fields)


@pytest.mark.parametrize(
    "fields", [{"rejected": 2}, {"blank_lines": 0}, {"unselected": 1}, {"unique": 5}, {"end_row": 8}]
)
def test_a_segment_that_loses_or_invents_rows_is_refused(fields: dict[str, Any]) -> None:
    assert segment().total == 6
    with pytest.raises(ValidationError):
        segment(**fields)


@given(st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_counts_sum_to_the_total_or_are_refused(numbers: list[int]) -> None:
    total, *parts = numbers
    names = ("succeeded", "failed", "expired", "cancelled", "pending")
    if sum(parts) == total:
        assert Counts(total=total, **dict(zip(names, parts, strict=True))).total == total
    else:
        with pytest.raises(ValidationError):
            Counts(total=total, **dict(zip(names, parts, strict=True)))


def test_a_manifest_is_whole() -> None:
    def manifest(status: JobStatus, counts: Counts, rows: int) -> Manifest:
        files = (FileEntry(path="results/part-00000.parquet", rows=rows, size=1, sha256=SHA),)
        return Manifest(
            job="job-1",
            status=status,
            counts=counts,
            created_at=NOW,
            finished_at=NOW + timedelta(1),
            wall_seconds=1,
            files=files,
        )

    good = manifest(JobStatus.COMPLETED, Counts(total=2, succeeded=1, failed=1), 2)
    assert Manifest.model_validate_json(good.to_json()) == good
    with pytest.raises(ValidationError, match="no result yet"):
        manifest(JobStatus.COMPLETED, Counts(total=2, succeeded=1, pending=1), 2)
    with pytest.raises(ValidationError, match="do not hold"):
        manifest(JobStatus.COMPLETED, Counts(total=2, succeeded=2), 1)
    with pytest.raises(ValidationError):
        manifest(JobStatus.IN_PROGRESS, Counts(), 0)


def test_usage_adds_up_by_kind() -> None:
    assert Usage(prompt=1, cached=2) + Usage(prompt=3, accepted=4) == Usage(prompt=4, cached=2, accepted=4)


def test_events_survive_a_round_trip() -> None:
    for event in (
        JobChanged(id="e", job="j", at=NOW, status=JobStatus.COMPLETED, counts=Counts(total=1, succeeded=1)),
        ShardCommitted(id="e", job="j", at=NOW, shard=1, rows=2, attempt=1, usage=Usage(prompt=3)),
        ProgressMade(id="e", job="j", at=NOW, counts=Counts(), usage=Usage()),
    ):
        assert read_event(event.to_json()) == event


@pytest.mark.parametrize("code", list(RowErrorCode))
def test_a_refused_row_has_message_line_and_status(code: RowErrorCode) -> None:
    row = ResultRow.from_error(6, "id", RowError(code, "is wrong", line=7), created_at=NOW, finished_at=NOW)
    expected = {
        RowErrorCode.BATCH_EXPIRED: RowStatus.EXPIRED,
        RowErrorCode.BATCH_CANCELLED: RowStatus.CANCELLED,
        RowErrorCode.SPEND_LIMIT: RowStatus.CANCELLED,
    }.get(code, RowStatus.FAILED)
    said = (row.status, row.status_code, row.error_message)
    assert said == (expected, STATUS_CODES[code], "line 7 of the input: is wrong")


@pytest.mark.parametrize(("line", "where"), [(None, "line 7 of the input"), (7, "line 7 of the input"), (2, "line 2")])
def test_planner_and_worker_name_a_line_alike(line: int | None, where: str) -> None:
    # Given row 6, whose line a worker doesn't know, a planner does, or which is line 2 of another file of the input
    error = RowError(RowErrorCode.INVALID_REQUEST, "is wrong", line=line)
    assert ResultRow.from_error(6, "id", error, created_at=NOW, finished_at=NOW).error_message == f"{where}: is wrong"


def test_rows_become_a_table_of_the_fixed_schema() -> None:
    done = ResultRow("a", 0, RowStatus.SUCCEEDED, 200, text="hi", embedding=[0.5], started_at=NOW, attempt=1)
    table = results_table([done, ResultRow.from_error(1, None, RowError(RowErrorCode.INVALID_JSON, "no"))])
    assert table.schema.equals(result_schema())
    first, second = table.to_pylist()
    assert (first["status"], first["embedding"], first["started_at"], first["error_code"]) == (
        "succeeded",
        [0.5],
        NOW,
        None,
    )
    assert (second["custom_id"], second["error_code"], second["status"]) == (None, "invalid_json", "failed")
    assert results_table([]).schema.equals(result_schema())
