"""Responses from the answer store: keys, lifetimes, bounds, damage, and the format of stored responses."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from pipeline.answers.index import AnswerIndex
from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.inference.response_cache import ResponseCache
from pipeline.gateway.limits.admission import RateSettings
from pipeline.inputs.open import open_pinned
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import plan_open_job
from pipeline.jobs.submit import submit
from pipeline.ledger.ledger import JobLedger
from pipeline.models.catalog import Catalog
from pipeline.models.stored_answers import open_answers
from pipeline.ports import StoreUnavailable
from schemas.models import CatalogEntry
from schemas.requests.limits import RateLimits
from schemas.settings.answers import AnswerOptions
from tests.pipeline.gateway.http_harness import HttpHarness, run_http_harness
from tests.pipeline.gateway.lane_worker import words
from tests.pipeline.made_jobs import PIN, all_rows, order
from tests.pipeline.simulation import MemoryStore, SimulatedClock
from tests.waiting import HANG_SECONDS

HELLO: Any = {
    "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 4,
}  # fmt: skip
CACHED: Any = {"extra_body": {"tokenmill": {"cache": True}}}
KEY = bytes(range(16))
RESPONSE: Any = {
    "id": "chatcmpl-1", "model": "tiny", "choices": [{"finish_reason": "stop", "message": {"content": "hi"}}],
    "usage": {"total_tokens": 1},
}  # fmt: skip
MARKED = {**RESPONSE, "usage": {"total_tokens": 1, "tokenmill_cached": True}}


def open_cache(
    store: MemoryStore, clock: SimulatedClock | None = None, options: AnswerOptions | None = None
) -> ResponseCache:
    """The cache of one of several gateways on this store."""
    clock = clock or SimulatedClock()
    return ResponseCache(AnswerIndex(store, clock, options or AnswerOptions()), clock)


def new_key(number: int) -> bytes:
    return number.to_bytes(16, "big")


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
    cache = open_cache(MemoryStore())
    for reason in ("content_filter", "tool_calls", None):
        cache.add("a", None, KEY, {**RESPONSE, "choices": [{"finish_reason": reason}]}, "r")
        assert cache.find("a", None, KEY) is None
    cache.add("a", None, KEY, {**RESPONSE, "more": "x" * (1 << 18)}, "r")
    assert cache.find("a", None, KEY) is None, "too large"
    cache.add("a", None, KEY, RESPONSE, "r")
    assert cache.find("a", None, KEY)


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
    with run_http_harness(tmp_path, cache=AnswerOptions(always=True)) as harness:
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


def test_given_a_stored_response_then_other_gateways_find_it_and_other_tenants_dont() -> None:
    store = MemoryStore()
    first, second = open_cache(store), open_cache(store)
    first.add("a", "p1", KEY, RESPONSE, "http-1")
    assert first.find("a", "p1", KEY) == MARKED
    assert second.find("a", "p1", KEY) is None
    first.flush()
    assert second.find("a", "p1", KEY) == MARKED
    for tenant, policies, key in (("b", "p1", KEY), ("a", "p2", KEY), ("a", None, KEY), ("a", "p1", new_key(1))):
        assert second.find(tenant, policies, key) is None
    objects = dict(store.objects)
    first.flush()
    assert store.objects == objects, "nothing is new"


def test_given_retention_when_it_has_passed_then_no_gateway_finds_the_response() -> None:
    store, clock = MemoryStore(), SimulatedClock()
    first, second = open_cache(store, clock), open_cache(store, clock)
    first.add("a", None, KEY, RESPONSE, "http-1")
    first.flush()
    clock.sleep(7 * 86_400 - 10)
    assert first.find("a", None, KEY)
    assert second.find("a", None, KEY)
    clock.sleep(20)
    assert first.find("a", None, KEY) is None
    assert second.find("a", None, KEY) is None


@pytest.mark.parametrize("where", ["keys/", "http/"])
@pytest.mark.parametrize("damage", [b"", b"PAR1 torn", None])
def test_given_a_damaged_object_then_the_response_is_computed(where: str, damage: bytes | None) -> None:
    store = MemoryStore()
    cache = open_cache(store)
    cache.add("a", None, new_key(1), RESPONSE, "http-1")
    cache.flush()
    (name,) = [name for name in store.objects if where in name]
    if damage is None:
        del store.objects[name]
    else:
        store.objects[name] = damage
    with capture_logs() as logs:
        assert open_cache(store).find("a", None, new_key(1)) is None
    assert bool(logs) == (damage is not None)
    cache.add("a", None, KEY, RESPONSE, "http-2")
    cache.flush()
    assert open_cache(store).find("a", None, KEY) == MARKED, "others are found"


def test_given_a_flipped_bit_in_a_response_then_it_is_not_given() -> None:
    store = MemoryStore()
    cache = open_cache(store)
    text = random.Random(0).randbytes(400).hex()
    cache.add("a", None, KEY, {**RESPONSE, "text": text}, "http-1")
    cache.flush()
    (name,) = [name for name in store.objects if "http/" in name]
    whole = store.objects[name]
    group = pq.read_metadata(io.BytesIO(whole)).row_group(0)
    columns = [group.column(at) for at in range(group.num_columns)]
    (column,) = [column for column in columns if column.path_in_schema == "response"]
    found = []
    for at in range(1, 10):
        changed = bytearray(whole)
        changed[column.dictionary_page_offset + at * column.total_compressed_size // 10] ^= 1
        store.objects[name] = bytes(changed)
        found.append(open_cache(store).find("a", None, KEY))
    assert all(one in (None, {**MARKED, "text": text}) for one in found), "or another response is given"
    assert None in found


def test_given_a_tenant_that_fills_the_store_then_its_oldest_responses_go() -> None:
    store, clock = MemoryStore(), SimulatedClock()
    cache = open_cache(store, clock, AnswerOptions(max_tenant_bytes=100_000, max_memory_bytes=1_000))
    cache.add("small", None, KEY, RESPONSE, "http-1")
    for number in range(40):
        text = "".join(f"{number * at * 7_919:x}" for at in range(2_000))
        cache.add("large", None, new_key(number), {**RESPONSE, "text": text}, "http-1")
        cache.flush()
        clock.sleep(1.0)
    held = sum(len(data) for name, data in store.objects.items() if "t-large" in name and "http/" in name)
    assert held < 130_000
    found = [number for number in range(40) if cache.find("large", None, new_key(number))]
    assert found == list(range(found[0], 40))
    assert cache.find("small", None, KEY)


def test_given_a_store_that_is_away_then_responses_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StoreUnavailable("away")

    store = MemoryStore()
    cache = open_cache(store)
    monkeypatch.setattr(store, "list", refuse)
    monkeypatch.setattr(store, "create", refuse)
    with capture_logs() as logs:
        cache.add("a", None, KEY, RESPONSE, "http-1")
        cache.flush()
        assert cache.find("a", None, KEY) == MARKED, "from memory"
        assert cache.find("a", None, new_key(1)) is None
    assert [log["event"] for log in logs] == ["answers_not_stored", "stored_answers_unavailable"]


@pytest.mark.parametrize("encoded", [[0.5, -1.0], "AAAAPwAAgL8="], ids=["numbers", "base64"])
def test_given_an_embedding_then_its_stored_row_has_the_vector(encoded: Any) -> None:
    store = MemoryStore()
    cache = open_cache(store)
    response = {"model": "tiny", "data": [{"index": 0, "embedding": encoded}], "usage": {"total_tokens": 1}}
    cache.add("a", None, KEY, response, "http-1")
    cache.flush()
    (name,) = [name for name in store.objects if "http/" in name]
    (row,) = pq.read_table(io.BytesIO(store.objects[name])).to_pylist()
    assert (row["embedding"], row["text"], row["status"]) == ([0.5, -1.0], None, "succeeded")


@pytest.mark.slow
def test_given_an_answer_over_http_then_the_same_row_of_a_job_takes_it(harness: HttpHarness) -> None:
    answer = harness.client().chat.completions.create(**HELLO, **CACHED)
    world = harness.world
    cached_response(harness)
    harness.cache.flush()
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": HELLO}
    source = world.scratch / "in.jsonl"
    source.write_text(json.dumps(line))
    ledgers: dict[str, JobLedger] = {}
    for tenant, reused in (("default", 1), ("other", 0)):
        ledger = ledgers[tenant] = JobLedger(MemoryStore(), f"jobs/job-{tenant}/")  # no other planner is there
        submit(order(input=pin_input(source), tenant=tenant, cache=True), ledger, world, job_id=ledger.name)
        index = AnswerIndex(world.store, world.clock, AnswerOptions())
        opened = partial(open_answers, index, world.scratch)
        plan_open_job(ledger, world, open_pinned, in_time=True, open_answers=opened)
        (segment,) = ledger.segments()
        assert segment.reused == reused, tenant
    (row,) = all_rows(ledgers["default"])
    assert (row["text"], row["finish_reason"]) == (answer.choices[0].message.content, "length")
    assert json.loads(row["response"])["choices"] == answer.model_dump(exclude_unset=True)["choices"]
    assert row["reused_from"].startswith("http-")
