"""Rate limits of tenants and keys, in memory and on Redis, also through OpenAI's client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from structlog.testing import capture_logs

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.redis.connection import RedisClient, RedisSettings
from pipeline.adapters.redis.rate_limit_counters import RedisRunning, redis_windows
from pipeline.adapters.system_clock import SystemClock
from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.limits.admission import RateLimiter, RateSettings
from pipeline.gateway.limits.concurrency_slots import ConcurrencySlots, MemoryConcurrencySlots
from pipeline.gateway.limits.tenant_capacity import TenantCapacity
from pipeline.ingest.intake import IntakeSettings
from pipeline.planner.tokens import DEFAULT_TOKENS_PER_BYTE
from pipeline.ports import WorkerState, World
from pipeline.runtime.availability import ServiceUnavailable
from schemas.requests.limits import Limits, RateLimits
from schemas.requests.parsing import dump_body, parse_body
from schemas.settings.gateway import GatewayOptions
from tests.pipeline.gateway.http_harness import lines, run_http_harness
from tests.pipeline.simulation import SimulatedClock
from tests.servers.redis import RedisServer
from tests.waiting import wait_for

ALL = tuple(Scope)
HELLO: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
DAY = 86_400
"""Seconds over which is counted where numbers must be exact: what was counted in the window before counts ever less."""
Makes = Callable[[RateSettings], RateLimiter]


def at_a_windows_beginning(seconds: int) -> None:
    """Wait for it. What is counted right before a window's end and read right behind it is rounded down: numbers are
    exact only within one window, and they are of the clock, not of the limiter."""
    time.sleep(seconds - time.time() % seconds)


@pytest.fixture(autouse=True)
def far_from_a_minutes_end() -> None:
    if time.time() % 60 > 57:
        at_a_windows_beginning(60)


@pytest.fixture
def prefix(unique_name: Callable[[], str]) -> str:
    return unique_name()


@pytest.fixture(params=["memory", "redis"])
def makes(request: pytest.FixtureRequest, prefix: str) -> Iterator[Makes]:
    """Limiters that share what they count, like several gateways; in memory there is one."""
    if request.param == "memory":
        yield lambda settings: RateLimiter(SystemClock(), settings)
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    client = RedisClient(RedisSettings(server.url, prefix=prefix))
    yield lambda settings: RateLimiter(SystemClock(), settings, redis_windows(client), RedisRunning(client))
    client.close()


def caller(tenant: str = "acme", key: str | None = "0" * 16, **limits: int) -> Caller:
    return Caller(tenant, frozenset(Scope), key, limits=RateLimits(**limits))


def refused(attempt: Callable[[], Any]) -> ApiError:
    with pytest.raises(ApiError) as error:
        attempt()
    assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
    return error.value


def test_requests_are_counted_by_tenant_and_by_key(makes: Makes) -> None:
    limiter = makes(RateSettings(tenant=RateLimits(requests_per_minute=5), key=RateLimits(requests_per_minute=3)))
    first, second = caller(), caller(key="1" * 16)
    left = [limiter.take_request(first)["x-ratelimit-remaining-requests"] for _ in range(3)]
    assert left == ["2", "1", "0"]
    error = refused(lambda: limiter.take_request(first))
    assert "this API key has 3 requests a minute" in error.message
    assert 1 <= int(error.headers["Retry-After"]) <= 120
    assert error.headers["x-ratelimit-limit-requests"] == "3"
    assert [limiter.take_request(second)["x-ratelimit-limit-requests"] for _ in range(2)] == ["5", "5"], "the nearest"
    assert "this tenant has 5" in refused(lambda: limiter.take_request(second)).message, "the tenant's other key"
    other = limiter.take_request(caller("other", key="2" * 16))
    assert (other["x-ratelimit-limit-requests"], other["x-ratelimit-remaining-requests"]) == ("3", "2")
    assert limiter.take_request(Caller("free", frozenset(Scope)))["x-ratelimit-limit-requests"] == "5", "without keys"


def test_a_request_refused_by_one_limit_does_not_count_against_another(makes: Makes) -> None:
    limiter = makes(RateSettings(tenant=RateLimits(requests_per_minute=3)))
    narrow, wide = caller(requests_per_minute=1), caller(key="1" * 16)
    assert limiter.take_request(narrow)["x-ratelimit-remaining-requests"] == "0"
    for _ in range(5):
        error = refused(lambda: limiter.take_request(narrow))
        assert error.headers["x-ratelimit-limit-requests"] == "1"
        assert error.headers["x-ratelimit-remaining-requests"] == "0"
    assert limiter.take_request(wide)["x-ratelimit-remaining-requests"] == "1"


def test_limits_of_a_tenant_and_of_a_key_have_precedence(makes: Makes) -> None:
    settings = RateSettings(
        tenant=RateLimits(requests_per_minute=1), tenants={"big": RateLimits(requests_per_minute=9)},
        key=RateLimits(requests_per_minute=1, running_requests=7),
    )  # fmt: skip
    limiter = makes(settings)
    big = caller("big", requests_per_minute=4)
    assert [limiter.take_request(big)["x-ratelimit-remaining-requests"] for _ in range(4)] == ["3", "2", "1", "0"]
    assert "this API key has 4" in refused(lambda: limiter.take_request(caller("big", requests_per_minute=4))).message
    assert caller(requests_per_minute=4).limits.over(settings.key).running_requests == 7


@pytest.mark.slow
def test_a_request_succeeds_after_retry_after(makes: Makes) -> None:
    limiter = makes(RateSettings(key=RateLimits(requests_per_minute=2, tokens_per_minute=100), window=2))
    at_a_windows_beginning(2)
    for _ in range(2):
        limiter.take_request(caller())
    error = refused(lambda: limiter.take_request(caller()))
    assert 1 <= int(error.headers["Retry-After"]) <= 4
    time.sleep(float(error.headers["Retry-After"]))
    headers = limiter.take_request(caller())
    assert headers["x-ratelimit-remaining-requests"] in ("0", "1"), "it was counted"
    limiter.release(limiter.admit(caller(), "a", 90, 60.0), None)
    error = refused(lambda: limiter.admit(caller(), "b", 40, 60.0))
    assert 1 <= int(error.headers["Retry-After"]) <= 4
    time.sleep(float(error.headers["Retry-After"]))
    ticket = limiter.admit(caller(), "b", 40, 60.0)
    assert 0 <= int(ticket.headers["x-ratelimit-remaining-tokens"]) <= 60, "it was counted"


@pytest.mark.slow
def test_tokens_are_taken_at_admission_and_unused_ones_are_released(makes: Makes) -> None:
    limiter = makes(RateSettings(tenant=RateLimits(tokens_per_minute=100), window=DAY))
    ticket = limiter.admit(caller(), "a", 80, 60.0)
    assert ticket.headers["x-ratelimit-remaining-tokens"] == "20"
    error = refused(lambda: limiter.admit(caller(), "b", 30, 60.0))
    assert "this tenant has 100 tokens a minute, and too few are left now" in error.message
    assert error.headers["x-ratelimit-remaining-tokens"] == "20", "what is refused takes none"
    limiter.release(ticket, 10)
    assert limiter.admit(caller(), "c", 90, 60.0).headers["x-ratelimit-remaining-tokens"] == "0"
    too_large = refused(lambda: limiter.admit(caller(), "d", 101, 60.0))
    assert too_large.headers["x-should-retry"] == "false"
    assert "Retry-After" not in too_large.headers
    late = makes(RateSettings(tenant=RateLimits(tokens_per_minute=10), window=1))
    at_a_windows_beginning(1)
    ticket = late.admit(caller("late"), "a", 10, 60.0)
    time.sleep(2.1)
    late.release(ticket, 0)
    again = late.admit(caller("late"), "b", 10, 60.0)
    assert again.headers["x-ratelimit-remaining-tokens"] == "0", "what was given back too late counts nowhere"
    refused(lambda: late.admit(caller("late"), "c", 10, 60.0))


@pytest.mark.slow
def test_tokens_of_a_window_are_not_released_into_the_next_one(makes: Makes) -> None:
    # Given all of a window's tokens taken,
    limiter = makes(RateSettings(tenant=RateLimits(tokens_per_minute=1_000), window=2))
    at_a_windows_beginning(2)
    ticket = limiter.admit(caller(), "a", 1_000, 60)
    # when the request ends right behind the window, almost without having used any,
    time.sleep(max(0.0, ticket.until - time.monotonic()) + 0.05)
    limiter.release(ticket, 10)
    # then the next window has no more than what is forgotten of the one before.
    refused(lambda: limiter.admit(caller(), "b", 800, 60))
    assert limiter.admit(caller(), "c", 5, 60).headers["x-ratelimit-limit-tokens"] == "1000"


def test_concurrent_requests_take_slots(makes: Makes) -> None:
    limiter = makes(RateSettings(tenant=RateLimits(running_requests=3), key=RateLimits(running_requests=2)))
    tickets = [limiter.admit(caller(), name, 1, 60.0) for name in "ab"]
    assert "this API key has 2 requests under way" in refused(lambda: limiter.admit(caller(), "c", 1, 60.0)).message
    other = limiter.admit(caller(key="1" * 16), "d", 1, 60.0)
    assert other.names == ("tenant/acme", f"key/{'1' * 16}")
    assert "this tenant has 3" in refused(lambda: limiter.admit(caller(key="1" * 16), "e", 1, 60.0)).message
    limiter.release(tickets[0], 1)
    began = time.monotonic()
    limiter.admit(caller(), "f", 1, 0.5)
    limiter.release(other, 1)

    def enter() -> bool:
        with suppress(ApiError):
            return bool(limiter.admit(caller(), "g", 1, 60.0).names)
        return False

    wait_for(enter, "a slot is held for longer than a request takes")
    assert time.monotonic() - began >= 0.5, "it was given away"


def test_a_request_refused_by_the_token_limit_takes_no_concurrency_slot(makes: Makes) -> None:
    limiter = makes(RateSettings(tenant=RateLimits(running_requests=1, tokens_per_minute=10)))
    error = refused(lambda: limiter.admit(caller(), "a", 11, 60.0))
    assert "this request may need 11 tokens, but this tenant has 10 a minute" in error.message
    assert error.headers["x-should-retry"] == "false"
    ticket = limiter.admit(caller(), "b", 10, 60.0)
    assert ticket.names == ("tenant/acme",), "it holds the only slot"
    error = refused(lambda: limiter.admit(caller(), "c", 1, 60.0))
    assert "this tenant has 1 requests under way" in error.message
    assert error.headers == {"Retry-After": "1"}


def test_concurrent_requests_are_admitted_exactly_up_to_the_limit(makes: Makes) -> None:
    limiter = makes(RateSettings(tenant=RateLimits(tokens_per_minute=1_000, running_requests=12)))
    admitted: list[int] = []

    def admit(number: int) -> None:
        with suppress(ApiError):
            limiter.admit(caller(), str(number), 10, 60.0)
            admitted.append(number)

    threads = [threading.Thread(target=admit, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == 12


def test_two_gateways_share_their_counts(redis_server: RedisServer, prefix: str) -> None:
    settings = RateSettings(tenant=RateLimits(requests_per_minute=3, running_requests=1))
    clients = [RedisClient(RedisSettings(redis_server.url, prefix=prefix)) for _ in range(2)]
    one, two = (RateLimiter(SystemClock(), settings, redis_windows(it), RedisRunning(it)) for it in clients)
    one.take_request(caller())
    assert two.take_request(caller())["x-ratelimit-remaining-requests"] == "1"
    ticket = one.admit(caller(), "a", 1, 60.0)
    assert "1 requests under way" in refused(lambda: two.admit(caller(), "b", 1, 60.0)).message
    one.release(ticket, 1)
    assert two.admit(caller(), "b", 1, 60.0).names == ("tenant/acme",)
    assert "1 requests under way" in refused(lambda: one.admit(caller(), "c", 1, 60.0)).message
    assert one.take_request(caller())["x-ratelimit-remaining-requests"] == "0"
    assert "3 requests a minute" in refused(lambda: two.take_request(caller())).message
    for client in clients:
        client.close()


@pytest.mark.slow
def test_all_requests_are_admitted_and_a_warning_is_logged_without_redis(
    redis_server: RedisServer, prefix: str
) -> None:
    client = RedisClient(RedisSettings(redis_server.url, prefix=prefix))
    limits = RateLimits(requests_per_minute=1, running_requests=1)
    limiter = RateLimiter(SystemClock(), RateSettings(tenant=limits), redis_windows(client), RedisRunning(client))
    limiter.take_request(caller())
    redis_server.kill()
    with capture_logs() as logs:
        for number in range(5):
            limiter.take_request(caller())
            limiter.release(limiter.admit(caller(), str(number), 1, 60.0), 1)
    assert [log["event"] for log in logs] == ["limits_not_counted"], "once, and not for each request"
    assert logs[0]["log_level"] == "warning"
    client.close()


def test_concurrent_rows_are_counted_with_n(makes: Makes) -> None:
    limiter = makes(RateSettings(tenant=RateLimits(running_rows=10)))
    first = limiter.admit(caller(), "a", 1, 60.0, rows=8)
    assert first.names == ("tenant/acme:rows",)
    error = refused(lambda: limiter.admit(caller(), "b", 1, 60.0, rows=3))
    assert "this tenant may have 10 rows under way, and too few are free" in error.message
    assert error.headers == {"Retry-After": "1"}
    limiter.admit(caller(), "c", 1, 60.0, rows=2)
    refused(lambda: limiter.admit(caller(key="1" * 16), "d", 1, 60.0))
    limiter.admit(caller("other"), "e", 1, 60.0, rows=10)
    limiter.release(first, 1)
    limiter.admit(caller(), "f", 1, 60.0, rows=8)
    error = refused(lambda: limiter.admit(caller(), "g", 1, 60.0, rows=11))
    assert (error.param, error.headers) == ("n", {"x-should-retry": "false"}), "it would never be let in"


def test_tenants_with_keys_have_a_limit_of_rows_unless_one_is_set(makes: Makes) -> None:
    def limiter(**more: Any) -> RateLimiter:
        return makes(RateSettings(default_rows=lambda: 4, **more))

    plain = limiter()
    plain.admit(caller(), "a", 1, 60.0, rows=4)
    assert "this tenant may have 4 rows" in refused(lambda: plain.admit(caller(), "b", 1, 60.0)).message
    plain.admit(Caller("acme", frozenset(Scope)), "without keys", 1, 60.0, rows=100)
    wide = caller("wide", key="2" * 16, running_rows=20)
    plain.admit(wide, "c", 1, 60.0, rows=20)
    assert "this API key may have 20 rows" in refused(lambda: plain.admit(wide, "d", 1, 60.0)).message
    assert not makes(RateSettings()).admit(caller("off"), "e", 1, 60.0, rows=100).names
    for chosen in (RateLimits(running_requests=1), RateLimits(running_rows=100)):
        limiter(tenants={"set": chosen}).admit(caller("set"), "f", 1, 60.0, rows=100)


def test_the_default_limit_of_rows_grows_with_the_live_workers() -> None:
    clock = SystemClock()
    beats = MemoryHeartbeats(clock, 60.0)
    assert TenantCapacity(clock, beats, 64).rows() == 64
    for name in "abc":
        beats.send_heartbeat(WorkerState(name))
    assert TenantCapacity(clock, beats, 64).rows() == 192


def test_the_default_limit_of_rows_is_half_of_the_workers_batches() -> None:
    """With 64 of a worker that has no model yet, and where there is none."""
    clock = SimulatedClock()
    beats = MemoryHeartbeats(clock, 1_000.0)
    half, given = TenantCapacity(clock, beats), TenantCapacity(clock, beats, 10)
    assert (half.rows(), given.rows()) == (64, 10)
    for name, rows in (("large", 1024), ("small", 1), ("loading", None)):
        beats.send_heartbeat(WorkerState(name, max_num_seqs=rows))
    clock.sleep(2.0)
    assert (half.rows(), given.rows()) == (512 + 1 + 64, 30)


def test_the_default_limit_of_rows_is_unchanged_while_heartbeats_cant_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimulatedClock()
    beats = MemoryHeartbeats(clock, 1_000.0)
    for name in "abc":
        beats.send_heartbeat(WorkerState(name))
    capacity = TenantCapacity(clock, beats, 64)
    assert capacity.rows() == 192

    def away() -> list[WorkerState]:
        raise ServiceUnavailable("Redis is away")

    monkeypatch.setattr(beats, "workers", away)
    clock.sleep(60.0)
    assert capacity.rows() == 192


@pytest.mark.slow
def test_a_chat_request_takes_n_rows(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, rates=RateSettings(default_rows=lambda: 8)) as harness:
        ours, theirs = (harness.client(harness.keys.create(tenant, ALL)[1]) for tenant in ("a", "b"))
        harness.worker.stop_taking()
        waiting = threading.Thread(target=lambda: ours.chat.completions.create(**HELLO, n=8))
        waiting.start()
        wait_for(lambda: harness.bridge.metrics.callers()["open"] == 1, "the request did not begin")
        with pytest.raises(openai.RateLimitError) as error:
            ours.chat.completions.create(**HELLO)
        assert (error.value.code, error.value.response.headers["retry-after"]) == ("rate_limit_exceeded", "1")
        harness.worker.hold.clear()
        theirs.chat.completions.create(**HELLO, n=8)
        waiting.join()
        ours.chat.completions.create(**HELLO, n=8)


def test_a_concurrency_slot_in_memory_expires(world: World) -> None:
    running: ConcurrencySlots = MemoryConcurrencySlots(world.clock)
    assert running.enter("a", "1", 1, 10.0)
    assert not running.enter("a", "2", 1, 10.0)
    world.clock.sleep(10.0)
    assert running.enter("a", "2", 1, 10.0)
    running.leave("a", "1")
    assert not running.enter("a", "3", 1, 10.0)


@pytest.mark.slow
def test_openais_client_waits_for_retry_after_and_then_succeeds(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, rates=RateSettings(key=RateLimits(requests_per_minute=2), window=2)) as harness:
        _, text = harness.keys.create("acme", ALL)
        impatient, retrying = harness.client(text), harness.client(text, max_retries=3)
        at_a_windows_beginning(2)
        raw = impatient.chat.completions.with_raw_response.create(**HELLO)
        assert raw.headers["x-ratelimit-limit-requests"] == "2"
        assert raw.headers["x-ratelimit-remaining-requests"] == "1"
        assert raw.headers["x-ratelimit-reset-requests"] in ("1s", "2s", "3s", "4s")
        impatient.models.list()
        with pytest.raises(openai.RateLimitError) as limited:
            impatient.models.list()
        assert limited.value.code == "rate_limit_exceeded"
        assert limited.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        assert 1 <= int(limited.value.response.headers["retry-after"]) <= 4
        began = time.monotonic()
        assert [model.id for model in retrying.models.list().data] == ["tiny"]
        assert time.monotonic() - began >= 0.9, "it waited for Retry-After"
        _, free = harness.keys.create("acme", ALL, limits=RateLimits(requests_per_minute=1_000))
        answers = [harness.client(free).models.with_raw_response.list() for _ in range(5)]
        assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"1000"}, "its own"


@pytest.mark.slow
def test_tokens_and_slots_of_complete_responses_and_of_streams(tmp_path: Path) -> None:
    limits = RateLimits(tokens_per_minute=1_000, running_requests=1)
    with run_http_harness(tmp_path, rates=RateSettings(tenant=limits, window=DAY)) as harness:
        client = harness.client()

        def left(**more: Any) -> int:
            answer = client.chat.completions.with_raw_response.create(**HELLO, **more)
            assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        assert left(max_tokens=900) == 1_000 - estimated(max_tokens=900) - 900
        used = 3 + 900  # the prompt is 3 tokens, as the worker counts
        assert left(max_tokens=5) == 1_000 - used - estimated(max_tokens=5) - 5
        used += 3 + 5
        with pytest.raises(openai.RateLimitError, match=r"may need 1,8\d\d tokens") as limited:
            client.chat.completions.create(**HELLO, max_tokens=900, n=2)
        assert limited.value.response.headers["x-should-retry"] == "false"
        assert "retry-after" not in limited.value.response.headers
        assert limited.value.response.headers["x-ratelimit-remaining-tokens"] == str(1_000 - used)
        harness.worker.pause = 0.1
        with client.chat.completions.create(**HELLO, max_tokens=30, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError, match="this tenant has 1 requests under way") as limited:
                client.chat.completions.create(**HELLO, max_tokens=5)
        assert limited.value.response.headers["retry-after"] == "1"

        def admitted() -> bool:
            with suppress(openai.RateLimitError):
                client.chat.completions.create(**HELLO, max_tokens=1)
                return True
            return False

        wait_for(admitted, "a disconnected client holds its slot")


def estimated(**more: Any) -> int:
    """Tokens of the prompt, as a gateway estimates them."""
    body = parse_body("/v1/chat/completions", {**HELLO, **more}, Limits())
    return round(len(dump_body(body)) * DEFAULT_TOKENS_PER_BYTE)


@pytest.mark.slow
def test_open_jobs_of_a_tenant_are_limited(tmp_path: Path) -> None:
    rates = RateSettings(tenant=RateLimits(running_jobs=2))
    with run_http_harness(tmp_path, permits=0, rates=rates) as harness:
        client = harness.client()
        file = client.files.create(file=("a.jsonl", lines(3)), purpose="batch")
        wanted: Any = {
            "input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h",
        }  # fmt: skip
        made = [client.batches.create(**wanted, extra_headers={"Idempotency-Key": name}) for name in "ab"]
        with pytest.raises(openai.RateLimitError, match="2 jobs of yours are open") as limited:
            client.batches.create(**wanted)
        assert (limited.value.code, limited.value.response.headers["retry-after"]) == ("rate_limit_exceeded", "30")
        assert {batch.id for batch in client.batches.list()} == {batch.id for batch in made}
        again = client.batches.create(**wanted, extra_headers={"Idempotency-Key": "a"})
        assert again.id == made[0].id, "the same request again makes none"


@pytest.mark.parametrize("limited", ["jobs", "tokens"])
@pytest.mark.slow
def test_a_retry_counts_as_a_job(tmp_path: Path, limited: str) -> None:
    # Given a batch with a row that failed, of a tenant who may have one open job, or a backlog of a token,
    rates = RateSettings(tenant=RateLimits(running_jobs=1 if limited == "jobs" else None))
    intake = IntakeSettings(max_tenant_tokens=1 if limited == "tokens" else None, refresh_interval_seconds=0.5)
    with run_http_harness(tmp_path, permits=1, rates=rates, intake=intake) as harness:
        client = harness.client()
        file = client.files.create(file=("a.jsonl", lines(5)), purpose="batch")
        wanted: Any = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = client.batches.create(**wanted)
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", "it did not end")
        wait_for(lambda: harness.parts.batches.open_jobs("default") == 0, "it counts for ever")

        def retry(**more: Any) -> Any:
            return client.post(f"/batches/{batch.id}/retry", cast_to=Batch, body={"include_invalid": True, **more})

        # when it is tried again, and the answer is lost,
        made = retry()
        # then the same request finds the same, and another one has to wait: at once, and later.
        for _ in range(2):
            assert retry().id == made.id
            with pytest.raises(openai.RateLimitError) as refused:
                retry(max_output_tokens=3)
            expected = ("rate_limit_exceeded", "30") if limited == "jobs" else ("backlog_full", "60")
            assert (refused.value.code, refused.value.response.headers["retry-after"]) == expected
            time.sleep(0.6)
        client.batches.cancel(made.id)


@pytest.mark.slow
def test_requests_above_the_concurrency_bound_get_openai_errors(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, settings=GatewayOptions(max_concurrent_requests=2)) as harness:
        harness.worker.stop_taking()
        client = harness.client()

        def wait() -> None:
            with suppress(openai.APIError):
                client.chat.completions.create(**HELLO, timeout=3)

        waiting = [threading.Thread(target=wait) for _ in range(2)]
        for thread in waiting:
            thread.start()
        wait_for(lambda: len(harness.bridge) == 2, "they don't wait")
        with pytest.raises(openai.InternalServerError) as full:
            client.models.list()
        assert (full.value.status_code, full.value.code) == (503, "too_many_requests")
        with harness.http() as http:
            assert http.get("/healthz").status_code == 200
        harness.worker.hold.clear()
        for thread in waiting:
            thread.join()


def test_choices_of_a_prompt_are_one_row(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, rates=RateSettings(default_rows=lambda: 4)) as harness:
        _, key = harness.keys.create("acme", ALL)
        body: Any = {"model": "tiny", "choices": [f"choice {number}" for number in range(50)]}
        with harness.http(key) as http:
            assert http.post("/v1/classify", json={**body, "messages": HELLO["messages"]}).status_code == 200
            assert http.post("/v1/classify", json={**body, "input": ["a"] * 4}).status_code == 200
            refused = http.post("/v1/classify", json={**body, "input": ["a"] * 5})
        assert refused.status_code == 429
        assert refused.json()["error"]["message"].startswith("input asks for 5 rows, but this tenant may have 4")


@pytest.mark.slow
def test_tokenizing_counts_like_a_prompt(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, rates=RateSettings(tenant=RateLimits(tokens_per_minute=1_000), window=DAY)) as h:
        _, key = h.keys.create("acme", ALL)
        with h.http(key) as http:
            left = 1_000
            for path, body, used in (
                ("/tokenize", {"prompt": "a b " * 100}, 2),  # as the worker counts, and not as it was estimated
                ("/v1/messages/count_tokens", {"messages": HELLO["messages"]}, 2),
                ("/detokenize", {"tokens": [1, 2, 3]}, 3),
                ("/detokenize", {"tokens": [1, 2, 3]}, 3),
            ):
                response = http.post(path, json={"model": "tiny", **body})
                assert response.status_code == 200
                assert int(response.headers["x-ratelimit-remaining-tokens"]) <= left - used
                left -= used
            late = http.post("/tokenize", json={"model": "tiny", "prompt": "a b " * 10_000})
            assert late.status_code == 429
            assert "this request may need" in late.json()["error"]["message"]
            more = http.post("/detokenize", json={"model": "tiny", "tokens": [0] * left})
            assert more.status_code == 200, "what was estimated and not used came back"
            assert http.post("/detokenize", json={"model": "tiny", "tokens": [0]}).status_code == 429
