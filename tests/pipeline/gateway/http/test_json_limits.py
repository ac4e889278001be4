"""JSON bodies are checked and parsed without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.gateway.http.body_reading import parse_object, parse_object_off_loop
from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.http.json_limits import MAX_CONTAINERS_AND_KEYS, MAX_VALUES, check_bounds
from pipeline.gateway.limits.admission import RateSettings
from pipeline.planner.readers.jsonl import nested_deeper
from schemas.requests.limits import RateLimits
from tests.patient_websocket import connect
from tests.pipeline.gateway.http_harness import run_http_harness
from tests.waiting import HANG_SECONDS

SIZE = 10 << 20
BODIES = {
    "lists": b'{"a":[' + b"[]," * (SIZE // 3) + b"[]]}",
    "objects": b'{"a":[' + b"{}," * (SIZE // 3) + b"{}]}",
    "strings": b'{"a":[' + b'"",' * (SIZE // 3) + b'""]}',
    "quotes": b'"' * SIZE,
    "numbers": b'{"a":[' + b"1," * (SIZE // 2) + b"1]}",
    "keys": b"{" + b'"":1,' * (SIZE // 5) + b'"":1}',
    "closing": b"]" * SIZE,
    "backslashes": b'{"a":"' + b"\\\\" * (SIZE // 2) + b'"}',
    "quoted quotes": b'{"a":"' + b'\\"' * (SIZE // 2) + b'"}',
    "text": b'{"a":"' + "é😀[,".encode() * (SIZE // 8) + b'"}',
    "as many numbers as may be": b'{"a":[' + b"12345," * (MAX_VALUES - 1) + b"1]}",
    "as many strings as may be": b'{"a":[' + b'"ab",' * (MAX_VALUES - 1) + b'"a"]}',
    "as many lists as may be": b'{"a":[' + b"[]," * (MAX_CONTAINERS_AND_KEYS - 4) + b"[]]}",
    "as many keys as may be": b"{" + b",".join(b'"%d":1' % n for n in range(MAX_CONTAINERS_AND_KEYS - 1)) + b"}",
}


def test_a_large_body_is_parsed_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[threading.Thread] = []

    def parse(data: bytes) -> object:
        parsers.append(threading.current_thread())
        return orjson.loads(data)

    monkeypatch.setattr("pipeline.gateway.http.body_reading.orjson", SimpleNamespace(loads=parse))
    asyncio.run(parse_object_off_loop(BODIES["text"], 64))
    assert len(parsers) == 1
    assert parsers[0] is not threading.main_thread()


@pytest.mark.parametrize("name", BODIES)
def test_bounds_are_checked_window_by_window(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is as much as is counted while the interpreter's lock is held."""
    sizes: list[int] = []

    class Body(bytes):
        def __getitem__(self, index: Any) -> Any:
            sizes.append(len(found := super().__getitem__(index)))
            return found

    with contextlib.suppress(ApiError):
        check_bounds(Body(BODIES[name]), 64)
    assert 0 < max(sizes) <= 64 << 10


@pytest.mark.slow
def test_bodies_with_too_many_values_are_refused() -> None:
    for name in ("lists", "objects", "strings", "quotes", "numbers", "keys"):
        with pytest.raises(ApiError) as refused:
            parse_object(BODIES[name], 64)
        assert (refused.value.status, refused.value.code) == (413, "body_too_large"), name
    for name in ("text", "backslashes", "quoted quotes", *(name for name in BODIES if name.startswith("as many"))):
        assert parse_object(BODIES[name], 64) == orjson.loads(BODIES[name]), name


def _texts() -> st.SearchStrategy[bytes]:
    strings = st.text(st.sampled_from('a\\"[]{},:\n'), max_size=20)

    def around(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
        return st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=3)

    return st.recursive(strings | st.integers(0, 9), around).map(orjson.dumps)


@given(_texts(), st.integers(0, 8), st.integers(1, 9))
@pytest.mark.slow
def test_depth_is_counted_correctly_for_any_window_boundary(text: bytes, depth: int, window: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pipeline.gateway.http.json_limits._WINDOW", window)
        try:
            check_bounds(text, depth)
            deeper = False
        except ApiError:
            deeper = True
    assert deeper is nested_deeper(text, depth)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with run_http_harness(
        tmp_path, rates=RateSettings(tenant=RateLimits(requests_per_minute=3), window=86_400)
    ) as harness:
        yield harness.url.replace("http", "ws") + "/v1/stream"


@pytest.mark.slow
def test_each_websocket_message_counts_as_a_request_before_it_is_parsed(url: str) -> None:
    with connect(url) as socket:
        for said, code in (
            ("{", "invalid_json"), ("[" * 99, "invalid_json"), ('{"type": "resume"}', "invalid_request"),
            ("{", "rate_limit_exceeded"), ("[" * 99, "rate_limit_exceeded"),
        ):  # fmt: skip
            socket.send(said)
            assert orjson.loads(socket.recv(HANG_SECONDS))["error"]["code"] == code
        socket.send('{"type": "cancel"}')
        with pytest.raises(TimeoutError):
            socket.recv(0.2)
