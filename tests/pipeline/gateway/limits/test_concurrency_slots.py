"""A concurrency slot is released before the caller gets the end of its response, so that its next request isn't
refused, however slow the release is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from websockets.sync.client import ClientConnection

from pipeline.adapters.system_clock import SystemClock
from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.inference.responses import StreamSettings
from pipeline.gateway.limits.admission import RateLimiter, RateSettings
from pipeline.gateway.limits.concurrency_slots import MemoryConcurrencySlots
from schemas.requests.limits import RateLimits
from schemas.settings.gateway import GatewayOptions
from tests.patient_websocket import connect
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.pipeline.gateway.lane_worker import words
from tests.waiting import HANG_SECONDS, wait_for

CHAT = "/v1/chat/completions"
LIMITS = RateLimits(running_requests=1, tokens_per_minute=100_000)
SLOW = 0.2


class SlowSlots(MemoryConcurrencySlots):
    """Slots are released slowly, as over a busy network."""

    def leave(self, name: str, request: str, rows: int = 1) -> None:
        time.sleep(SLOW)
        super().leave(name, request, rows)


def slow_harness(folder: Path, running: MemoryConcurrencySlots | None = None, **more: Any) -> Any:
    clock = SystemClock()
    limiter = RateLimiter(clock, RateSettings(tenant=LIMITS, window=86_400), running=running or SlowSlots(clock))
    return run_http_harness(folder, limiter=limiter, **more)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[HttpHarness]:
    with slow_harness(tmp_path) as harness:
        yield harness


def body(said: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": said}], "max_tokens": 5, **more}


def whole(http: httpx2.Client) -> None:
    answer = http.post(CHAT, json=body())
    assert answer.json()["choices"][0]["message"]["content"] == words(5)


def vectors(http: httpx2.Client) -> None:
    answer = http.post("/v1/embeddings", json={"model": "tiny", "input": ["a", "b"]})
    assert [one["embedding"] for one in answer.json()["data"]] == [[0.5, -0.5]] * 2


def refused(http: httpx2.Client) -> None:
    answer = http.post(CHAT, json=body("refuse"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def refused_stream(http: httpx2.Client) -> None:
    answer = http.post(CHAT, json=body("refuse", stream=True))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def stream_until(mark: bytes, said: str = "hello", **more: Any) -> Callable[[httpx2.Client], None]:
    """Reads a stream no further than to `mark`."""

    def read(http: httpx2.Client) -> None:
        came = b""
        with http.stream("POST", CHAT, json=body(said, stream=True, **more)) as answer:
            for data in answer.iter_bytes():
                came += data
                if mark in came:
                    again(http)  # and not when the connection has been closed
                    return
        pytest.fail(f"no {mark!r} in {came!r}")

    return read


def again(http: httpx2.Client) -> None:
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 1})
    assert (answer.status_code, answer.json().get("error")) == (200, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(whole, id="a whole answer"),
        pytest.param(vectors, id="embeddings"),
        pytest.param(refused, id="a refusal"),
        pytest.param(refused_stream, id="a refused stream"),
        pytest.param(stream_until(b'"finish_reason":"length"'), id="a stream's end"),
        pytest.param(stream_until(b"total_tokens", stream_options={"include_usage": True}), id="a stream's usage"),
        pytest.param(stream_until(b"[DONE]"), id="a stream's last event"),
        pytest.param(stream_until(b"engine_error", "break"), id="a stream's error"),
    ],
)
def test_a_caller_with_the_end_of_a_response_can_send_its_next_request_at_once(
    harness: HttpHarness, call: Callable[[httpx2.Client], None]
) -> None:
    with harness.http() as http:
        for _ in range(2):
            call(http)
            again(http)


def test_a_cached_response_holds_a_slot_only_while_it_is_sent(harness: HttpHarness) -> None:
    request = body(temperature=0, tokenmill={"cache": True})
    with harness.http() as http:
        http.post(CHAT, json=request)

        def cached() -> bool:
            answer = http.post(CHAT, json=request)
            assert answer.status_code == 200
            return bool(answer.json()["usage"].get("tokenmill_cached"))

        wait_for(cached, "the answer is not cached")
        again(http)
        stream_until(b"[DONE]", temperature=0, tokenmill={"cache": True})(http)


def test_unused_tokens_are_released_with_the_response(harness: HttpHarness) -> None:
    client = harness.client()
    left = []
    for _ in range(3):
        answer = client.chat.completions.with_raw_response.create(**body(max_tokens=None))
        left.append(int(answer.headers["x-ratelimit-remaining-tokens"]))
        assert answer.parse().usage.total_tokens == 8  # type: ignore[union-attr]
    assert [left[0] - left[1], left[1] - left[2]] == [8, 8]


def test_a_stream_without_a_worker_releases_its_slot(tmp_path: Path) -> None:
    with slow_harness(tmp_path, streams=StreamSettings(max_resumable=0)) as harness, harness.http() as http:
        response = http.post(CHAT, json=body(stream=True, tokenmill={"resume": 5}))
        assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_streams")
        again(http)


def test_resumable_streams_of_one_tenant_dont_block_other_tenants(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, streams=StreamSettings(max_resumable=3, max_resumable_per_tenant=2)) as harness:
        keys = {name: harness.keys.create(name, (Scope.INFERENCE,))[1] for name in ("one", "other", "third")}

        def begin(name: str) -> str:
            with harness.http(keys[name]) as http:
                answer = http.post(CHAT, json=body(stream=True, tokenmill={"resume": 60}))
            error = answer.json()["error"] if answer.status_code == 429 else {"message": "begun", "code": "begun"}
            assert error["code"] in ("begun", "too_many_streams")
            return str(error["message"]).partition(";")[0]

        assert [begin("one") for _ in range(3)] == ["begun", "begun", full("2 of this tenant's")]
        assert [begin("other"), begin("third")] == ["begun", full("3")]


def full(of: str) -> str:
    return f"{of} streams that can be gone on with are open"


def test_a_too_slow_reader_can_send_its_request_again(tmp_path: Path) -> None:
    with (
        slow_harness(tmp_path, streams=StreamSettings(buffer_bytes=2_000, first_event_timeout_seconds=0.0)) as harness,
        harness.http() as http,
    ):
        harness.worker.text = "x" * 1_500
        stream_until(b"stream_overrun", max_tokens=2_000)(http)


def test_a_stream_cut_off_by_shutdown_releases_its_slot_before_its_last_event(tmp_path: Path) -> None:
    running = SlowSlots(SystemClock())
    with slow_harness(tmp_path, running, settings=GatewayOptions(drain_seconds=0.1)) as harness:
        harness.worker.pause = 0.01
        with harness.http() as http, http.stream("POST", CHAT, json=body(max_tokens=2_000, stream=True)) as answer:
            came = b""
            for data in answer.iter_bytes():
                came += data
                harness.stop.set()
                if b'"draining"' in came:
                    assert running.enter("tenant/default", "another", 1, 1.0), "there is no folder"
                    return
    pytest.fail(f"it was not ended: {came[-500:]!r}")


def test_a_classification_counts_its_choices_as_rows(tmp_path: Path) -> None:
    clock = SystemClock()
    limiter = RateLimiter(clock, RateSettings(tenant=RateLimits(running_rows=6)), running=MemoryConcurrencySlots(clock))
    with run_http_harness(tmp_path, limiter=limiter) as harness, harness.http() as http:
        harness.worker.stop_taking()
        given = {"model": "tiny", "input": ["a", "b"], "choices": ["x", "y"]}
        wide = http.post("/v1/classify", json=given | {"choices": ["w", "x", "y", "z"]})
        error = wide.json()["error"]
        assert (wide.status_code, error["param"]) == (429, "choices")
        assert error["message"] == ("choices asks for 8 rows, but this tenant may have 6 under way; send more requests")
        with ThreadPoolExecutor() as pool:
            first = pool.submit(http.post, "/v1/classify", json=given)
            wait_for(lambda: not limiter_has_room(limiter, 3))
            assert limiter_has_room(limiter, 2)
            harness.worker.hold.clear()
            assert first.result(HANG_SECONDS).status_code == 200


def limiter_has_room(limiter: RateLimiter, rows: int) -> bool:
    """Whether the default tenant may have this many more rows under way."""
    caller = Caller("default", frozenset(Scope))
    try:
        limiter.release(limiter.admit(caller, "probe", 1, 60.0, rows), 1)
    except ApiError:
        return False
    return True


@pytest.fixture
def socket(harness: HttpHarness) -> Iterator[ClientConnection]:
    with connect(f"{harness.url.replace('http', 'ws')}/v1/stream") as socket:
        yield socket


def send_request(socket: ClientConnection, said: str = "hello", **more: Any) -> None:
    socket.send(orjson.dumps({"type": "request", "url": CHAT, "body": body(said, **more)}))


def receive_all(socket: ClientConnection) -> list[dict[str, Any]]:
    """All messages, to the last one."""
    came = []
    while not came or came[-1]["type"] not in ("done", "error"):
        came.append(orjson.loads(socket.recv(HANG_SECONDS)))
    return came


@pytest.mark.parametrize(("said", "last"), [("hello", "done"), ("break", "done"), ("refuse", "error")])
def test_cached_responses_over_a_websocket(
    harness: HttpHarness, socket: ClientConnection, said: str, last: str
) -> None:
    with harness.http() as http:
        for _ in range(3):
            send_request(socket, said)
            assert receive_all(socket)[-1]["type"] == last
            again(http)
    for _ in range(3):
        send_request(socket, said)
        assert receive_all(socket)[-1].get("error", {}).get("code") in (None, "context_length_exceeded")


@pytest.mark.parametrize("after", [0, 1])
def test_a_request_cancelled_on_a_websocket_releases_its_slot_before_the_next(
    harness: HttpHarness, socket: ClientConnection, after: int
) -> None:
    """Also where it is cancelled before it has begun."""
    harness.worker.pause = 0.01
    for _ in range(3):
        send_request(socket, max_tokens=1_000)
        for _ in range(after):
            assert orjson.loads(socket.recv(HANG_SECONDS))["type"] == "begin"
        socket.send(orjson.dumps({"type": "cancel"}))
        send_request(socket, max_tokens=2)
        assert receive_all(socket)[-1] == {"type": "done"}
