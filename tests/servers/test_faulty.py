"""The fault proxies inject the configured faults, and nothing else."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.servers.faulty_http import FaultyHttp
from tests.servers.faulty_tcp import FaultyTcp
from tests.servers.moto import MotoServer
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS

SIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
"""A signature that moto accepts."""


@pytest.fixture
def proxy(s3_server: MotoServer) -> Iterator[FaultyHttp]:
    with FaultyHttp(s3_server.endpoint, seed=3) as proxy:
        yield proxy


@pytest.fixture
def wire(redis_server: RedisServer) -> Iterator[FaultyTcp]:
    with FaultyTcp(redis_server.port) as wire:
        yield wire


def request(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_SECONDS)
    try:
        connection.request(method, path, body, {"Authorization": SIGNED})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_without_faults_all_is_passed_on(proxy: FaultyHttp, unique_name: Callable[[], str]) -> None:
    bucket, body = unique_name(), bytes(range(256)) * 1_000
    assert request(proxy.port, "PUT", f"/{bucket}")[0] == 200
    assert request(proxy.port, "PUT", f"/{bucket}/key", body)[0] == 200
    assert request(proxy.port, "GET", f"/{bucket}/key") == (200, body)
    assert request(proxy.port, "HEAD", f"/{bucket}/key") == (200, b"")
    assert request(proxy.port, "GET", f"/{bucket}/none")[0] == 404
    assert [seen.outcome for seen in proxy.seen] == [200, 200, 200, 200, 404]
    assert (proxy.count(), proxy.count("PUT"), proxy.count("GET", "/none")) == (5, 2, 1)


@pytest.mark.slow
def test_each_fault_hits_what_it_fits_as_often_as_it_should(
    proxy: FaultyHttp, s3_server: MotoServer, unique_name: Callable[[], str]
) -> None:
    bucket = s3_server.make_bucket(unique_name())
    path = f"/{bucket}/key"
    busy = proxy.add("status", method="PUT", times=2)
    assert [request(proxy.port, "PUT", path, b"1")[0] for _ in range(3)] == [503, 503, 200]
    assert busy.hits == 2

    proxy.add("lost", method="PUT", path="/lost", times=1)
    with pytest.raises((http.client.HTTPException, OSError)):
        request(proxy.port, "PUT", f"/{bucket}/lost", b"done")
    assert request(s3_server.port, "GET", f"/{bucket}/lost") == (200, b"done"), "done, but the response is lost"

    proxy.add("dropped", method="PUT", path="/dropped", times=1)
    with pytest.raises((http.client.HTTPException, OSError)):
        request(proxy.port, "PUT", f"/{bucket}/dropped", b"1")
    assert request(s3_server.port, "GET", f"/{bucket}/dropped")[0] == 404

    proxy.add("cut", method="GET", path="/lost", times=1)
    with pytest.raises(http.client.IncompleteRead) as caught:
        request(proxy.port, "GET", f"/{bucket}/lost")
    assert caught.value.partial == b"do"

    began = time.monotonic()
    proxy.add("late", method="PUT", path="/late", seconds=0.3, times=1)
    assert request(proxy.port, "PUT", f"/{bucket}/late", b"1")[0] == 200
    assert time.monotonic() - began >= 0.3

    proxy.add("slow", seconds=0.3, times=1)
    began = time.monotonic()
    assert request(proxy.port, "GET", f"/{bucket}/lost") == (200, b"done")
    assert time.monotonic() - began >= 0.3

    proxy.add("status", status=500)
    proxy.clear()
    assert request(proxy.port, "GET", f"/{bucket}/lost") == (200, b"done")


def test_chance_hits_some_and_the_same_seed_the_same(s3_server: MotoServer) -> None:
    def outcomes() -> list[int | str]:
        with FaultyHttp(s3_server.endpoint, seed=5) as proxy:
            proxy.add("status", chance=0.5)
            for _ in range(20):
                request(proxy.port, "GET", "/moto-api/")
            return [seen.outcome for seen in proxy.seen]

    first = outcomes()
    assert set(first) == {200, 503}
    assert outcomes() == first


def send_command(connection: socket.socket, words: bytes = b"PING\r\n") -> bytes:
    connection.sendall(words)
    return connection.recv(4096)


def closed(connection: socket.socket) -> bool:
    try:
        return send_command(connection) == b""
    except ConnectionError:
        return True


def connect(wire: FaultyTcp) -> socket.socket:
    return socket.create_connection(("127.0.0.1", wire.port), timeout=HANG_SECONDS)


def test_a_wire_delays_cuts_refuses_and_falls_silent(wire: FaultyTcp) -> None:
    with connect(wire) as connection:
        assert send_command(connection) == b"+PONG\r\n"
        wire.delay = 0.1
        began = time.monotonic()
        assert send_command(connection) == b"+PONG\r\n"
        assert time.monotonic() - began >= 0.2
        wire.restore()

        wire.silence()
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            send_command(connection)
        connection.settimeout(HANG_SECONDS)
        wire.restore()
        assert connection.recv(4096) == b"+PONG\r\n"

        wire.cut()
        assert closed(connection)

    wire.refuse()
    with connect(wire) as connection:
        assert closed(connection)
    wire.restore()
    with connect(wire) as connection:
        assert send_command(connection) == b"+PONG\r\n"
