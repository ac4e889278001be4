"""Connections: bounds, time-outs, and errors below the routes."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import time
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import ClientConnection

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Authority
from pipeline.gateway.http.uvicorn_protocol import HttpProtocol
from pipeline.gateway.inference.models import ServedModels
from pipeline.gateway.inference.responses import InferenceResponses
from pipeline.gateway.routes import websocket
from schemas.settings.gateway import GatewayOptions
from tests.patient_websocket import connect
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.waiting import HANG_SECONDS, wait_for

SIZE = 40 << 20


def dial(harness: HttpHarness) -> socket.socket:
    host, port = harness.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(HANG_SECONDS)
    return connection


def exchange(connection: socket.socket, request: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers by lower-case names, and JSON, up to when the server hangs up."""
    connection.sendall(request)
    said = b""
    while piece := connection.recv(65_536):
        said += piece
    head, _, body = said.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
    return int(first.split()[1]), headers, json.loads(body)


@pytest.mark.slow
def test_a_response_body_is_sent_before_its_headers_are_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels acknowledge what comes alone after 40 ms, and a socket without TCP_NODELAY waits for that."""
    options: list[int] = []
    made = HttpProtocol.connection_made

    def connection_made(protocol: HttpProtocol, transport: asyncio.Transport) -> None:
        made(protocol, transport)
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(HttpProtocol, "connection_made", connection_made)
    with run_http_harness(tmp_path) as harness, harness.http() as http:
        assert http.get("/healthz").status_code == 200
    assert options
    assert all(options)


@pytest.mark.slow
def test_connections_above_the_bound_get_503_and_are_closed(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, max_connections=3) as harness, ExitStack() as open_ones:
        for _ in range(3):
            idle = open_ones.enter_context(dial(harness))
            idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in idle.recv(65_536)
        with dial(harness) as further:
            status, headers, body = exchange(further, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "too_many_connections", "5")
        assert headers["x-request-id"].startswith("req-")
        idle.close()
        with harness.http() as http:
            assert http.get("/healthz").status_code == 200


def test_invalid_http_is_answered_with_a_request_id(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness, dial(harness) as connection:
        status, headers, body = exchange(connection, b"what?\r\n\r\n")
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert headers["x-request-id"].startswith("req-")


def test_a_refused_websocket_gets_the_same_error_object_as_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(path: str, **more: Any) -> tuple[int, str, Any]:
        with pytest.raises(InvalidStatus) as refused, connect(harness.url.replace("http", "ws") + path, **more):
            pass
        answer = refused.value.response
        assert answer.headers["x-request-id"].startswith("req-")
        return answer.status_code, json.loads(answer.body)["error"]["code"], answer.headers.get("retry-after")

    with run_http_harness(tmp_path) as harness:
        assert refusal("/v1/streams") == (404, "not_found", None)
        assert refusal("/v1/stream", origin="http://evil.example") == (403, "other_origin", None)
        with monkeypatch.context() as broken:
            broken.setattr(Authority, "caller", lambda *_: 1 / 0)
            assert refusal("/v1/stream") == (500, "internal_error", None)
        harness.app._max_requests = 0
        assert refusal("/v1/stream") == (503, "too_many_requests", "5")
        harness.app._max_requests = 10
        with connect(harness.url.replace("http", "ws") + "/v1/stream") as good:
            assert good.response is not None
            assert good.response.headers["x-request-id"].startswith("req-")
            assert harness.app.active == 1


def test_an_unexpected_error_is_a_500_and_other_requests_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UnexpectedError(Exception):
        """A programming error, of a class that no code catches by name."""

    def broken(*_: object) -> None:
        raise UnexpectedError("planted")

    with run_http_harness(tmp_path) as harness, harness.http() as http:
        with monkeypatch.context() as planted:
            planted.setattr(ServedModels, "get", broken)
            answer = http.get("/v1/models/tiny")
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
            assert "planted" not in answer.text
            assert http.get("/v1/files").status_code == 200
        assert http.get("/v1/models/tiny").status_code == 200


@pytest.mark.parametrize("where", ["read", "stream", "read_items"])
def test_an_unexpected_error_on_a_websocket_is_reported_and_other_websockets_continue(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UnexpectedError(Exception):
        """A programming error, of a class that no code catches by name."""

    def broken(*_: object) -> None:
        raise UnexpectedError("planted")

    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    request = json.dumps({"type": "request", "url": "/v1/chat/completions", "body": body})
    with run_http_harness(tmp_path) as harness, capture_logs() as logs:
        url = harness.url.replace("http", "ws") + "/v1/stream"
        with connect(url) as hit, connect(url) as other:
            with monkeypatch.context() as planted:
                if where == "read_items":
                    planted.setattr(websocket, "read_items", broken)
                else:
                    planted.setattr(InferenceResponses, where, broken)
                hit.send(request)
                messages: list[Any] = []
                with suppress(ConnectionClosedError):
                    messages.extend(json.loads(message) for message in hit)
                assert hit.close_code == 1011
            assert messages[-1]["type"] == "error"
            assert messages[-1]["error"]["code"] == "internal_error"
            assert "planted" not in json.dumps(messages)
            (line,) = (line for line in logs if line["event"] == "websocket_failed")
            assert line["error"] == "UnexpectedError"
            assert "test_connections.py" in line["at"][-1]
            other.send(request)
            types = [json.loads(other.recv(HANG_SECONDS))["type"]]
            while types[-1] not in ("done", "error"):
                types.append(json.loads(other.recv(HANG_SECONDS))["type"])
            assert (types[0], types[-1]) == ("begin", "done")
        wait_for(lambda: not harness.app.active, "a connection stays")


@pytest.mark.slow
def test_a_stalled_reader_is_disconnected_and_a_slow_one_is_not(tmp_path: Path) -> None:
    with (
        run_http_harness(tmp_path, settings=GatewayOptions(write_timeout_seconds=0.5)) as harness,
        harness.http() as http,
    ):
        form: Any = {"files": {"file": ("a.jsonl", b"x" * SIZE)}, "data": {"purpose": "batch"}}
        file = http.post("/v1/files", **form).json()["id"]
        wanted = f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        with dial(harness) as idle, dial(harness) as slow:
            for connection in (idle, slow):
                connection.sendall(wanted)
            wait_for(lambda: harness.app.active == 2, "they did not begin")
            came, began = 0, time.monotonic()
            while piece := slow.recv(1 << 20):
                came += len(piece)
                time.sleep(0.05)
            assert came > SIZE
            assert time.monotonic() - began > 1.5, "it was not slow"
            wait_for(lambda: not harness.app.active, "it is waited for")


def test_a_too_large_message_is_refused_before_its_end(tmp_path: Path) -> None:
    """It is hung up on as soon as it says how large it is."""
    with run_http_harness(tmp_path) as harness, connect(harness.url.replace("http", "ws") + "/v1/stream") as socket:
        socket.socket.sendall(b"\x81\xff" + ((1 << 20) + 1).to_bytes(8) + bytes(4))
        with pytest.raises(ConnectionClosedError) as closed:
            socket.recv(HANG_SECONDS)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


@pytest.mark.parametrize(
    "beginning", [b"\x81\xa0abcd" + b"x" * 5, b"\x01\x81abcdx"], ids=["of a frame", "of fragments"]
)
@pytest.mark.slow
def test_an_incomplete_message_times_out(tmp_path: Path, beginning: bytes) -> None:
    with (
        run_http_harness(tmp_path, settings=GatewayOptions(idle_seconds=0.5)) as harness,
        connect(harness.url.replace("http", "ws") + "/v1/stream") as socket,
    ):
        for fragment in (["{", "}"], ["{}"]):  # both are complete in time, and get an error
            socket.send(fragment)
            assert json.loads(socket.recv(HANG_SECONDS))["type"] == "error"
            time.sleep(0.3)
        began = time.monotonic()
        socket.socket.sendall(beginning)
        with pytest.raises(ConnectionClosedError) as closed:
            socket.recv(HANG_SECONDS)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "a message took too long")
        assert time.monotonic() - began >= 0.4
        assert time.monotonic() - began >= 0.4


def upgrade(connection: socket.socket, more: str = "") -> bytes:
    """Make a WebSocket of the connection, of which this test sends the bytes itself; the answer's headers."""
    name = base64.b64encode(os.urandom(16)).decode()
    connection.sendall(
        "GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {name}\r\n{more}\r\n".encode()
    )
    head = connection.recv(65_536)
    assert head.startswith(b"HTTP/1.1 101")
    return head.lower()


def stream_of(harness: HttpHarness, key: str | None = None) -> ClientConnection:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    address = harness.url.replace("http", "ws") + "/v1/stream"
    return connect(address, additional_headers=headers)


def close_code(socket: ClientConnection) -> int:
    """By which the gateway closes the connection, whatever it sends before."""
    with pytest.raises(ConnectionClosedError) as closed:
        list(iter(lambda: socket.recv(HANG_SECONDS), None))
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code


@pytest.mark.slow
def test_a_compressed_message_is_refused_and_never_inflated(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness, dial(harness) as connection:
        assert b"permessage-deflate" not in upgrade(connection, "Sec-WebSocket-Extensions: permessage-deflate\r\n")
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
        data = deflate.compress(b"A" * 100_000) + deflate.flush(zlib.Z_SYNC_FLUSH)
        connection.sendall(b"\xc1\xfe" + len(data).to_bytes(2) + bytes(4) + data)
        said = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert said[:1] == b"\x88", "it is no close frame"
    assert int.from_bytes(said[2:4]) == 1002, "a protocol error: compression was not agreed on"


@pytest.mark.slow
def test_messages_over_websockets_count_against_the_budget_of_bodies(tmp_path: Path) -> None:
    """From when they are received, whole or not, until they are parsed."""
    unfinished = b"\x81\xff" + (90_000).to_bytes(8) + bytes(4) + b"x" * 60_000
    with (
        run_http_harness(
            tmp_path, auth="keys", settings=GatewayOptions(max_body_bytes=100_000, max_buffered_body_bytes=200_000)
        ) as harness,
        ExitStack() as opened,
    ):
        keys = {tenant: harness.keys.create(tenant, (Scope.INFERENCE,))[1] for tenant in ("greedy", "other", "third")}
        http = {tenant: opened.enter_context(harness.http(key)) for tenant, key in keys.items()}
        with stream_of(harness, keys["greedy"]) as first, stream_of(harness, keys["greedy"]) as second:
            first.socket.sendall(unfinished)
            wait_for(lambda: harness.app.bodies._total >= 60_000, "it is not counted")
            second.socket.sendall(unfinished)
            assert close_code(second) == 1013, "a tenant has half of the budget"
            with stream_of(harness, keys["other"]) as others:
                body = {"model": "x" * 60_000}
                refused = http["greedy"].post("/v1/chat/completions", json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
                assert "Retry-After" in refused.headers
                assert (
                    http["other"].post("/v1/chat/completions", json=body).json()["error"]["code"] == "invalid_request"
                )
                others.socket.sendall(unfinished)
                wait_for(lambda: harness.app.bodies._total >= 120_000, "it is not counted")
                refused = http["third"].post("/v1/chat/completions", json={"model": "x" * 90_000})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_requests")
        wait_for(lambda: not harness.app.bodies._total, "it is not released")
        with stream_of(harness, keys["third"]) as third:
            for size in (40_000, 90_000, 90_000):
                third.send(json.dumps({"type": "x" * size}))
                assert json.loads(third.recv(60))["type"] == "error"
            third.socket.sendall(unfinished)
        wait_for(lambda: not harness.app.bodies._total, "it is not released")
        assert not harness.app.bodies._by_sender


@pytest.mark.slow
def test_a_message_of_many_empty_fragments_is_refused_as_too_large(tmp_path: Path) -> None:
    long_timeout = GatewayOptions(idle_seconds=HANG_SECONDS)  # else a slow machine ends the message for its age
    with run_http_harness(tmp_path, settings=long_timeout) as harness, stream_of(harness) as socket:
        socket.socket.sendall(b"\x01\x81abcdx" + b"\x00\x80abcd" * 450_000)
        assert close_code(socket) == 1009
        wait_for(lambda: not harness.app.bodies._total, "it is not released")


@pytest.mark.slow
def test_the_number_of_unread_messages_is_bounded(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness, stream_of(harness) as socket:
        socket.socket.sendall(b"\x81\x82\0\0\0\0{}" * 30_000)
        assert close_code(socket) == 1008
        wait_for(lambda: not harness.app.bodies._total, "it is not released")


@pytest.mark.slow
def test_a_peer_that_sends_pings_and_reads_nothing_gets_no_further_pongs(tmp_path: Path) -> None:
    pings, batch = 80_000, 1_000
    with run_http_harness(tmp_path) as harness, dial(harness) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        upgrade(connection)
        connection.settimeout(HANG_SECONDS)
        for _ in range(pings // batch):
            connection.sendall((b"\x89\xfd\0\0\0\0" + b"x" * 125) * batch)
        connection.sendall(b"\x88\x82\0\0\0\0" + (1000).to_bytes(2))
        came = sum(map(len, iter(lambda: connection.recv(1 << 20), b"")))
    assert 0 < came < 0.9 * pings * 127


@pytest.mark.slow
def test_open_websockets_are_bounded_by_tenant_and_in_total(tmp_path: Path) -> None:
    def refusal(key: str) -> tuple[int, str, str | None]:
        with pytest.raises(InvalidStatus) as refused, stream_of(harness, key):
            pass
        answer = refused.value.response
        return answer.status_code, json.loads(answer.body)["error"]["code"], answer.headers.get("retry-after")

    settings = GatewayOptions(max_websockets=3, max_tenant_websockets=2)
    with run_http_harness(tmp_path, settings=settings) as harness:
        ours, theirs, others = (harness.keys.create(tenant, (Scope.INFERENCE,))[1] for tenant in "abc")
        with stream_of(harness, ours), stream_of(harness, theirs):
            with stream_of(harness, ours):
                assert refusal(ours) == (429, "too_many_websockets", "5")
                assert refusal(others) == (503, "too_many_connections", "5")
            wait_for(lambda: harness.app.active == 2, "it is still open")
            with stream_of(harness, others):
                pass
