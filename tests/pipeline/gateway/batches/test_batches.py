"""The life cycle of a batch through OpenAI's client, and its errors."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from pipeline.ingest.intake import Intake, IntakeSettings, JobDraft
from pipeline.inputs.pinning import pin_input
from schemas.jobs.job_options import JobOptions
from schemas.requests.limits import PlanSettings
from tests.pipeline.gateway.http_harness import lines, run_http_harness
from tests.waiting import HANG_SECONDS

ENDED = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"
SMALL = IntakeSettings(plan=PlanSettings(max_shard_rows=5))


def wait(client: OpenAI, batch_id: str, *statuses: str) -> Batch:
    """The batch, once it has one of these statuses."""
    until = time.monotonic() + HANG_SECONDS
    while (batch := client.batches.retrieve(batch_id)).status not in (statuses or ENDED):
        assert time.monotonic() < until, batch
        time.sleep(0.02)
    return batch


def begin(client: OpenAI, content: bytes, **more: Any) -> Batch:
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    fields: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h", **more}
    return client.batches.create(input_file_id=file.id, **fields)


@pytest.mark.slow
def test_the_whole_life_of_a_batch(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        client = harness.client()
        file = client.files.create(file=("my requests.jsonl", lines(12)), purpose="batch")
        assert (file.object, file.purpose, file.bytes) == ("file", "batch", len(lines(12)))
        assert file.filename == "my requests.jsonl"
        assert client.files.content(file.id).content == lines(12)
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"project": "x"}
        )
        assert (batch.object, batch.endpoint, batch.input_file_id) == ("batch", CHAT, file.id)
        assert batch.status in ("validating", "in_progress", "finalizing")
        assert batch.expires_at == batch.created_at + 86_400
        done = wait(client, batch.id)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (12, 10, 2)
        assert done.metadata == {"project": "x"}
        assert done.usage is not None
        assert done.usage.output_tokens == 12 * 7
        moments = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
        assert None not in moments
        assert list(moments) == sorted(moments)
        assert (done.failed_at, done.expired_at, done.cancelled_at, done.cancelling_at) == (None,) * 4
        assert done.output_file_id
        assert done.error_file_id
        answered = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
        failed = [json.loads(line) for line in client.files.content(done.error_file_id).text.splitlines()]
        assert {line["custom_id"] for line in answered} == {f"id-{n}" for n in range(12) if n % 5 != 4} or {
            line["custom_id"] for line in answered
        } == {f"r{n}" for n in range(12) if n % 5 != 4}
        assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in answered)
        assert {line["custom_id"] for line in failed} == {"r4", "r9"}
        assert failed[0]["error"]["code"] == "context_length_exceeded"
        assert wait(client, batch.id) == done, "what was seen once stays"
        output = client.files.retrieve(done.output_file_id)
        assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        with pytest.raises(openai.NotFoundError):
            client.files.content(file.id)
        assert [one.id for one in client.batches.list()] == [batch.id]


@pytest.mark.slow
def test_pages_start_after_any_id_in_both_orders(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        client = harness.client()
        made = [client.files.create(file=(f"{n}.jsonl", lines(1)), purpose="batch").id for n in range(7)]
        assert [file.id for file in client.files.list(limit=3)] == made[::-1]
        assert [file.id for file in client.files.list(limit=2, order="asc")] == made
        page = client.files.list(limit=3, after=made[4])
        assert ([file.id for file in page.data], page.has_more) == (made[3:0:-1], True)
        assert client.files.list(purpose="batch_output").data == []
        batches = [
            client.batches.create(input_file_id=made[0], endpoint=CHAT, completion_window="24h").id for _ in range(5)
        ]
        assert [batch.id for batch in client.batches.list(limit=2)] == batches[::-1]
        client.files.delete(made[6])
        page = client.files.list(limit=2, after=made[6])
        assert [file.id for file in page.data] == [made[5], made[4]]


@pytest.mark.slow
def test_one_invalid_line_fails_the_batch_unless_rows_may_fail_alone(tmp_path: Path) -> None:
    content = lines(3) + b"not json\n" + lines(1, url="/v1/completions", custom_id="other")
    with run_http_harness(tmp_path) as harness:
        client = harness.client()
        failed = wait(client, begin(client, content).id)
        assert (failed.status, failed.output_file_id, failed.error_file_id) == ("failed", None, None)
        assert failed.failed_at is not None
        assert failed.errors is not None
        assert failed.errors.data is not None
        found = [(one.line, one.code, one.param) for one in failed.errors.data]
        assert found == [(4, "invalid_json", None), (5, "unsupported_url", "url")]
        lenient = begin(client, content, extra_body={"tokenmill": {"on_invalid": "row", "tier": "bulk", "seed": 3}})
        done = wait(client, lenient.id)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (3, 2)
        job = harness.ledger(done.id).job()
        assert (job.tier, job.settings.seed, job.settings.url) == ("bulk", 3, CHAT)


def test_a_batch_may_have_an_error_file_only(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        client = harness.client()
        batch = begin(client, b"nothing\n", extra_body={"tokenmill": {"on_invalid": "row"}})
        done = wait(client, batch.id)
        assert (done.status, done.output_file_id) == ("completed", None)
        assert done.error_file_id is not None


@pytest.mark.slow
def test_cancelled_and_expired_batches_retain_finished_rows(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, permits=1, intake=SMALL) as harness:
        client = harness.client()
        batch = begin(client, lines(20, url=CHAT), extra_body={"tokenmill": {"max_output_tokens": 50}})
        until = time.monotonic() + HANG_SECONDS
        while not any(number for number, _ in harness.ledger(batch.id).parts()):
            assert time.monotonic() < until
            time.sleep(0.02)
        with pytest.raises(openai.ConflictError, match=f"batch {batch.id} reads file"):
            client.files.delete(batch.input_file_id)
        cancelling = client.batches.cancel(batch.id)
        assert cancelling.status in ("cancelling", "cancelled")
        assert cancelling.cancelling_at is not None
        done = wait(client, batch.id)
        assert done.status == "cancelled"
        assert done.cancelling_at == cancelling.cancelling_at
        assert done.cancelled_at is not None
        assert done.request_counts is not None
        assert (done.request_counts.total, done.request_counts.failed) == (20, 16)
        assert done.output_file_id
        assert done.error_file_id
        assert len(client.files.content(done.output_file_id).text.splitlines()) == 4
        assert '"batch_cancelled"' in client.files.content(done.error_file_id).text
        with pytest.raises(openai.ConflictError, match="is cancelled already"):
            client.batches.cancel(batch.id)
        client.files.delete(batch.input_file_id)

        late = begin(client, lines(10), completion_window="2m")
        wait(client, late.id, "in_progress")
        harness.clock.ahead = 600
        expired = wait(client, late.id)
        assert (expired.status, expired.completed_at) == ("expired", None)
        assert expired.expired_at is not None
        assert expired.finalizing_at is not None
        assert expired.error_file_id is not None


@pytest.mark.slow
def test_results_of_a_running_batch_can_be_read_and_failed_rows_retried(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, permits=1, intake=SMALL) as harness, harness.http() as http:
        client = harness.client()
        batch = begin(client, lines(15))
        until = time.monotonic() + HANG_SECONDS
        while len((first := http.get(f"/v1/batches/{batch.id}/results")).text.splitlines()) < 5:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert first.headers["x-incomplete"] == "true"
        harness.permits.release(10)
        done = wait(client, batch.id)
        rest = http.get(f"/v1/batches/{batch.id}/results", params={"without": first.headers["x-parts"]})
        assert (rest.headers["x-incomplete"], rest.headers["x-parts"]) == ("false", "0-3")
        ids = [json.loads(line)["custom_id"] for line in (first.text + rest.text).splitlines()]
        assert sorted(ids) == sorted(f"r{n}" for n in range(15))
        for without in ("9-1", "3,1", "0-3,2-9", "0-1000000", "0-600000,700000-1200000"):
            refused = http.get(f"/v1/batches/{batch.id}/results", params={"without": without})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "without"), without[:20]
        again_and_again = ",".join(["0-999999"] * 3_000)
        assert http.get(f"/v1/batches/{batch.id}/results", params={"without": again_and_again}).status_code == 400
        with pytest.raises(openai.ConflictError):
            client.post(f"/batches/{batch.id}/retry", cast_to=Batch, body={})
        again = client.post(f"/batches/{batch.id}/retry", cast_to=Batch, body={"include_invalid": True})
        assert client.post(f"/batches/{batch.id}/retry", cast_to=Batch, body={"include_invalid": True}).id == again.id
        retried = wait(client, again.id)
        assert retried.request_counts is not None
        assert (retried.request_counts.total, retried.input_file_id) == (3, done.input_file_id)
        assert retried.error_file_id is not None


@pytest.mark.slow
def test_a_repeated_idempotent_request_gives_the_same_object(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        client = harness.client()
        key = {"Idempotency-Key": "once"}
        upload: dict[str, Any] = {"file": ("a.jsonl", lines(2)), "purpose": "batch"}
        file = client.files.create(**upload, extra_headers=key)
        assert client.files.create(**upload, extra_headers=key) == file
        with pytest.raises(openai.ConflictError, match="came with another request"):
            client.files.create(file=("a.jsonl", lines(3)), purpose="batch", extra_headers=key)
        fields: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        made: list[str] = []
        barrier = threading.Barrier(4)

        def create() -> None:
            barrier.wait()
            made.append(harness.client().batches.create(**fields, extra_headers=key).id)

        threads = [threading.Thread(target=create) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(made), len(set(made))) == (4, 1)
        with pytest.raises(openai.ConflictError):
            client.batches.create(**{**fields, "completion_window": "1h"}, extra_headers=key)
        assert client.batches.create(**fields).id != made[0]


def test_jobs_of_other_ingest_sources_are_listed_as_batches(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        source = tmp_path / "in.jsonl"
        source.write_bytes(lines(3))
        for job, tenant in (("job-a", "default"), ("job-b", "other")):
            Intake(harness.world).accept(JobDraft(pin_input(source), JobOptions(), tenant, job))
        client = harness.client()
        done = wait(client, "job-a")
        assert (done.status, done.input_file_id, done.output_file_id) == ("completed", None, None)
        assert [one.id for one in client.batches.list()] == ["job-a"]
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("job-b")


@pytest.mark.slow
def test_output_files_are_written_by_another_gateway_after_a_crash(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, finalize=False) as harness:
        client = harness.client()
        batch = begin(client, lines(5))
        until = time.monotonic() + HANG_SECONDS
        while harness.ledger(batch.id).manifest() is None:
            assert time.monotonic() < until
            time.sleep(0.02)
        store = harness.world.store
        assert [info.key for info in store.list("finalizing/")] == [f"finalizing/{batch.id}"]
        assert client.batches.list().data[0].status == "finalizing", "a listing writes nothing"
        assert harness.finalizer.poll() + harness.finalizer.poll() == 1
        assert not list(store.list("finalizing/"))
        before = {info.key: store.read(info.key) for info in store.list("files/")}
        # The outcome and its marker are lost: the same files come again.
        store.delete(f"batches/{batch.id}/outcome.json")
        store.create(f"finalizing/{batch.id}", b"")
        assert harness.finalizer.poll() == 1
        assert {info.key: store.read(info.key) for info in store.list("files/")} == before


@pytest.mark.slow
def test_results_expire_after_the_requested_lifetime(tmp_path: Path) -> None:
    life = {"anchor": "created_at", "seconds": 3_600}
    with run_http_harness(tmp_path) as harness:
        client = harness.client()
        batch = begin(client, lines(5), output_expires_after=life)
        done = wait(client, batch.id)
        assert done.output_file_id is not None
        output = client.files.retrieve(done.output_file_id)
        assert output.expires_at == output.created_at + 3_600
        harness.clock.ahead = 4_000
        with pytest.raises(openai.NotFoundError):
            client.files.content(done.output_file_id)
        assert client.batches.retrieve(batch.id).output_file_id == done.output_file_id
