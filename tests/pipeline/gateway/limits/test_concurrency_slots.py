"""A concurrency slot is released before the caller gets the end of its response, so that its next request isn't
refused, however slow the release is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pipeline.adapters.system_clock import SystemClock
from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.inference.responses import StreamSettings
from pipeline.gateway.limits.admission import RateLimiter, RateSettings
from pipeline.gateway.limits.concurrency_slots import MemoryConcurrencySlots
from schemas.requests.limits import RateLimits
from schemas.settings.gateway import GatewayOptions
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.pipeline.gateway.lane_worker import words
from tests.waiting import wait_for

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_unused_tokens_are_released_with_the_response(harness: HttpHarness) -> None:
    client = harness.client()
    left = []
    for _ in range(3):
        answer = client.chat.completions.with_raw_response.create(**body(max_tokens=None))
        left.append(int(answer.headers["x-ratelimit-remaining-tokens"]))
        assert answer.parse().usage.total_tokens == 8  # type: ignore[union-attr]
    assert [left[0] - left[1], left[1] - left[2]] == [8, 8]


@pytest.mark.slow
def test_a_stream_without_a_worker_releases_its_slot(tmp_path: Path) -> None:
    with slow_harness(tmp_path, streams=StreamSettings(max_resumable=0)) as harness, harness.http() as http:
        response = http.post(CHAT, json=body(stream=True, tokenmill={"resume": 5}))
        assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_streams")
        again(http)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_too_slow_reader_can_send_its_request_again(tmp_path: Path) -> None:
    with (
        slow_harness(tmp_path, streams=StreamSettings(buffer_bytes=2_000, first_event_timeout_seconds=0.0)) as harness,
        harness.http() as http,
    ):
        harness.worker.text = "x" * 1_500
        stream_until(b"stream_overrun", max_tokens=2_000)(http)


@pytest.mark.slow
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
