"""What holds for connections, whatever is asked over them."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from pipeline.gateway.auth import Authority
from tests.pipeline.gateway.http_house import HttpHouse, http_house
from tests.pipeline.gateway.waiting import until

SIZE = 40 << 20


def dial(house: HttpHouse) -> socket.socket:
    host, port = house.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(10)
    return connection


def told(connection: socket.socket, request: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers by lower-case names, and JSON, up to when the server hangs up."""
    connection.sendall(request)
    said = b""
    while piece := connection.recv(65_536):
        said += piece
    head, _, body = said.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
    return int(first.split()[1]), headers, json.loads(body)


def test_an_answers_body_does_not_wait_until_its_headers_are_acknowledged(tmp_path: Path) -> None:
    """Kernels acknowledge what comes alone after 40 ms."""
    with http_house(tmp_path) as house, house.http() as http:
        seconds = []
        for _ in range(30):
            began = time.perf_counter()
            http.get("/healthz")
            seconds.append(time.perf_counter() - began)
    assert min(seconds[15:]) < 0.02, seconds


def test_connections_beyond_the_bound_are_told_so_and_closed(tmp_path: Path) -> None:
    with http_house(tmp_path, most_connections=3) as house, ExitStack() as open_ones:
        for _ in range(3):
            idle = open_ones.enter_context(dial(house))
            idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in idle.recv(65_536)
        with dial(house) as further:
            status, headers, body = told(further, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "too_many_connections", "5")
        assert headers["x-request-id"].startswith("req-")
        idle.close()
        with house.http() as http:
            assert http.get("/healthz").status_code == 200


def test_even_what_is_no_http_is_answered_with_an_id(tmp_path: Path) -> None:
    with http_house(tmp_path) as house, dial(house) as connection:
        status, headers, body = told(connection, b"what?\r\n\r\n")
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert headers["x-request-id"].startswith("req-")


def test_a_websocket_that_is_refused_is_told_why_as_any_request_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(path: str, **more: Any) -> tuple[int, str, Any]:
        with pytest.raises(InvalidStatus) as refused, connect(house.url.replace("http", "ws") + path, **more):
            pass
        answer = refused.value.response
        assert answer.headers["x-request-id"].startswith("req-")
        return answer.status_code, json.loads(answer.body)["error"]["code"], answer.headers.get("retry-after")

    with http_house(tmp_path) as house:
        assert refusal("/v1/streams") == (404, "not_found", None)
        assert refusal("/v1/stream", origin="http://evil.example") == (403, "other_origin", None)
        with monkeypatch.context() as broken:
            broken.setattr(Authority, "caller", lambda *_: 1 / 0)
            assert refusal("/v1/stream") == (500, "internal_error", None)
        house.app._most = 0
        assert refusal("/v1/stream") == (503, "too_many_requests", "5")
        house.app._most = 10
        with connect(house.url.replace("http", "ws") + "/v1/stream") as good:
            assert good.response is not None
            assert good.response.headers["x-request-id"].startswith("req-")
            assert house.app.active == 1


def test_a_reader_who_takes_nothing_is_hung_up_on_and_a_slow_one_is_not(tmp_path: Path) -> None:
    with http_house(tmp_path, write_seconds=0.5) as house, house.http() as http:
        form: Any = {"files": {"file": ("a.jsonl", b"x" * SIZE)}, "data": {"purpose": "batch"}}
        file = http.post("/v1/files", **form).json()["id"]
        wanted = f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        with dial(house) as idle, dial(house) as slow:
            for connection in (idle, slow):
                connection.sendall(wanted)
            until(lambda: house.app.active == 2, "they did not begin")
            came, began = 0, time.monotonic()
            while piece := slow.recv(1 << 20):
                came += len(piece)
                time.sleep(0.05)
            assert came > SIZE
            assert time.monotonic() - began > 1.5, "it was not slow"
            until(lambda: not house.app.active, "it is waited for")


def test_a_message_that_is_too_large_is_not_waited_for(tmp_path: Path) -> None:
    """It is hung up on as soon as it says how large it is."""
    with http_house(tmp_path) as house, connect(house.url.replace("http", "ws") + "/v1/stream") as socket:
        socket.socket.sendall(b"\x81\xff" + (11 << 20).to_bytes(8) + bytes(4))
        with pytest.raises(ConnectionClosedError) as closed:
            socket.recv(5)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


@pytest.mark.parametrize(
    "beginning", [b"\x81\xa0abcd" + b"x" * 5, b"\x01\x81abcdx"], ids=["of a frame", "of fragments"]
)
def test_a_message_that_does_not_come_to_its_end_is_not_waited_for(tmp_path: Path, beginning: bytes) -> None:
    with (
        http_house(tmp_path, message_seconds=0.5) as house,
        connect(house.url.replace("http", "ws") + "/v1/stream") as socket,
    ):
        for fragment in (["{", "}"], ["{}"]):  # both are whole in time, and told what is wrong with them
            socket.send(fragment)
            assert json.loads(socket.recv(5))["type"] == "error"
            time.sleep(0.3)
        began = time.monotonic()
        socket.socket.sendall(beginning)
        with pytest.raises(ConnectionClosedError) as closed:
            socket.recv(5)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "a message took too long")
        assert 0.4 < time.monotonic() - began < 3
