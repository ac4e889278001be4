"""The OpenAPI document is correct and complete: each response is documented (`run_http_harness` validates all responses
of all tests), and each documented response occurs."""

from __future__ import annotations

import re
import shutil
import socket
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import schemathesis

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Authority
from pipeline.gateway.openapi.document import REFUSALS
from pipeline.ledger.records import Tombstone
from pipeline.ports import StoreFull
from schemas.requests.limits import RateLimits
from schemas.settings.gateway import GatewayOptions
from tests.pipeline.gateway.http_harness import HttpHarness, lines, run_http_harness
from tests.waiting import HANG_SECONDS, wait_for

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
HELLO: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
OTHERS: dict[str, Any] = {
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}]},
    "/v1/classify": {"input": ["a", "b"]},
    "/v1/responses": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
DOCS = Path(__file__).parents[3] / "docs/http.md"
ALL = tuple(Scope)
OPEN = {"/", "/static/{name}", "/healthz", "/readyz", "/openapi.json"}
UNKNOWN = {"file_id": "file-" + "0" * 25, "batch_id": "job-x", "stream_id": "http-x", "model": "none", "name": "none"}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Any:
    settings = GatewayOptions(max_upload_bytes=100_000, max_body_bytes=100_000, idle_seconds=0.2)
    with run_http_harness(tmp_path_factory.mktemp("harness"), settings=settings) as harness:
        yield harness


class OperationClient:
    """Calls each operation of the document, with a valid key."""

    def __init__(self, harness: HttpHarness) -> None:
        self.harness = harness
        self.document = harness.witness.document
        _, self.key = harness.keys.create("acme", ALL)
        self.client = harness.client(self.key)

    def operations(self, status: int) -> list[tuple[str, str]]:
        """The operations with this documented status."""
        return [(method, path) for method, path, one in sorted(self.harness.witness.documented()) if one == status]

    def call_all(self, status: int, key: str | None = None, content: bytes | None = None, **headers: str) -> None:
        with self.harness.http(self.key if key is None else key) as http:
            for method, path in self.operations(status):
                http.request(method, path.format(**UNKNOWN), headers=headers, content=content)

    def say(self, method: str, path: str, head: str, body: bytes = b"") -> None:
        """Send a raw request that no client library would send."""
        host, port = self.harness.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), HANG_SECONDS) as connection:
            path = path.format(**UNKNOWN)
            wanted = f"{method.upper()} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key}\r\n{head}\r\n"
            connection.sendall(wanted.encode() + body)
            assert connection.recv(65_536)


@pytest.mark.slow
def test_it_is_an_openapi_document(harness: HttpHarness) -> None:
    with harness.http() as http:
        document = http.get("/openapi.json").json()
    assert document == harness.witness.document
    assert document["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(document).validate()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) is (path not in OPEN), path
            assert operation["responses"].keys() & {"422", "default"} == set()


def test_each_error_status_is_in_the_documentation_with_its_codes() -> None:
    text = DOCS.read_text(encoding="utf-8").split("## Errors")[1]
    rows = re.findall(r"^\| ([0-9, ]+) \| ([a-z_`, ]+) \|", text, re.MULTILINE)
    received = {status: codes for statuses, codes in rows for status in statuses.split(", ")}
    assert sorted(received) == sorted(map(str, REFUSALS))
    for status, refusal in REFUSALS.items():
        assert set(refusal.codes) <= set(re.findall(r"`(\w+)`", received[str(status)])), status


@pytest.mark.slow
def test_each_documented_response_occurs(harness: HttpHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    operations_client = OperationClient(harness)
    _good(operations_client)
    _refused_by_every_route(operations_client, monkeypatch)
    _conflicts(operations_client, monkeypatch)
    with run_http_harness(tmp_path, permits=0, settings=GatewayOptions(drain_seconds=HANG_SECONDS)) as stopping:
        _while_it_stops(OperationClient(stopping))
    missing = harness.witness.documented() - harness.witness.seen - stopping.witness.seen
    assert not missing, sorted(missing)


def _good(operations_client: OperationClient) -> None:
    """Valid requests to all routes."""
    client = operations_client.client
    file = client.files.create(file=("a.jsonl", lines(3)), purpose="batch")
    client.files.list()
    client.files.retrieve(file.id)
    with operations_client.harness.http(operations_client.key) as http:
        content = f"/v1/files/{file.id}/content"
        tag = http.get(content).headers["etag"]
        for headers, status in (
            ({"Range": "bytes=0-3"}, 206), ({"Range": "bytes=999999-"}, 416), ({"If-None-Match": tag}, 304),
        ):  # fmt: skip
            assert http.get(content, headers=headers).status_code == status
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        client.batches.list()
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", "it did not end")
        assert http.get(f"/v1/batches/{batch.id}/results").text
        failed = client.files.create(file=("b.jsonl", lines(5)), purpose="batch")
        again = client.batches.create(input_file_id=failed.id, endpoint=CHAT, completion_window="24h")
        wait_for(lambda: client.batches.retrieve(again.id).status == "completed", "it did not end")
        assert http.post(f"/v1/batches/{again.id}/retry", json={"include_invalid": True}).status_code == 200
        assert client.files.delete(file.id).deleted
        client.models.list()
        client.models.retrieve("tiny")
        stream = http.post(CHAT, json={**HELLO, "stream": True, "tokenmill": {"resume": 30}}).headers["x-stream-id"]
        client.chat.completions.create(**HELLO)
        client.completions.create(model="tiny", prompt="a")
        assert http.post(MESSAGES, json={**HELLO, "max_tokens": 5}).status_code == 200
        assert http.post(f"{MESSAGES}/count_tokens", json=HELLO).json()["input_tokens"]
        request = {"custom_id": "a", "params": {**HELLO, "max_tokens": 5}}
        made = http.post(f"{MESSAGES}/batches", json={"requests": [request]}).json()
        wait_for(lambda: http.get(f"{MESSAGES}/batches/{made['id']}").json()["ended_at"], "it did not end")
        assert http.get(f"{MESSAGES}/batches").json()["first_id"] == made["id"]
        assert '"succeeded"' in http.get(f"{MESSAGES}/batches/{made['id']}/results").text
        assert http.post(f"{MESSAGES}/batches/{made['id']}/cancel").status_code == 409
        assert http.delete(f"{MESSAGES}/batches/{made['id']}").status_code == 200
        assert http.get(f"{MESSAGES}/batches/{made['id']}/results").status_code == 410
        client.embeddings.create(model="tiny", input="a")
        client.responses.create(model="tiny", input="a")
        for url, more in OTHERS.items():
            assert http.post(url, json={"model": "tiny", **more}).status_code == 200, url
        for path in ("/v1/status", "/metrics", "/", "/static/style.css", "/healthz", "/readyz", "/openapi.json"):
            assert http.get(path).status_code == 200, path
        assert http.get(f"/v1/streams/{stream}").status_code == 200
        for path in ("/", "/static/style.css"):
            assert http.get(path, headers={"If-None-Match": "*"}).status_code == 304


def _refused_by_every_route(operations_client: OperationClient, monkeypatch: pytest.MonkeyPatch) -> None:
    operations_client.call_all(401, "wrong")
    operations_client.call_all(403, Origin="http://evil.example")
    _, narrow = operations_client.harness.keys.create("acme", ALL, limits=RateLimits(requests_per_minute=1))
    operations_client.call_all(429, narrow)
    operations_client.call_all(429, narrow)
    operations_client.call_all(415, content=b"x", **{"Content-Type": "text/plain"})
    for method, path in operations_client.operations(400):
        operations_client.say(method, path, "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n")
    for method, path in operations_client.operations(413):
        kind = "multipart/form-data; boundary=x" if path == "/v1/files" else "application/json"
        operations_client.say(method, path, f"Content-Type: {kind}\r\nContent-Length: 1000000\r\n")
        operations_client.say(method, path, f"Content-Type: {kind}\r\nContent-Length: 50\r\n", b"--")
    with operations_client.harness.http(operations_client.key) as http:
        for method, path in operations_client.operations(404):
            body: Any = {**HELLO, "model": "none"} if path == CHAT else {"model": "none", "prompt": "a"}
            if path == f"{MESSAGES}/count_tokens":
                body = {**HELLO, "model": "none"}
            if path == MESSAGES:
                body = {**HELLO, "model": "none", "max_tokens": 5}
            if path in OTHERS:
                body = {"model": "none", **OTHERS[path]}
            if path == "/v1/batches":
                body = {"input_file_id": UNKNOWN["file_id"], "endpoint": CHAT, "completion_window": "24h"}
            if path.endswith("/retry"):
                body = {}
            more = {"json": body} if method == "post" else {}
            assert http.request(method, path.format(**UNKNOWN), **more).status_code == 404, path
    with monkeypatch.context() as crowded:
        crowded.setattr(operations_client.harness.app, "_max_requests", 0)
        operations_client.call_all(503)
    with monkeypatch.context() as broken:
        broken.setattr(Authority, "caller", lambda *_: 1 / 0)
        operations_client.call_all(500)
    with monkeypatch.context() as full:

        def fail(*_: object) -> None:
            raise StoreFull("no room")

        full.setattr(Authority, "caller", fail)
        operations_client.call_all(507)


def _conflicts(operations_client: OperationClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client, harness = operations_client.client, operations_client.harness
    once = {"Idempotency-Key": "once"}
    file = client.files.create(file=("a.jsonl", lines(1)), purpose="batch", extra_headers=once)
    wanted: Any = {"input_file_id": file.id, "endpoint": CHAT}
    batch = client.batches.create(**wanted, completion_window="24h", extra_headers=once)
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", "it did not end")
    with harness.http(operations_client.key) as http:
        form: Any = {"files": {"file": ("a.jsonl", lines(2))}, "data": {"purpose": "batch"}}
        assert http.post("/v1/files", headers=once, **form).status_code == 409
        changed = {**wanted, "completion_window": "1h"}
        assert http.post("/v1/batches", headers=once, json=changed).status_code == 409
        requests = [{"custom_id": name, "params": {**HELLO, "max_tokens": 5}} for name in "ab"]
        assert http.post(f"{MESSAGES}/batches", headers=once, json={"requests": requests[:1]}).status_code == 200
        assert http.post(f"{MESSAGES}/batches", headers=once, json={"requests": requests}).status_code == 409
        assert http.post(f"/v1/batches/{batch.id}/cancel").status_code == 409
        assert http.post(f"/v1/batches/{batch.id}/retry").status_code == 409
        harness.ledger(batch.id).create_tombstone(Tombstone(job=batch.id, at=harness.clock.now()))
        assert http.get(f"/v1/batches/{batch.id}/results").status_code == 410
        assert http.post(f"/v1/batches/{batch.id}/retry").status_code == 410
        harness.world.store.create(
            f"files/{file.id}/readers/job-new.json", b'{"version":1,"at":"2099-01-01T00:00:00Z"}'
        )
        assert http.delete(f"/v1/files/{file.id}").status_code == 409
        with monkeypatch.context() as full:
            usage = namedtuple("usage", "total used free")
            full.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 0))
            assert http.post("/v1/files", **form).status_code == 507


def _while_it_stops(operations_client: OperationClient) -> None:
    harness = operations_client.harness
    file = operations_client.client.files.create(file=("a.jsonl", lines(1)), purpose="batch")
    batch = operations_client.client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert operations_client.client.batches.cancel(batch.id).cancelling_at
    with harness.http(operations_client.key) as http:
        request = {"custom_id": "a", "params": {**HELLO, "max_tokens": 5}}
        made = http.post(f"{MESSAGES}/batches", json={"requests": [request]}).json()["id"]
        assert http.delete(f"{MESSAGES}/batches/{made}").status_code == 409
        assert http.get(f"{MESSAGES}/batches/{made}/results").status_code == 409
        assert http.post(f"{MESSAGES}/batches/{made}/cancel").json()["processing_status"] == "canceling"
    harness.worker.pause = 0.05
    reading = threading.Thread(target=lambda: list(operations_client.client.chat.completions.create(
        **HELLO, max_tokens=2_000, stream=True)))  # fmt: skip
    reading.start()
    wait_for(lambda: harness.worker.requests, "it did not begin")
    harness.stop.set()
    with harness.http() as http:
        wait_for(lambda: http.get("/readyz").status_code == 503, "it goes on")
    operations_client.call_all(503)
    harness.worker.pause = 0.0
    reading.join()
