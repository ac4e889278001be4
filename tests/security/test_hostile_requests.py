"""Malicious requests: each is refused on its own, and other requests are served as usual."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.settings.gateway import GatewayOptions
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.waiting import HANG_SECONDS, wait_for

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpHarness]:
    settings = GatewayOptions(max_body_bytes=200_000, idle_seconds=0.5)
    with run_http_harness(tmp_path_factory.mktemp("harness"), settings=settings, header_seconds=0.5) as harness:
        yield harness


@pytest.fixture(autouse=True)
def serves_others(harness: HttpHarness) -> Iterator[None]:
    """Whatever a test does, the next caller is answered."""
    yield
    with harness.http() as http:
        assert http.post(CHAT, json=HELLO).status_code == 200


def dial(harness: HttpHarness) -> socket.socket:
    host, port = harness.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(HANG_SECONDS)
    return connection


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    said = b""
    try:
        while piece := connection.recv(65_536):
            said += piece
    except ConnectionError:
        pass
    return said


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 50_000 + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nA\x00: b\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}{}{}",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFFFFFFFF\r\n",
    ],
)
@pytest.mark.slow
def test_invalid_http_is_refused_and_the_connection_is_closed(harness: HttpHarness, request_bytes: bytes) -> None:
    with dial(harness) as connection:
        try:
            connection.sendall(request_bytes)
        except ConnectionError:
            return
        said = answer(connection)
    assert not said or b" 400 " in said.split(b"\r\n")[0], said[:200]
    if said:
        assert json.loads(said.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 30_000,
        b'{"model": "tiny", "messages": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
        b'{"model": "tiny", "seed": ' + b"9" * 100_000 + b"}",
        b'{"model": "tiny", "temperature": 1e999, "messages": []}',
        b'{"model": "tiny", "temperature": NaN, "messages": []}',
        b'{"model": "\xff\xfe"}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"\x1f\x8b\x08\x00" + b"\x00" * 1_000,
        b"null",
        b'"' + b"a" * 100_000 + b'"',
        json.dumps({**HELLO, "logit_bias": {str(n): 1 for n in range(9_000)}, "x": 1}).encode(),
        json.dumps({**HELLO, "stop": ["a"] * 10_000}).encode(),
        json.dumps({**HELLO, "n": 10**9}).encode(),
        json.dumps({**HELLO, "messages": [{"role": "user", "content": ["x"] * 9_000}]}).encode(),
        json.dumps({**HELLO, "tokenmill": {"timeout": 1e308}}).encode(),
    ],
)
def test_json_bombs_are_refused_quickly(harness: HttpHarness, body: bytes) -> None:
    with harness.http() as http:
        found = http.post(CHAT, content=body, headers=JSON)
    assert 400 <= found.status_code < 500, (body[:40], found.text[:200])
    assert found.json()["error"]["message"]
    assert len(found.content) < 5_000, "it is said again"


def test_a_body_that_is_too_large_is_not_read_to_its_end(harness: HttpHarness) -> None:
    with dial(harness) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000000000000\r\n\r\n{")
        assert b" 413 " in connection.recv(65_536)


@pytest.mark.slow
def test_connections_with_slow_headers_are_closed(harness: HttpHarness) -> None:
    """Slow-loris: a header now and then, for ever; also behind a good request, and without a byte."""
    good = f"GET /v1/models HTTP/1.1\r\nHost: {harness.url.removeprefix('http://')}\r\n\r\n".encode()
    for beginning in (b"GET /v1/models HTTP/1.1\r\n", b"", good + b"GET / HTTP/1.1\r\n"):
        with dial(harness) as connection:
            connection.sendall(beginning)
            began = time.monotonic()
            connection.settimeout(0.1)
            ended = False
            while not ended and time.monotonic() - began < HANG_SECONDS:
                try:
                    if beginning:
                        connection.sendall(b"X: a\r\n")
                    ended = connection.recv(65_536) == b""
                except TimeoutError:
                    continue
                except ConnectionError:
                    ended = True
            assert ended, beginning


@pytest.mark.slow
def test_a_body_sent_byte_by_byte_times_out(harness: HttpHarness) -> None:
    with dial(harness) as connection:
        connection.sendall(HEAD + b"Content-Length: 5000\r\n\r\n")
        connection.settimeout(0.1)
        began, said = time.monotonic(), b""
        while not said and time.monotonic() - began < HANG_SECONDS:
            connection.sendall(b" ")
            try:
                said = connection.recv(65_536)
            except TimeoutError:
                continue
        assert b" 408 " in said


@pytest.mark.slow
def test_many_slow_connections_dont_block_other_clients(harness: HttpHarness) -> None:
    slow = [dial(harness) for _ in range(100)]
    for connection in slow:
        connection.sendall(b"GET / HTTP/1.1\r\n")
    with harness.http() as http:
        assert http.get("/v1/models").status_code == 200
    for connection in slow:
        assert answer(connection) == b""
        connection.close()


@pytest.mark.slow
def test_the_bytes_of_all_bodies_are_bounded(tmp_path: Path) -> None:
    with run_http_harness(
        tmp_path, settings=GatewayOptions(max_body_bytes=250_000, max_buffered_body_bytes=500_000)
    ) as small:
        held = [dial(small) for _ in range(2)]
        for connection in held:
            connection.sendall(HEAD + b"Content-Length: 190000\r\n\r\n" + b" " * 120_000)
        time.sleep(0.2)
        with small.http() as http:
            large = HELLO | {"user": "x" * 50_000}
            refused = http.post(CHAT, json=large)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
            assert http.post(CHAT, json=HELLO).status_code == 200
            for connection in held:
                connection.close()
            wait_for(lambda: http.post(CHAT, json=large).status_code != 429, "it is held for good")
