"""DNS rebinding gives no access to a gateway that needs no key."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin

from pipeline.gateway.http.api_keys import Scope
from schemas.settings.gateway import GatewayOptions
from tests.patient_websocket import connect
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness

OURS = (
    "localhost",
    "LOCALHOST:8000",
    "127.0.0.1",
    "127.0.0.1:80",
    "[::1]",
    "[::1]:8000",
    "10.1.2.3",
    "llm.example:443",
)
OTHERS = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "localhost@evil.example",
    "evil.example@localhost", "[::1].evil.example", "127.1", "[evil]", "",
)  # fmt: skip


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[HttpHarness]:
    with run_http_harness(tmp_path, settings=GatewayOptions(hosts=("LLM.example",))) as harness:
        yield harness


@pytest.mark.slow
def test_other_host_names_are_refused_while_no_key_is_needed(harness: HttpHarness) -> None:
    with harness.http() as http:
        for host in OURS:
            assert http.get("/v1/files", headers={"Host": host}).status_code == 200, host
        for host in OTHERS:
            # As a page does whose name has begun to lead here: its origin is the host that it requests.
            for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
                answer = http.get("/v1/files", headers=headers)
                assert answer.status_code == 403, host
                assert answer.json()["error"]["code"] in ("other_host", "other_origin")
        received = http.get(
            "/v1/files", headers={"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
        ).json()
        assert received["error"]["code"] == "other_host"
        assert "TOKENMILL_GATEWAY__HOSTS" in received["error"]["message"]
        assert http.get("/", headers={"Host": "evil.example"}).status_code == 403
        assert http.get("/healthz", headers={"Host": "evil.example"}).status_code == 200


def test_websockets_are_served_over_the_same_limits(harness: HttpHarness) -> None:
    host, port = harness.url.removeprefix("http://").split(":")
    with (
        socket.create_connection((host, int(port))) as dialled,
        pytest.raises(InvalidStatus) as refused,
        connect("ws://evil.example/v1/stream", sock=dialled, origin=Origin("http://evil.example")),
    ):
        pass
    assert refused.value.response.status_code == 403


def test_any_host_name_is_served_where_keys_are_required(harness: HttpHarness) -> None:
    _, key = harness.keys.create("acme", (Scope.FILES,))
    with harness.http(key) as http:
        assert http.get("/v1/files", headers={"Host": "anything.example"}).status_code == 200
