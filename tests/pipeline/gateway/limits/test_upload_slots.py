"""One tenant can't block the uploads of others, neither with many uploads nor with slow ones after a fast start."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from pipeline.gateway.http.api_keys import Scope
from schemas.settings.gateway import GatewayOptions
from tests.pipeline.gateway.http_harness import HttpHarness, lines, run_http_harness
from tests.waiting import HANG_SECONDS

START = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
FORM: Any = {"files": {"file": ("a.jsonl", lines(1))}, "data": {"purpose": "batch"}}


def begin(harness: HttpHarness, key: str) -> socket.socket:
    """An upload that isn't gone on with."""
    host, port = harness.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(HANG_SECONDS)
    head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: 90000000\r\n"
    connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode() + START)
    return connection


def test_a_tenant_holds_at_most_half_of_the_upload_slots(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, settings=GatewayOptions(max_concurrent_uploads=4)) as harness, ExitStack() as held:
        _, mine = harness.keys.create("acme", (Scope.FILES,))
        _, other = harness.keys.create("other", (Scope.FILES,))
        for _ in range(2):
            held.enter_context(begin(harness, mine))
        time.sleep(0.2)
        with harness.http(mine) as http:
            refused = http.post("/v1/files", **FORM)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_uploads")
        with harness.http(other) as http:
            assert http.post("/v1/files", **FORM).status_code == 200
            for _ in range(2):
                held.enter_context(begin(harness, other))
            time.sleep(0.2)
            assert http.post("/v1/files", **FORM).status_code == 503


def test_a_fast_start_allows_no_slow_rest_of_an_upload(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, settings=GatewayOptions(idle_seconds=0.3)) as harness:
        _, key = harness.keys.create("acme", (Scope.FILES,))
        with begin(harness, key) as connection:
            connection.sendall(b"x" * (16 << 20))
            connection.settimeout(0.05)
            said: bytes | None = None
            while said is None:
                with suppress(OSError):  # a full buffer, or the server has answered and closed
                    connection.sendall(b"x")
                with suppress(TimeoutError):
                    said = connection.recv(65_536)
        assert b" 408 " in said
