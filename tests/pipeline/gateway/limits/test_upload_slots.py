"""Nobody keeps others from uploading: not with many uploads, and not with slow ones after a quick beginning."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.routes.dependencies import GatewaySettings
from tests.pipeline.gateway.http_harness import HttpHouse, http_house, lines
from tests.waiting import HANG_SECONDS

START = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
FORM: Any = {"files": {"file": ("a.jsonl", lines(1))}, "data": {"purpose": "batch"}}


def begin(house: HttpHouse, key: str) -> socket.socket:
    """An upload that isn't gone on with."""
    host, port = house.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(HANG_SECONDS)
    head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: 90000000\r\n"
    connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode() + START)
    return connection


def test_a_tenant_has_half_of_the_places(tmp_path: Path) -> None:
    with http_house(tmp_path, settings=GatewaySettings(uploads_at_once=4)) as house, ExitStack() as held:
        _, mine = house.keys.create("acme", (Scope.FILES,))
        _, other = house.keys.create("other", (Scope.FILES,))
        for _ in range(2):
            held.enter_context(begin(house, mine))
        time.sleep(0.2)
        with house.http(mine) as http:
            refused = http.post("/v1/files", **FORM)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_uploads")
        with house.http(other) as http:
            assert http.post("/v1/files", **FORM).status_code == 200
            for _ in range(2):
                held.enter_context(begin(house, other))
            time.sleep(0.2)
            assert http.post("/v1/files", **FORM).status_code == 503


def test_a_burst_buys_no_time_to_trickle(tmp_path: Path) -> None:
    with http_house(tmp_path, settings=GatewaySettings(idle_seconds=0.3)) as house:
        _, key = house.keys.create("acme", (Scope.FILES,))
        with begin(house, key) as connection:
            connection.sendall(b"x" * (16 << 20))
            connection.settimeout(0.05)
            said = b""
            while not said:
                connection.sendall(b"x")
                try:
                    said = connection.recv(65_536)
                except TimeoutError:
                    continue
        assert b" 408 " in said
