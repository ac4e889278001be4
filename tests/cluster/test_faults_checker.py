"""The faults checker passes a sound copy, and reports each kind of damage."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cluster.faults_checker import Checker
from tests.cluster.faults_evidence import Answer, Evidence, TopicRecord
from tests.cluster.faults_plan import SCALES, JobInput, Line, draw_faults, draw_races, draw_work

SCHEMA = pa.schema(
    [
        ("custom_id", pa.string()),
        ("row", pa.int64()),
        ("status", pa.string()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("response", pa.string()),
        ("error_code", pa.string()),
        ("error_message", pa.string()),
        ("completion_tokens", pa.int32()),
    ]
)
NOT_JSON = Line(b"not JSON", None, "invalid_json")


def line(custom_id: str) -> Line:
    return Line(json.dumps({"custom_id": custom_id}).encode(), custom_id)


def result(custom_id: str | None, row: int, error: str | None = None) -> dict[str, Any]:
    """A row as it should be; closed ones by their error."""
    status = {"batch_cancelled": "cancelled", "batch_expired": "expired"}.get(error or "", "failed")
    text = None if error else f"answer to {custom_id}"
    response = {"choices": [{"message": {"content": text}}]}
    return {
        "custom_id": custom_id,
        "row": row,
        "status": status if error else "succeeded",
        "text": text,
        "finish_reason": None if error else "length",
        "response": None if error else json.dumps(response),
        "error_code": error,
        "error_message": error,
        "completion_tokens": None if error else 3,
    }


@dataclass
class CopiedJobs:
    """A copy of jobs, and all that goes with it; `write` makes it evidence."""

    folder: Path
    sent: list[JobInput] = field(default_factory=list)
    parts: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    closings: dict[str, str] = field(default_factory=dict)
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    published: list[TopicRecord] = field(default_factory=list)
    dead_letters: list[TopicRecord] = field(default_factory=list)
    requests: list[TopicRecord] = field(default_factory=list)

    def write(self) -> Evidence:
        """The evidence, with matching manifests where none are given."""
        for number, (job, parts) in enumerate(self.parts.items()):
            results = self.folder / job / "results"
            results.mkdir(parents=True, exist_ok=True)
            for name, rows in parts.items():
                pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), results / name)
            manifest = self._manifest(parts, results, number) | self.manifests.get(job, {})
            (self.folder / job / "manifest.json").write_text(json.dumps(manifest))
            if job in self.closings:
                (self.folder / job / "closing.json").write_text(json.dumps({"kind": self.closings[job]}))
        ids = [line.custom_id for job_input in self.sent for line in job_input.lines if line.custom_id]
        reference = {custom_id: Answer(f"answer to {custom_id}", "length", 3) for custom_id in ids}
        seen = {str(path.relative_to(self.folder)): digest(path) for path in self.folder.glob("*/results/*")}
        return Evidence(
            tuple(self.sent),
            reference,
            self.folder,
            tuple(self.requests),
            (),
            tuple(self.published),
            tuple(self.dead_letters),
            seen,
        )

    def _manifest(self, parts: dict[str, list[dict[str, Any]]], results: Path, number: int) -> dict[str, Any]:
        rows = [row for part in parts.values() for row in part]
        statuses = [row["status"] for row in rows]
        counts = {name: statuses.count(name) for name in ("succeeded", "failed", "expired", "cancelled")}
        files = [
            {
                "path": f"results/{name}",
                "rows": len(part),
                "size": (results / name).stat().st_size,
                "sha256": digest(results / name),
            }
            for name, part in parts.items()
        ]
        ended = "cancelled" if counts["cancelled"] else "completed"
        usage = {"completion": 3, "repeated": 5}
        return {
            "status": ended, "created_at": f"2026-01-01T00:00:{number:02d}Z", "counts": {"total": len(rows), **counts},
            "usage": usage, "repeated_at_most": 9, "files": files,
        }  # fmt: skip


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def result_record(job: str, row: dict[str, Any], offset: int) -> TopicRecord:
    """A message of the results topic with the row's result."""
    body = None if row["response"] is None else {"body": json.loads(row["response"])}
    error = None if row["error_code"] is None else {"code": row["error_code"]}
    value = {
        "job": job, "row": row["row"], "custom_id": row["custom_id"], "status": row["status"], "response": body,
        "error": error,
    }  # fmt: skip
    headers = {"result_id": f"{job}-{row['row']}".encode(), "source": f"requests/0/{row['row']}".encode()}
    return TopicRecord(f"results/0/{offset}", b"key", json.dumps(value).encode(), headers)


@pytest.fixture
def copy(tmp_path: Path) -> CopiedJobs:
    """A job from the bucket, one from Kafka whose records were published, and one that was cancelled and tried
    again."""
    made = CopiedJobs(tmp_path)
    lines = [line(f"w00/{n}") for n in range(4)]
    made.sent.append(JobInput("w00", "bucket", (*lines, NOT_JSON)))
    made.parts["job-a"] = {
        "part-00000.parquet": [result(None, 4, "invalid_json")],
        "part-00001.parquet": [result(f"w00/{n}", n) for n in range(2)],
        "part-00002.parquet": [result(f"w00/{n}", n) for n in (2, 3)],
    }
    made.sent.append(JobInput("w01", "kafka records", (*(line(f"w01/{n}") for n in range(3)), NOT_JSON)))
    rows = [result(f"w01/{n}", n) for n in range(3)]
    made.parts["job-b"] = {"part-00000.parquet": [], "part-00001.parquet": rows}
    made.requests = [
        TopicRecord(f"requests/0/{n}", None, one.text, {}) for n, one in enumerate((*made.sent[1].lines, NOT_JSON))
    ]
    made.dead_letters = [TopicRecord("deadletter/0/0", None, NOT_JSON.text, {})] * 2
    made.published = [
        result_record("job-b", row, n) for n, row in enumerate([*rows, rows[0]])
    ]  # one is published twice, alike
    made.sent.append(JobInput("r02", "celery uri", tuple(line(f"r02/{n}") for n in range(3)), "retry"))
    made.parts["job-c"] = {
        "part-00000.parquet": [],
        "part-00001.parquet": [result("r02/0", 0), *(result(f"r02/{n}", n, "batch_cancelled") for n in (1, 2))],
    }
    made.closings["job-c"] = "cancel"
    made.parts["job-d"] = {"part-00000.parquet": [], "part-00001.parquet": [result(f"r02/{n}", n) for n in (1, 2)]}
    return made


def test_a_sound_copy_passes_and_is_counted(copy: CopiedJobs) -> None:
    checker = Checker(copy.write())
    assert checker.judge() == []
    assert checker.outcomes == {"completed": 3, "cancelled": 1}
    assert checker.rows == {"succeeded": 10, "failed": 1, "cancelled": 2}
    assert checker.tokens == {"committed": 12, "repeated": 20, "at most": 36}
    assert (checker.repeats_published, checker.notes) == (1, [])


def lose_a_row(copy: CopiedJobs) -> None:
    del copy.parts["job-a"]["part-00002.parquet"][0]


def double_a_row(copy: CopiedJobs) -> None:
    copy.parts["job-a"]["part-00002.parquet"].insert(0, result("w00/1", 1))


def change_a_text(copy: CopiedJobs) -> None:
    copy.parts["job-a"]["part-00001.parquet"][0]["text"] = "another answer"


def change_a_response(copy: CopiedJobs) -> None:
    copy.parts["job-a"]["part-00001.parquet"][0]["response"] = result("w00/3", 0)["response"]


def swap_two_rows(copy: CopiedJobs) -> None:
    first, second = copy.parts["job-a"]["part-00001.parquet"]
    first["row"], second["row"] = second["row"], first["row"]


def add_a_row_that_was_never_sent(copy: CopiedJobs) -> None:
    copy.parts["job-a"]["part-00002.parquet"].append(result("w00/9", 9))


def make_a_second_job(copy: CopiedJobs) -> None:
    copy.parts["job-e"] = copy.parts["job-a"]


def make_a_job_without_input(copy: CopiedJobs) -> None:
    copy.parts["job-e"] = {"part-00000.parquet": [], "part-00001.parquet": [result("w99/0", 0)]}


def cancel_without_a_closing(copy: CopiedJobs) -> None:
    del copy.closings["job-c"]


def retry_a_finished_row(copy: CopiedJobs) -> None:
    copy.parts["job-d"]["part-00001.parquet"].insert(0, result("r02/0", 0))


def leave_a_row_without_retry(copy: CopiedJobs) -> None:
    del copy.parts["job-d"]["part-00001.parquet"][0]


def blame_the_engine(copy: CopiedJobs) -> None:
    copy.parts["job-a"]["part-00001.parquet"][0].update(result("w00/0", 0, "engine_error"))


def lose_a_record(copy: CopiedJobs) -> None:
    del copy.parts["job-b"]["part-00001.parquet"][1]
    del copy.published[1]


def double_a_record(copy: CopiedJobs) -> None:
    row = result("w01/0", 0)
    copy.parts["job-e"] = {"part-00000.parquet": [], "part-00001.parquet": [row]}
    copy.published.append(result_record("job-e", row, 9))


def publish_an_uncommitted_row(copy: CopiedJobs) -> None:
    copy.published.append(result_record("job-b", result("w01/7", 7), 9))


def publish_another_result(copy: CopiedJobs) -> None:
    copy.published[1] = result_record("job-b", result("w01/1", 1, "engine_error"), 1)


def publish_two_versions_of_a_result(copy: CopiedJobs) -> None:
    copy.published[3] = replace(copy.published[3], value=copy.published[1].value)


def publish_a_row_under_two_ids(copy: CopiedJobs) -> None:
    headers = {**copy.published[3].headers, "result_id": b"other"}
    copy.published[3] = replace(copy.published[3], headers=headers)


def name_another_source_record(copy: CopiedJobs) -> None:
    copy.published[2] = replace(copy.published[2], headers={**copy.published[2].headers, "source": b"requests/0/0"})


def withhold_a_result(copy: CopiedJobs) -> None:
    del copy.published[1]


def lose_a_dead_letter(copy: CopiedJobs) -> None:
    copy.dead_letters.clear()


def make_a_request_a_dead_letter(copy: CopiedJobs) -> None:
    copy.dead_letters.append(TopicRecord("deadletter/0/9", None, copy.sent[1].lines[0].text, {}))


def miscount(copy: CopiedJobs) -> None:
    copy.manifests["job-a"] = {"counts": {"total": 5, "succeeded": 5, "failed": 0}}


def end_as_something_else(copy: CopiedJobs) -> None:
    copy.manifests["job-c"] = {"status": "completed"}


def repeat_without_bound(copy: CopiedJobs) -> None:
    copy.manifests["job-a"] = {"repeated_at_most": 4}


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lose_a_row, "I1: 1 rows of job-a have no result, such as [2]"),
        (double_a_row, "I1: 1 rows of job-a are there twice, such as [1]"),
        (change_a_text, "I1: row 0 of job job-a says ('another answer'"),
        (change_a_response, "I1: row 0 of job job-a says"),
        (swap_two_rows, "I1: row 1 of job job-a bears 'w00/0' instead of 'w00/1'"),
        (add_a_row_that_was_never_sent, "I1: 1 rows of job-a were never sent"),
        (make_a_second_job, "I1: input w00 (bucket) came 1 times, but is 2 jobs"),
        (make_a_job_without_input, "I1: job job-e is of no input"),
        (cancel_without_a_closing, "I1: row 1 of job job-c is cancelled, but closing.json says None"),
        (retry_a_finished_row, "I1: 1 rows of job-d were never sent, such as [0]"),
        (leave_a_row_without_retry, "I1: 1 rows of job-d have no result, such as [1]"),
        (blame_the_engine, "I1: row 0 of job job-a ended as failed (engine_error"),
        (lose_a_record, "I1: 1 rows of w01 have no result"),
        (double_a_record, "I1: 1 rows of w01 are there twice"),
        (
            publish_an_uncommitted_row,
            "I1: row 7 of job job-b is published at results/0/9, but no such row is committed",
        ),
        (publish_another_result, "I1: what is published at results/0/1 is not what is committed"),
        (publish_two_versions_of_a_result, "I1: result job-b-0 is published in two versions"),
        (publish_a_row_under_two_ids, "I1: row 0 of job job-b is published as two results"),
        (name_another_source_record, "which is another request"),
        (withhold_a_result, "I1: row 1 of job job-b came by Kafka and is not published there"),
        (lose_a_dead_letter, "I1: b'not JSON' is no request and no dead letter"),
        (make_a_request_a_dead_letter, "is a dead letter, but a request"),
        (miscount, "I3: job job-a counts"),
        (end_as_something_else, "I3: job job-c ended as completed, but its rows say cancelled"),
        (repeat_without_bound, "I5: job job-a reports 5 repeated tokens, but at most 4"),
    ],
)
def test_each_damage_is_named(copy: CopiedJobs, damage: Callable[[CopiedJobs], None], finding: str) -> None:
    damage(copy)
    broken = Checker(copy.write()).judge()
    assert any(finding in line for line in broken), broken


def test_what_was_changed_after_a_reader_saw_it_is_named(copy: CopiedJobs) -> None:
    evidence = copy.write()
    part = copy.folder / "job-b/results/part-00000.parquet"
    pq.write_table(pa.Table.from_pylist([result("w01/0", 0)], schema=SCHEMA), part)
    (copy.folder / "job-c/results/part-00000.parquet").unlink()
    broken = Checker(evidence).judge()
    assert "I2: job-c/results/part-00000.parquet was seen, and is gone" in broken
    assert "I2: job-b/results/part-00000.parquet is not what was seen" in broken


def test_what_is_torn_or_no_part_is_named(copy: CopiedJobs) -> None:
    evidence = copy.write()
    part = copy.folder / "job-a/results/part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-8])
    shutil.copy(copy.folder / "job-a/results/part-00002.parquet", part.with_suffix(".parquet.tmp"))
    broken = Checker(evidence).judge()
    assert any("I4: job-a/results/part-00001.parquet is not a whole Parquet file" in line for line in broken), broken
    assert "I4: job-a/results/part-00001.parquet.tmp is no part" in broken


@pytest.mark.parametrize(("sampled", "sound"), [(31, False), (32, True), (48, True), (49, False)])
def test_repeated_work_must_be_reported_and_bounded(copy: CopiedJobs, sampled: int, sound: bool) -> None:
    broken = Checker(replace(copy.write(), sampled=sampled)).judge()
    assert (broken == []) is sound
    assert sound or broken[0].startswith(f"I5: {sampled - 12} tokens are in no answer")


def test_a_job_that_has_not_ended_and_a_complaint_are_named(copy: CopiedJobs) -> None:
    evidence = replace(copy.write(), complaints=("I4: torn when it was seen",))
    (copy.folder / "job-a/manifest.json").unlink()
    assert {"I4: torn when it was seen", "I7: job job-a has not ended"} <= set(Checker(evidence).judge())


def test_what_the_broker_lost_is_noted_and_is_no_violation_of_the_pipeline(copy: CopiedJobs) -> None:
    copy.requests = copy.requests[:2]
    del copy.parts["job-b"]["part-00001.parquet"][2], copy.published[2]
    copy.dead_letters.clear()
    checker = Checker(copy.write())
    assert checker.judge() == []
    assert checker.notes == ["the broker has lost 2 confirmed records of w01"]


def test_a_seed_stands_for_the_same_faults_and_inputs_each_time() -> None:
    faults = draw_faults(7, 40)
    assert faults == draw_faults(7, 40) != draw_faults(8, 40)
    assert len({fault.name for fault in faults}) == 14
    work, again = draw_work(7, SCALES["demo"]), draw_work(7, SCALES["demo"])
    assert [next(work) for _ in range(7)] == [next(again) for _ in range(7)]
    races = draw_races(7, faults, SCALES["demo"])
    assert sorted(race.role for race in races.values()) == ["cancel", "cancel", "expire", "expire", "retry", "retry"]
