"""Heartbeats on a real Redis: the contract, and what the server's faults may and may not do to them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from pipeline.adapters.redis.connection import RedisSettings
from pipeline.adapters.redis.heartbeats import RedisHeartbeats
from pipeline.ports import WorkerState
from pipeline.runtime.availability import BadAddress, ServiceUnavailable
from schemas.workers.metrics import WorkerMetrics
from tests.pipeline.contracts.heartbeats_contract import LIFETIME, HeartbeatsContract, MakeHeartbeats
from tests.servers.redis import RedisServer
from tests.waiting import wait_for

OpenHeartbeats = Callable[..., RedisHeartbeats]
W = WorkerState("w", held=frozenset({("job-a", 1)}))
MILLISECOND = 0.001
"""In which the server counts."""


@pytest.fixture
def prefix(unique_name: Callable[[], str]) -> str:
    return unique_name()


@pytest.fixture
def open_heartbeats(redis_server: RedisServer, prefix: str) -> Iterator[OpenHeartbeats]:
    opened: list[RedisHeartbeats] = []

    def open_one(lifetime: float, timeout_seconds: float = 30.0) -> RedisHeartbeats:
        settings = RedisSettings(redis_server.url, prefix=prefix, timeout_seconds=timeout_seconds)
        opened.append(RedisHeartbeats(settings, lifetime))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def beats(open_heartbeats: OpenHeartbeats) -> RedisHeartbeats:
    return open_heartbeats(LIFETIME)


class TestRedisHeartbeatsContract(HeartbeatsContract):
    @pytest.fixture
    def make_heartbeats(self, open_heartbeats: OpenHeartbeats) -> MakeHeartbeats:
        return open_heartbeats

    @pytest.fixture
    def pass_time(self) -> Callable[[float], None]:
        return time.sleep


def record_for(beats: RedisHeartbeats, seconds: float) -> None:
    """Send heartbeats until the server has recorded them for so long."""

    def is_recorded() -> bool:
        beats.send_heartbeat(W)
        return beats.since() >= seconds

    wait_for(is_recorded, "the server doesn't record", pause_seconds=0.1)


@pytest.mark.slow
def test_a_server_that_was_emptied_counts_anew_and_the_next_beat_is_received(
    redis_server: RedisServer, beats: RedisHeartbeats
) -> None:
    record_for(beats, 0.8)
    emptied = time.monotonic()
    redis_server.start_empty()
    assert beats.workers() == []
    assert beats.since() <= time.monotonic() - emptied + MILLISECOND
    beats.send_heartbeat(W)
    assert beats.workers() == [W]


@pytest.mark.slow
def test_a_server_that_was_down_and_still_has_its_data_counts_anew_too(
    redis_server: RedisServer, beats: RedisHeartbeats
) -> None:
    """Heartbeats that expired while the server was down don't mean that their workers died."""
    record_for(beats, 0.8)
    redis_server.kill()
    time.sleep(LIFETIME)
    started = time.monotonic()
    redis_server.start()
    assert beats.workers() == [], "the beats ran out meanwhile"
    assert beats.since() <= time.monotonic() - started + MILLISECOND, "so no worker may be taken for dead yet"


@pytest.mark.slow
def test_a_server_that_stood_still_fails_in_time_and_counts_anew(
    redis_server: RedisServer, open_heartbeats: OpenHeartbeats
) -> None:
    beats = open_heartbeats(LIFETIME, 1.0)
    record_for(beats, 0.8)
    redis_server.pause()
    for call in (lambda: beats.send_heartbeat(W), beats.workers, beats.since, lambda: beats.leave("w")):
        with pytest.raises(ServiceUnavailable, match="no answer in time"):
            call()
    resumed = time.monotonic()
    redis_server.resume()
    assert beats.since() <= time.monotonic() - resumed + MILLISECOND
    beats.send_heartbeat(W)
    assert beats.workers() == [W]


@pytest.mark.slow
def test_a_short_pause_changes_nothing(redis_server: RedisServer, open_heartbeats: OpenHeartbeats) -> None:
    beats = open_heartbeats(60.0)
    record_for(beats, 0.8)
    redis_server.pause()
    time.sleep(0.2)
    redis_server.resume()
    assert beats.workers() == [W]
    assert beats.since() >= 0.9


def test_without_a_server_its_address_is_named_and_the_password_is_not(redis_server: RedisServer) -> None:
    redis_server.kill()
    url = f"redis://worker:s3cr/et@127.0.0.1:{redis_server.port}/0"
    settings = RedisSettings(url)
    assert "s3cr" not in repr(settings)
    with pytest.raises(ServiceUnavailable) as caught:
        RedisHeartbeats(RedisSettings(url.replace("s3cr/et", "s3cret"), connect_timeout_seconds=0.5), 1.0).workers()
    assert f"redis://127.0.0.1:{redis_server.port}/0" in str(caught.value)
    assert "s3cr" not in str(caught.value)


def test_a_wrong_password_is_reported_without_the_password(redis_server: RedisServer) -> None:
    url = f"redis://unknown:s3cret@127.0.0.1:{redis_server.port}/0"
    with pytest.raises(ServiceUnavailable, match="refused") as caught:
        RedisHeartbeats(RedisSettings(url), 1.0).workers()
    assert "s3cret" not in str(caught.value)


def test_a_url_of_something_else_is_refused_at_once() -> None:
    with pytest.raises(BadAddress, match=r"^https://example[.]org/:"):
        RedisHeartbeats(RedisSettings("https://me:s3cret@example.org/"), 1.0)


def test_what_is_no_heartbeat_is_passed_over(redis_server: RedisServer, beats: RedisHeartbeats, prefix: str) -> None:
    beats.send_heartbeat(W)
    raw = redis.Redis.from_url(redis_server.url)
    for name, body in {"a": b"\xff\xfe", "b": b'{"name": "", "run": "this"}', "c": b'{"held": [["j", -1]]}'}.items():
        raw.set(f"{prefix}:beats:worker:{name}", body, px=60_000)
        raw.zadd(f"{prefix}:beats:workers", {name: time.time() * 1000})
    assert beats.workers() == [W]
    assert beats.unreadable == 3


def test_given_workers_of_a_newer_version_with_more_fields_then_they_live_and_their_metrics_are_read(
    redis_server: RedisServer, beats: RedisHeartbeats, prefix: str
) -> None:
    metrics = WorkerMetrics(model="m", computed=9)
    beats.send_heartbeat(W)
    beats.report_metrics(W.name, metrics)
    raw = redis.Redis.from_url(redis_server.url)
    for kind in ("worker", "figures"):
        key = f"{prefix}:beats:{kind}:{W.name}"
        said = json.loads(raw.get(key))
        raw.set(key, json.dumps(said | {"unheard_of": {"a": 1}}), px=60_000)
    assert beats.workers() == [W]
    assert beats.metrics() == {W.name: metrics}
    assert beats.unreadable == 0


def test_invalid_metrics_are_ignored_and_counted(
    redis_server: RedisServer, beats: RedisHeartbeats, prefix: str
) -> None:
    raw = redis.Redis.from_url(redis_server.url)
    invalid = [
        b"\xff",
        b"{}",
        b'{"model": 1, "run": 1}',
        b'{"model": "m", "steps": {"counts": [-1]}}',
        b'{"model": "m", "steps": {"counts": [' + b"1," * 99 + b"1]}}",
        b'{"model": "m", "seconds": NaN}',
    ]
    for number, body in enumerate(invalid):
        beats.send_heartbeat(WorkerState(f"w{number}"))
        raw.set(f"{prefix}:beats:figures:w{number}", body, px=60_000)
    beats.send_heartbeat(W)
    beats.report_metrics("w", WorkerMetrics(model="m"))
    assert beats.metrics() == {"w": WorkerMetrics(model="m")}
    assert beats.unreadable == len(invalid)


@pytest.mark.slow
def test_nothing_is_left_of_workers_that_are_gone_for_long(
    redis_server: RedisServer, open_heartbeats: Callable[[float], RedisHeartbeats], prefix: str
) -> None:
    beats = open_heartbeats(0.05)
    for number in range(20):
        beats.send_heartbeat(WorkerState(f"w{number}"))
        beats.report_metrics(f"w{number}", WorkerMetrics(model="m"))
    raw = redis.Redis.from_url(redis_server.url)
    for _ in range(35):
        beats.send_heartbeat(WorkerState("lives"))
        time.sleep(0.02)
    beats.workers()
    assert raw.zcard(f"{prefix}:beats:workers") == 1
    time.sleep(0.7)
    left = set(raw.scan_iter(f"{prefix}:*"))
    assert left == {f"{prefix}:beats:since".encode(), f"{prefix}:beats:last".encode()}
