"""The shard queues through Celery: the contract on Redis and on a broker of another kind, a real server's faults, and
messages of other programs."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, current_app

from pipeline.adapters.celery.shard_queue import CeleryQueue, CeleryQueueSettings
from pipeline.adapters.system_clock import SystemClock
from pipeline.ports import ShardTask
from pipeline.runtime.availability import BadAddress, ServiceUnavailable
from tests.pipeline.contracts.queue_contract import MakeQueue, QueueContract
from tests.pipeline.simulation import SimulatedClock
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS

TASK = ShardTask("job-a", 1)
OpenQueue = Callable[..., CeleryQueue]


class ShiftedClock(SystemClock):
    """A system clock with a wrong wall time."""

    def __init__(self, shift: timedelta) -> None:
        self._shift = shift

    def now(self) -> Any:
        return super().now() + self._shift


@pytest.fixture
def prefix(unique_name: Callable[[], str]) -> str:
    return unique_name()


@pytest.fixture
def open_queue(redis_server: RedisServer, prefix: str) -> Iterator[OpenQueue]:
    opened: list[CeleryQueue] = []

    def open_one(clock: SystemClock | None = None, **settings: Any) -> CeleryQueue:
        of_test = {
            "url": redis_server.url,
            "prefix": prefix,
            "timeout_seconds": 0.5,
            "poll_interval_seconds": 0.05,
        } | settings
        opened.append(CeleryQueue(CeleryQueueSettings(**of_test), clock or SystemClock()))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def queue(open_queue: OpenQueue) -> CeleryQueue:
    return open_queue()


@pytest.fixture
def raw(redis_server: RedisServer) -> Any:
    return redis.Redis.from_url(redis_server.url)


class TestCeleryQueueOnRedisContract(QueueContract):
    @pytest.fixture
    def make_queue(self, open_queue: OpenQueue) -> MakeQueue:
        return open_queue


class TestCeleryQueueElsewhereContract(QueueContract):
    """Another broker, in memory: the adapter must not depend on what it does for Redis."""

    @pytest.fixture
    def make_queue(self, prefix: str) -> MakeQueue:
        settings = CeleryQueueSettings("memory://", prefix=prefix, poll_interval_seconds=0.05)
        return lambda: CeleryQueue(settings, SystemClock())


# -- the server's faults


@pytest.mark.slow
def test_a_taker_finds_what_is_put_after_its_server_was_killed_and_came_back_empty(
    redis_server: RedisServer, queue: CeleryQueue, open_queue: OpenQueue
) -> None:
    queue.put("q", TASK)
    assert queue.take(["q"], HANG_SECONDS) == TASK
    assert queue.take(["q"], 0) is None
    for round_ in range(3):
        redis_server.start_empty()
        open_queue().put("q", ShardTask("job-b", round_))
        assert queue.take(["q"], HANG_SECONDS) == ShardTask("job-b", round_)


@pytest.mark.slow
def test_a_taker_that_waits_while_the_server_goes_and_comes_gets_what_is_put_then(
    redis_server: RedisServer, queue: CeleryQueue, open_queue: OpenQueue
) -> None:
    got: list[ShardTask | None] = []
    worker = threading.Thread(target=lambda: got.append(queue.take(["q"], HANG_SECONDS)))
    worker.start()
    time.sleep(0.3)
    redis_server.kill()
    time.sleep(0.5)
    redis_server.start()
    open_queue().put("q", TASK)
    worker.join(HANG_SECONDS)
    assert got == [TASK]


def test_one_that_puts_goes_on_after_the_server_came_back(redis_server: RedisServer, queue: CeleryQueue) -> None:
    queue.put("q", TASK)
    redis_server.kill()
    with pytest.raises(ServiceUnavailable, match="can't put a shard on q"):
        queue.put("q", TASK)
    with pytest.raises(ServiceUnavailable, match="can't take a shard from q"):
        queue.take(["q"], 0.2)
    redis_server.start_empty()
    queue.put("q", ShardTask("job-a", 2))
    assert queue.take(["q"], HANG_SECONDS) == ShardTask("job-a", 2)


@pytest.mark.slow
def test_a_server_that_stands_still_fails_in_time_and_is_used_again_when_it_goes_on(
    redis_server: RedisServer, queue: CeleryQueue
) -> None:
    queue.put("q", TASK)
    assert queue.take(["q"], HANG_SECONDS) == TASK
    redis_server.pause()
    for call in (lambda: queue.put("q", TASK), lambda: queue.take(["q"], 0.1)):
        with pytest.raises(ServiceUnavailable):
            call()
    threading.Timer(1.0, redis_server.resume).start()
    queue.take(["q"], 2.0)  # perhaps what was put into the silence
    queue.put("q", ShardTask("job-a", 9))
    while (task := queue.take(["q"], 5.0)) == TASK:
        pass
    assert task == ShardTask("job-a", 9)


def test_errors_do_not_show_the_password(redis_server: RedisServer) -> None:
    redis_server.kill()
    url = f"redis://me:s3cret@127.0.0.1:{redis_server.port}/0"
    settings = CeleryQueueSettings(url, timeout_seconds=0.3)
    assert "s3cret" not in repr(settings)
    with pytest.raises(ServiceUnavailable) as caught:
        CeleryQueue(settings, SystemClock()).put("q", TASK)
    assert f"redis://127.0.0.1:{redis_server.port}/0:" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_broker_that_celery_does_not_know_is_refused_at_once() -> None:
    for url in ("carrier-pigeon://me:s3cret@coop", "redis://me:s3cret@coop/0?password=s3cret"):
        with pytest.raises(BadAddress, match="://coop") as caught:
            CeleryQueue(CeleryQueueSettings(url), SystemClock())
        assert "s3cret" not in str(caught.value)


# -- what lies on the server


def test_a_shard_travels_as_a_celery_task_that_any_tool_can_read(queue: CeleryQueue, raw: Any, prefix: str) -> None:
    queue.put("standard", ShardTask("job-a", 4, attempt=2))
    (entry,) = raw.lrange(f"{prefix}.standard", 0, -1)
    message = json.loads(entry)
    assert message["content-type"] == "application/json"
    assert message["headers"]["task"] == "tokenmill.compute_shard"
    assert json.loads(base64.b64decode(message["body"]))[0] == ["job-a", 4, 2]
    assert message["headers"]["expires"] is not None


@pytest.mark.slow
def test_a_queue_without_a_reader_expires_and_leaves_nothing(open_queue: OpenQueue, raw: Any, prefix: str) -> None:
    queue = open_queue(queue_lifetime_seconds=0.5)
    queue.put("q", TASK)
    assert raw.pttl(f"{prefix}.q") in range(1, 501)
    time.sleep(0.7)
    assert list(raw.scan_iter(f"*{prefix}*")) == []
    assert queue.take(["q"], 0) is None


# -- old messages


def test_an_expired_message_is_dropped(open_queue: OpenQueue) -> None:
    open_queue(message_lifetime_seconds=0.2).put("q", TASK)
    time.sleep(0.4)
    late = open_queue(message_lifetime_seconds=0.2)
    assert late.take(["q"], 0.1) is None
    assert late.dropped == 1


def test_a_clock_that_is_ahead_does_not_starve_a_worker(open_queue: OpenQueue) -> None:
    """The queue was empty a moment ago, so a message that is there now is fresh, whatever its expiry says."""
    ahead = open_queue(ShiftedClock(timedelta(days=1)))
    assert ahead.take(["q"], 0) is None
    queue = open_queue()
    queue.put("q", TASK)
    assert ahead.take(["q"], HANG_SECONDS) == TASK
    assert ahead.dropped == 0


# -- messages of other programs


def envelope(body: bytes = b"[]", **changes: Any) -> bytes:
    """A message as kombu puts it into Redis's list, with changed fields."""
    message = {
        "body": base64.b64encode(body).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"task": "tokenmill.compute_shard", "id": "x"},
        "properties": {
            "body_encoding": "base64",
            "delivery_info": {"exchange": "", "routing_key": "q"},
            "delivery_tag": "t",
        },
    }
    return json.dumps(message | changes).encode()


PICKLED = b"cos\nsystem\n(S'touch /tmp/tokenmill-was-here'\ntR."
GOOD = b'[["job-a", 1, 1], {}, {}]'
FOREIGN_MESSAGES = {
    "garbage": b"\xff\xfe\x00",
    "not JSON": b"hello",
    "a number": b"7",
    "an empty object": b"{}",
    "nested deeply": b"[" * 100_000,
    "headers of another kind": envelope(GOOD, headers=[1]),
    "no headers": envelope(GOOD, headers=None),
    "pickle": envelope(PICKLED, **{"content-type": "application/x-python-serialize"}),
    "yaml": envelope(b"!!python/object/apply:os.system [ls]", **{"content-type": "application/x-yaml"}),
    "compressed badly": envelope(
        GOOD, headers={"task": "tokenmill.compute_shard", "compression": "application/x-gzip"}
    ),
    "another task": envelope(GOOD, headers={"task": "tokenmill.submit"}),
    "another expiry": envelope(GOOD, headers={"task": "tokenmill.compute_shard", "expires": ["soon"]}),
    "an expiry without a zone": envelope(GOOD, headers={"task": "tokenmill.compute_shard", "expires": "2020-01-01"}),
    "no arguments": envelope(b"[[], {}, {}]"),
    "a path for a job": envelope(b'[["../../etc/passwd", 1, 1], {}, {}]'),
    "a shard below zero": envelope(b'[["job-a", -1, 1], {}, {}]'),
    "a shard in words": envelope(b'[["job-a", "1", 1], {}, {}]'),
    "keywords": envelope(b'[["job-a", 1, 1], {"also": 1}, {}]'),
    "a large one": envelope(b'[["job-a", 1, 1], {}, {"x": "' + b"y" * 20_000 + b'"}]'),
}


@pytest.mark.parametrize("foreign", FOREIGN_MESSAGES)
def test_a_strangers_message_is_counted_and_dropped_and_ours_behind_it_is_taken(
    queue: CeleryQueue, raw: Any, prefix: str, foreign: str
) -> None:
    queue.put("q", TASK)
    key = f"{prefix}.q"
    raw.rpush(key, FOREIGN_MESSAGES[foreign])  # at the end where workers take
    assert queue.take(["q"], HANG_SECONDS) == TASK
    assert queue.dropped == 1
    assert raw.llen(key) == 0
    assert not Path("/tmp/tokenmill-was-here").exists()


@pytest.mark.slow
def test_many_foreign_messages_do_not_hold_a_worker_beyond_its_timeout(
    queue: CeleryQueue, raw: Any, prefix: str
) -> None:
    queue.put("q", TASK)
    key = f"{prefix}.q"
    for _ in range(40):
        raw.rpush(key, *[envelope(b"[]")] * 100)
    queue.take(["q"], 0.2)
    assert 100 <= queue.dropped < 4_000, "it checked its timeout in between"


def test_a_key_of_another_redis_type_is_reported_and_other_queues_still_work(
    queue: CeleryQueue, raw: Any, prefix: str
) -> None:
    queue.put("q", TASK)
    key = f"{prefix}.q"
    raw.delete(key)
    raw.set(key, "no list")
    with pytest.raises(ServiceUnavailable, match="WRONGTYPE"):
        queue.take(["q"], 0)
    queue.put("other", TASK)
    assert queue.take(["other"], HANG_SECONDS) == TASK


def test_a_callers_own_celery_is_left_alone(redis_server: RedisServer) -> None:
    theirs = Celery("theirs", broker="memory://", set_as_current=True)
    queue = CeleryQueue(CeleryQueueSettings(redis_server.url), SimulatedClock())
    assert current_app.main == theirs.main
    queue.close()
