"""The response cache: keys, lifetimes, bounds, and the format of cached responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from pipeline.adapters.redis.connection import RedisClient, RedisSettings
from pipeline.adapters.redis.response_cache import RedisAnswers
from pipeline.adapters.system_clock import SystemClock
from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.inference.response_cache import (
    MemoryResponseStore,
    ResponseCache,
    ResponseStore,
)
from pipeline.gateway.limits.admission import RateSettings
from pipeline.models.catalog import Catalog
from schemas.models import CatalogEntry
from schemas.requests.limits import RateLimits
from schemas.settings.gateway import CacheOptions
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.pipeline.gateway.lane_worker import words
from tests.pipeline.made_jobs import PIN
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS

HELLO: Any = {
    "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 4,
}  # fmt: skip
CACHED: Any = {"extra_body": {"tokenmill": {"cache": True}}}


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, unique_name: Callable[[], str]) -> Iterator[ResponseStore]:
    if request.param == "memory":
        yield MemoryResponseStore(SystemClock(), max_bytes=1_000)
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    client = RedisClient(RedisSettings(server.url, prefix=unique_name()))
    yield RedisAnswers(client)
    client.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[HttpHarness]:
    with run_http_harness(tmp_path) as harness:
        yield harness


def cached_response(harness: HttpHarness, **more: Any) -> Any:
    """The second response to a request. The first one is cached in the background."""
    limit = time.monotonic() + HANG_SECONDS
    while True:
        answer = harness.client().chat.completions.create(**{**HELLO, **more}, **CACHED)
        if (answer.usage.model_extra or {}).get("tokenmill_cached"):
            return answer
        assert time.monotonic() < limit, "it is not given again"


@pytest.mark.slow
def test_the_same_request_is_computed_once(harness: HttpHarness) -> None:
    first = harness.client().chat.completions.create(**HELLO, **CACHED)
    assert first.usage is not None
    assert not first.usage.model_extra
    second = cached_response(harness)
    before = len(harness.worker.requests)
    for more in ({}, {"user": "someone"}, {"metadata": {"a": "b"}}, {"top_p": 0.5}, {"seed": 1}):
        again = harness.client().chat.completions.create(**HELLO, **more, **CACHED)
        assert again.choices == first.choices == second.choices
        assert again.usage.completion_tokens == 4
        assert again.usage.tokenmill_cached is True
    assert len(harness.worker.requests) == before


@pytest.mark.slow
def test_another_request_tenant_or_model_has_its_own_cache_entry(harness: HttpHarness) -> None:
    cached_response(harness)
    before = len(harness.worker.requests)
    others: list[dict[str, Any]] = [{"max_tokens": 5}, {"temperature": 0.5, "seed": 1}, {"stop": ["x"]}, {"n": 2}]
    others += [{"messages": [{"role": "user", "content": "hello "}]}]
    for number, more in enumerate(others):
        harness.client().chat.completions.create(**{**HELLO, **more}, **CACHED)
        assert len(harness.worker.requests) == before + number + 1, more
    text: Any = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 4}
    harness.client().completions.create(**text, **CACHED)
    harness.client().chat.completions.create(**HELLO)
    assert len(harness.worker.requests) == before + len(others) + 2, "a request without `cache` is computed"
    _, key = harness.keys.create("other", tuple(Scope))
    harness.client(key).chat.completions.create(**HELLO, **CACHED)
    assert len(harness.worker.requests) == before + len(others) + 3


@pytest.mark.slow
def test_streams_are_served_from_the_cache(harness: HttpHarness) -> None:
    streaming: Any = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "n": 2}
    cached_response(harness, logprobs=True, n=2)
    before = len(harness.worker.requests)
    chunks = list(harness.client().chat.completions.create(**{**HELLO, **streaming}, **CACHED))
    assert len(harness.worker.requests) == before
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == words(4, index)
        assert mine[-1].finish_reason == "length"
    assert chunks[-1].usage.tokenmill_cached is True
    assert chunks[-1].usage.completion_tokens == 8
    new = list(harness.client().chat.completions.create(**{**HELLO, "max_tokens": 6}, stream=True, **CACHED))
    assert len(new) > 6, "computed, and sent token by token"
    whole = cached_response(harness, max_tokens=6)
    assert whole.choices[0].message.content == words(6), "a stream's answer is cached too"
    text: Any = {"model": "tiny", "prompt": "Once", "temperature": 0, "max_tokens": 3}
    harness.client().completions.create(**text, **CACHED)
    time.sleep(0.1)
    before = len(harness.worker.requests)
    texts = list(harness.client().completions.create(**text, stream=True, **CACHED))
    assert "".join(chunk.choices[0].text for chunk in texts) == words(3)
    assert len(harness.worker.requests) == before


@pytest.mark.slow
def test_nondeterministic_and_failed_responses_are_not_cached(harness: HttpHarness) -> None:
    client = harness.client()
    with pytest.raises(openai.BadRequestError, match="cache needs temperature 0 or a seed"):
        client.chat.completions.create(**{**HELLO, "temperature": 1}, **CACHED)
    broken = {**HELLO, "messages": [{"role": "user", "content": "break"}]}
    for _ in range(2):
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(**broken, **CACHED)
        time.sleep(0.1)
    assert len(harness.worker.requests) == 2
    cache = ResponseCache(SystemClock(), MemoryResponseStore(SystemClock()))
    usage = {"total_tokens": 1}
    for reason in ("content_filter", "tool_calls", None):
        cache.add("a", "x", {"usage": usage, "choices": [{"finish_reason": reason}]})
        assert cache.find("a", "x") is None
    cache.add("a", "x", {"usage": usage, "choices": [{"finish_reason": "stop"}] * 2, "more": "x" * (1 << 18)})
    assert cache.find("a", "x") is None, "too large"
    cache.add("a", "x", {"usage": usage, "choices": [{"finish_reason": "stop"}] * 2})
    assert cache.find("a", "x")


@pytest.mark.slow
def test_a_cached_response_is_used_only_with_the_same_content_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.models.virtual_models._CACHE_SECONDS", 0.0)
    with run_http_harness(tmp_path) as harness:
        catalog = Catalog(harness.world.store)

        def judged_by(worker: str | None, catalog_policies: str | None) -> None:
            harness.worker.policies = worker
            catalog.publish(CatalogEntry(pin=PIN, max_model_len=2_048, policies=catalog_policies))

        cached_response(harness)
        # Given another policy, when the same is requested, then it is computed anew, and cached under that one.
        judged_by("new", "new")
        before = len(harness.worker.requests)
        harness.client().chat.completions.create(**HELLO, **CACHED)
        assert len(harness.worker.requests) == before + 1
        cached_response(harness)
        # An older worker that still answers has not used the policies that the catalog names.
        judged_by("new", "newer")
        before = len(harness.worker.requests)
        for _ in range(3):
            harness.client().chat.completions.create(**HELLO, **CACHED)
            time.sleep(0.1)
        assert len(harness.worker.requests) == before + 3, "cached under policies that were not used"
        judged_by("newer", "newer")
        cached_response(harness)
        # And what the first worker said without any policy is found where there is none.
        judged_by(None, None)
        before = len(harness.worker.requests)
        cached_response(harness)
        assert len(harness.worker.requests) == before


@pytest.mark.slow
def test_caching_can_be_the_default(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, cache=CacheOptions(always=True)) as harness:
        cached_response(harness)
        before = len(harness.worker.requests)
        harness.client().chat.completions.create(**HELLO)
        assert len(harness.worker.requests) == before
        harness.client().chat.completions.create(**HELLO, extra_body={"tokenmill": {"cache": False}})
        harness.client().chat.completions.create(**{**HELLO, "temperature": 1})
        assert len(harness.worker.requests) == before + 2


@pytest.mark.slow
def test_a_cached_response_takes_no_tokens_and_no_slot(tmp_path: Path) -> None:
    limits = RateLimits(tokens_per_minute=200, running_requests=1)
    with run_http_harness(tmp_path, rates=RateSettings(tenant=limits)) as harness:
        for _ in range(300):
            with suppress(openai.RateLimitError):
                harness.client().chat.completions.create(**HELLO, **CACHED)
            if len(harness.worker.requests) >= 1:
                break
        time.sleep(0.1)
        for stream in (False, True) * 15:
            limit = time.monotonic() + HANG_SECONDS
            while True:
                try:
                    made: Any = harness.client().chat.completions.create(**HELLO, stream=stream, **CACHED)
                    list(made)
                    break
                except openai.RateLimitError:
                    assert time.monotonic() < limit, "its slot or its tokens are not released"
        assert len(harness.worker.requests) == 1


def test_stores_expire_entries_and_evict_the_oldest(store: ResponseStore) -> None:
    store.put("a", "1", b"one", 60.0, 3)
    assert (store.get("a", "1"), store.get("b", "1"), store.get("a", "2")) == (b"one", None, None)
    store.put("a", "1", b"two", 60.0, 3)
    assert store.get("a", "1") == b"two"
    store.put("a", "short", b"x", 0.1, 3)
    store.put("b", "1", b"theirs", 60.0, 3)
    time.sleep(0.15)
    assert store.get("a", "short") is None
    for number in range(2, 6):
        store.put("a", str(number), b"x", 60.0, 3)
        time.sleep(0.005)
    assert [store.get("a", str(number)) for number in range(1, 6)] == [None, None, b"x", b"x", b"x"]
    assert store.get("b", "1") == b"theirs", "one tenant's put out none of another's"


def test_memory_is_bounded() -> None:
    store = MemoryResponseStore(SystemClock(), max_bytes=1_000)
    for number in range(100):
        store.put(f"tenant-{number}", "1", b"x" * 100, 60.0, 10)
    assert [number for number in range(100) if store.get(f"tenant-{number}", "1")] == list(range(90, 100))


def test_a_tenant_that_fills_the_cache_evicts_its_own_responses() -> None:
    store = MemoryResponseStore(SystemClock(), max_bytes=10_000)
    for number in range(20):
        store.put("small", str(number), b"x" * 100, 60.0, 1_000)
    for number in range(1_000):
        store.put("large", str(number), b"x" * 250, 60.0, 1_000)
    assert all(store.get("small", str(number)) for number in range(20))
    assert [number for number in range(1_000) if store.get("large", str(number))] == list(range(968, 1_000))


def test_cached_responses_of_a_tenant_on_redis_are_bounded_in_bytes(
    redis_server: RedisServer, unique_name: Callable[[], str]
) -> None:
    client = RedisClient(RedisSettings(redis_server.url, prefix=unique_name()))
    store = RedisAnswers(client, max_tenant_bytes=1_000)

    def cached_numbers() -> list[int]:
        return [number for number in range(12) if store.get("a", str(number))]

    store.put("b", "1", b"x" * 900, 60.0, 100)
    for number in range(12):
        store.put("a", str(number), b"x" * 200, 60.0, 100)
        time.sleep(0.005)
    assert cached_numbers() == list(range(7, 12))
    for _ in range(20):  # what is put again counts once
        store.put("a", "11", b"x" * 200, 60.0, 100)
    assert cached_numbers() == list(range(7, 12))
    for number in range(5):
        store.put("a", str(number), b"x" * 200, 0.05, 100)
    time.sleep(0.1)
    store.put("a", "6", b"x" * 1_000, 60.0, 100)
    assert cached_numbers() == [6], "what has run out counts no more"
    assert store.get("b", "1")
    client.close()


def test_responses_are_computed_without_redis(redis_server: RedisServer, unique_name: Callable[[], str]) -> None:
    client = RedisClient(RedisSettings(redis_server.url, prefix=unique_name()))
    cache = ResponseCache(SystemClock(), RedisAnswers(client))
    answer: dict[str, Any] = {"usage": {"total_tokens": 1}, "choices": []}
    cache.add("a", "x", answer)
    assert cache.find("a", "x") == {"usage": {"total_tokens": 1, "tokenmill_cached": True}, "choices": []}
    redis_server.kill()
    with capture_logs() as logs:
        for _ in range(3):
            assert cache.find("a", "x") is None
            cache.add("a", "x", answer)
    assert [log["event"] for log in logs] == ["cache_not_used"]
    client.close()
