"""Access control on every HTTP route. The routes are read from the application, so a new one is tested, or must be
listed here as public."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
from websockets.exceptions import InvalidStatus

from pipeline.gateway.http.api_keys import Scope
from tests.patient_websocket import connect
from tests.pipeline.gateway.http_harness import HttpHarness, lines, run_http_harness

OPEN = {"/", "/static/{name}", "/healthz", "/readyz", "/openapi.json"}
"""Routes that need no key. Their answers hold nothing of any tenant."""
NEEDS_NO_SCOPE = {"/v1/models", "/v1/models/{model}"}
OF_A_TENANT = ("{file_id}", "{batch_id}", "{stream_id}")
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
SCOPES = {"files": Scope.FILES, "batches": Scope.BATCHES, "status": Scope.BATCHES, "models": None}
TRICKS = [
    "..", "../..", "..%2f..%2f..%2fsecret", "../../keys", "..%2f..%2fkeys", "%2e%2e%2fkeys", "..%5c..%5ckeys",
    "%252e%252e%252fkeys", "/etc/passwd", "file-0000000000000000000/../../keys", "a%00b", "%ff%fe", "x" * 5_000,
    "ü文", "file-", "job-*", "{}", "'--", "${jndi:x}",
]  # fmt: skip


@dataclass(frozen=True)
class Route:
    method: str
    path: str

    def at(self, **names: str) -> str:
        """The route's path with these parameters."""
        path = self.path.replace(":path}", "}")
        for name, value in names.items():
            path = path.replace(f"{{{name}}}", value)
        return path

    @property
    def scope(self) -> Scope | None:
        if self.path.startswith("/v1/messages/batches"):
            return Scope.BATCHES
        return (
            Scope.METRICS
            if self.path == "/metrics"
            else SCOPES.get(self.path.removeprefix("/v1/").split("/")[0], Scope.INFERENCE)
        )


def leaves(routes: Any) -> Iterator[Any]:
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from leaves(included.routes)


def routes(harness: HttpHarness) -> list[Route]:
    """All but those that are open."""
    application: Any = harness.app.app
    found = [
        Route(method, route.path)
        for route in leaves(application.routes)
        for method in sorted(getattr(route, "methods", None) or {"WS"})
    ]
    assert {route.path for route in found} >= OPEN
    return [route for route in found if route.path not in OPEN]


@dataclass(frozen=True)
class AcmeGateway:
    """A gateway with a file, a batch and a stream of the tenant acme."""

    harness: HttpHarness
    key: str
    names: dict[str, str]
    http: Any

    def request(self, route: Route, key: str | None, **names: str) -> Any:
        """The answer's status and body, whatever it is."""
        path = route.at(**{**self.names, **names})
        headers = {} if key is None else {"Authorization": key if " " in key else f"Bearer {key}"}
        if route.method == "WS":
            with pytest.raises(InvalidStatus) as refused:
                connect(self.harness.url.replace("http", "ws") + path, additional_headers=headers).close()
            return refused.value.response.status_code, refused.value.response.body or b""
        body = HELLO if route.method == "POST" else None
        answer = self.http.request(route.method, path, json=body, headers=headers)
        return answer.status_code, answer.content


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AcmeGateway]:
    with run_http_harness(tmp_path_factory.mktemp("harness")) as harness:
        _, key = harness.keys.create("acme", tuple(Scope))
        client = harness.client(key)
        file = client.files.create(file=("a.jsonl", lines(2)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )  # fmt: skip
        with harness.http(key) as http:
            body = {**HELLO, "stream": True, "tokenmill": {"resume": 60}}
            stream = http.post("/v1/chat/completions", json=body).headers["x-stream-id"]
        names = {"file_id": file.id, "batch_id": batch.id, "stream_id": stream, "model": "tiny"}
        with harness.http() as http:
            yield AcmeGateway(harness, key, names, http)


def wrong_keys(harness: HttpHarness, real: str) -> dict[str, str | None]:
    _, expired = harness.keys.create("acme", tuple(Scope), expires_at=harness.clock.now() - timedelta(seconds=1))
    revoked, revoked_text = harness.keys.create("acme", tuple(Scope))
    harness.keys.revoke(revoked.id)
    return {
        "none": None,
        "no Bearer": f"Token {real}",
        "nonsense": "sk-1234",
        "another scheme": f"Basic {real}",
        "one character is wrong": real[:-1] + ("0" if real[-1] != "0" else "1"),
        "another's secret": revoked_text[:20] + real[20:],
        "expired": expired,
        "revoked": revoked_text,
    }


@pytest.mark.slow
def test_no_route_answers_without_a_valid_key(acme: AcmeGateway) -> None:
    found = routes(acme.harness)
    assert len(found) >= 17, "routes are not found"
    for what, key in wrong_keys(acme.harness, acme.key).items():
        for route in found:
            status, body = acme.request(route, key)
            assert (status, b"invalid_api_key" in body) == (401, True), (what, route, status)
    with acme.harness.http(acme.key) as http:
        assert http.get(f"/v1/files/{acme.names['file_id']}").status_code == 200, "nothing was removed meanwhile"


@pytest.mark.slow
def test_a_key_has_access_to_the_routes_of_its_scopes_only(acme: AcmeGateway) -> None:
    keys = {scope: acme.harness.keys.create("acme", (scope,))[1] for scope in Scope if scope is not Scope.ADMIN}
    for route in routes(acme.harness):
        if route.path.replace(":path}", "}") in NEEDS_NO_SCOPE:
            continue
        for scope, key in keys.items():
            if scope is not route.scope:
                status, body = acme.request(route, key)
                assert (status, b"missing_scope" in body) == (403, True), (scope, route, status)


def test_objects_of_other_tenants_are_not_found(acme: AcmeGateway) -> None:
    _, stranger = acme.harness.keys.create("stranger", tuple(Scope))
    tried = 0
    for route in routes(acme.harness):
        if not any(name in route.path for name in OF_A_TENANT):
            continue
        status, body = acme.request(route, stranger)
        assert status == 404, route
        unknown = {"file_id": "file-" + "0" * 25, "batch_id": "job-" + "0" * 17, "stream_id": "http-" + "0" * 32}
        same, other = acme.request(route, stranger, **unknown)
        body, other = (re.sub(rb"req-[0-9a-f]{24}", b"REQUEST", text) for text in (body, other))
        for name, value in unknown.items():
            body, other = body.replace(acme.names[name].encode(), b"ID"), other.replace(value.encode(), b"ID")
        assert (status, body) == (same, other), "the response reveals that it is another's"
        tried += 1
    assert tried >= 8
    with acme.harness.http(stranger) as http:
        for path in ("/v1/files", "/v1/batches"):
            assert http.get(path).json()["data"] == []
        wanted = {
            "input_file_id": acme.names["file_id"], "endpoint": "/v1/chat/completions", "completion_window": "24h",
        }  # fmt: skip
        assert http.post("/v1/batches", json=wanted).status_code == 404
    with acme.harness.http(acme.key) as http:
        assert http.get(f"/v1/files/{acme.names['file_id']}").status_code == 200
        assert http.get(f"/v1/batches/{acme.names['batch_id']}").json()["status"] != "cancelled"


@pytest.mark.slow
def test_no_id_allows_path_traversal(acme: AcmeGateway) -> None:
    root = acme.harness.world.scratch.parent.parent
    secret = root.parent / "secret"
    secret.write_text("hunter2")
    before = {path for path in root.parent.rglob("*") if path.is_file()}
    page = acme.http.get("/").content
    static = Route("GET", "/static/{name}")
    for route in [*routes(acme.harness), static]:
        if "{" not in route.path:
            continue
        for trick in TRICKS:
            quoted = quote(trick, safe="%/")
            status, body = acme.request(route, acme.key, name=quoted, **dict.fromkeys(acme.names, quoted))
            # A client that shortens the path itself requests a list, or the page.
            assert 400 <= status < 500 or (status == 200 and (b'"object":"list"' in body or body == page)), (
                route, trick, status,
            )  # fmt: skip
            assert b"hunter2" not in body
    after = {path for path in root.parent.rglob("*") if path.is_file()}
    assert before <= after, "something is gone"
    assert all(root in path.parents for path in after - before), "something was written elsewhere"


def test_other_headers_and_fields_dont_change_the_tenant(acme: AcmeGateway) -> None:
    """Only the key determines the tenant."""
    _, stranger = acme.harness.keys.create("stranger", tuple(Scope))
    tricks: list[Callable[[Any], Any]] = [
        lambda http: http.get("/v1/files", headers={"X-Tenant": "acme", "OpenAI-Organization": "acme"}),
        lambda http: http.get("/v1/files?tenant=acme&key=" + acme.key),
        lambda http: http.get("/v1/files", headers={"Cookie": f"key={acme.key}", "X-Api-Key": acme.key}),
    ]
    with acme.harness.http(stranger) as http:
        for trick in tricks:
            assert trick(http).json()["data"] == []
