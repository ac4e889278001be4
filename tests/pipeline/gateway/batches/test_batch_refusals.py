"""Error responses of the routes for batches and files."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.errors import ApiError
from pipeline.ledger.ledger import JobLedger
from schemas.jobs.job import OnInvalid
from schemas.jobs.outcome import Manifest
from tests.pipeline.gateway.batches.test_batches import CHAT, begin, wait
from tests.pipeline.gateway.http_harness import HttpHarness, lines, run_http_harness


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"k": "x" * 513}}, "metadata.k"),
        ({"metadata": {f"k{n}": "v" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3_600}}, "output_expires_after.anchor"),
        ({"tokenmill": {"tier": "gold"}}, "tokenmill.tier"),
        ({"tokenmill": {"seed": "5"}}, "tokenmill.seed"),
        ({"tokenmill": {"refuse_late": "yes"}}, "tokenmill.refuse_late"),
        ({"tokenmill": {"metadata": {}}}, "tokenmill.metadata"),
        ({"priority": 3}, "priority"),
    ],
)
def test_invalid_bodies_are_bad_requests(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    with run_http_harness(tmp_path) as harness:
        client = harness.client()
        with pytest.raises(openai.BadRequestError) as refused:
            begin(client, lines(1), extra_body=body)
        assert refused.value.param == param
        assert refused.value.type == "invalid_request_error"


@pytest.mark.slow
def test_null_fields_are_like_missing_ones(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, permits=0) as harness:
        nothing = dict.fromkeys(("deadline", "on_invalid", "tier", "seed", "limit", "model", "max_output_tokens"))
        batch = begin(harness.client(), lines(1), completion_window="2h", extra_body={"tokenmill": nothing})
        assert batch.expires_at == batch.created_at + 7_200
        assert harness.ledger(batch.id).job().settings.on_invalid is OnInvalid.JOB


@pytest.mark.slow
def test_unknown_files_and_models_are_not_found(tmp_path: Path) -> None:
    began = int(time.time())
    with run_http_harness(tmp_path) as harness:
        client = harness.client()
        for name in ("file-" + "a" * 25, "../../etc/passwd", "file-%2e%2e"):
            with pytest.raises(openai.NotFoundError):
                client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
        with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here"):
            begin(client, lines(1), extra_body={"tokenmill": {"model": "gpt-9"}})
        assert not list(harness.world.store.list("finalizing/"))
        assert [model.id for model in client.models.list()] == ["tiny"]
        model = client.models.retrieve("tiny")
        assert (model.owned_by, client.models.list().data[0]) == ("tokenmill", model)
        assert began <= model.created <= time.time(), "since when it is served"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("org/none")


@pytest.mark.slow
def test_tenants_see_only_their_own_objects(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        (_, mine), (_, other) = (harness.keys.create(tenant, tuple(Scope)) for tenant in ("a/../b", "../a"))
        client, other_client = harness.client(mine), harness.client(other)
        batch = begin(client, lines(2))
        wait(client, batch.id)
        for attempt in (
            lambda: other_client.batches.retrieve(batch.id),
            lambda: other_client.batches.cancel(batch.id),
            lambda: other_client.files.retrieve(str(batch.input_file_id)),
            lambda: other_client.files.content(str(batch.input_file_id)),
            lambda: other_client.files.delete(str(batch.input_file_id)),
            lambda: other_client.batches.create(
                input_file_id=str(batch.input_file_id), endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError) as theirs:
                attempt()
            with pytest.raises(openai.NotFoundError) as missing:
                other_client.batches.retrieve(
                    "job-none"
                ) if "batch" in theirs.value.message else other_client.files.retrieve("file-" + "0" * 25)
            assert theirs.value.code == missing.value.code
        assert other_client.batches.list().data == []
        assert other_client.files.list().data == []
        assert len(client.files.list().data) == 2


@pytest.fixture
def harness(tmp_path: Path) -> Any:
    with run_http_harness(tmp_path) as harness:
        yield harness


@pytest.mark.slow
def test_all_errors_are_openai_error_objects(harness: HttpHarness) -> None:
    with harness.http() as http:
        for method, path, status in (
            ("GET", "/nowhere", 404),
            ("PUT", "/v1/files", 405),
            ("GET", "/v1/batches?limit=0", 400),
            ("GET", "/v1/batches?limit=x", 400),
            ("GET", "/v1/files?after=../x", 400),
            ("GET", "/v1/files/", 404),
            ("GET", "/v1/batches/..%2f..%2fx", 404),
        ):
            answer = http.request(method, path)
            assert answer.status_code == status, (path, answer.text)
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}, path
            assert answer.headers["x-request-id"].startswith("req-")
        assert http.put("/v1/files").headers["allow"] == "GET, POST"
        plain = http.post("/v1/batches", content=b"{}")
        assert (plain.status_code, plain.json()["error"]["code"]) == (415, "unsupported_media_type")
        deep = http.post(
            "/v1/batches", content=b'{"a":' * 1_000 + b"1" + b"}" * 1_000, headers={"Content-Type": "application/json"}
        )
        assert (deep.status_code, deep.json()["error"]["code"]) == (400, "invalid_json")
        assert http.get("/healthz").json() == {"status": "ok"}
        assert http.get("/readyz").status_code == 200
        assert http.get("/healthz", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"


@pytest.mark.slow
def test_a_batch_that_ends_during_a_retry_request_is_retried_or_refused(
    harness: HttpHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = harness.client()
    batch = begin(client, lines(5))
    wait(client, batch.id)
    real, asker, looks = JobLedger.manifest, threading.get_ident(), [0]

    def manifest(ledger: JobLedger) -> Manifest | None:
        """The job ends after the first read."""
        looks[0] += threading.get_ident() == asker
        return None if threading.get_ident() == asker and looks[0] == 1 else real(ledger)

    monkeypatch.setattr(JobLedger, "manifest", manifest)
    with pytest.raises(ApiError) as refused:
        harness.parts.batches.retry("default", batch.id, {"include_invalid": True})
    assert (refused.value.status, refused.value.code) == (409, "nothing_to_retry")
    assert harness.parts.batches.retry("default", batch.id, {"include_invalid": True}).object == "batch"
