"""The lane on a real Redis: calls survive faults and other programs' data, and nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis

from pipeline.adapters.redis.connection import RedisSettings
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.client import CallSettings, answer
from pipeline.lane.ports import ADDRESSED_TO_ANY, START, LaneFull, LaneQueue
from pipeline.lane.redis import RedisLane
from pipeline.lane.redis_worker import RedisLaneWorker
from pipeline.runtime.availability import ServiceUnavailable
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, TokensEvent
from tests.pipeline.contracts.lane_contract import LIFETIME, MODEL, end, read_events, request, tokens
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS

OpenRedisLane = Callable[[LaneSettings], RedisLane]
SHORT = LaneSettings(worker_timeout_seconds=LIFETIME)
QUICK = CallSettings(silence_timeout_seconds=0.3, poll_interval_seconds=0.1, unavailable_timeout_seconds=2.0)


@pytest.fixture
def prefix(unique_name: Callable[[], str]) -> str:
    return unique_name()


@pytest.fixture
def open_lane(redis_server: RedisServer, prefix: str) -> OpenRedisLane:
    where = RedisSettings(redis_server.url, prefix=prefix, timeout_seconds=1.0, connect_timeout_seconds=1.0)
    return lambda settings: RedisLane(where, SystemClock(), settings)


@pytest.fixture
def lane(open_lane: OpenRedisLane) -> RedisLane:
    return open_lane(SHORT)


@pytest.fixture
def raw(redis_server: RedisServer) -> Any:
    return redis.Redis.from_url(redis_server.url)


class Worker(threading.Thread):
    """A worker that answers each request with a given number of tokens, unless it dies after some.

    Attributes:
        seen: (attempt, tokens known before) of each request that it took.
    """

    def __init__(self, worker: RedisLaneWorker, count: int = 6, dies_after: int | None = None) -> None:
        super().__init__(daemon=True)
        self.worker = worker
        self.count = count
        self.dies_after = dies_after
        self.seen: list[tuple[int, int]] = []
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                for taken in self.worker.take([LaneQueue(MODEL)], 1, 0.2):
                    known = len(taken.tokens[0]) if taken.tokens else 0
                    self.seen.append((taken.attempt, known))
                    if not self.answer(taken.id, taken.attempt, known):
                        return
            except ServiceUnavailable:
                time.sleep(0.05)

    def answer(self, name: str, attempt: int, known: int) -> bool:
        for sequence, token in enumerate(range(known, self.count)):
            if sequence == self.dies_after:
                return False
            if self.worker.emit([TokensEvent(name, attempt, sequence, tokens=(token,), text=f"{token} ")]):
                return True
            time.sleep(0.02)
        self.worker.emit([EndEvent(name, attempt, self.count - known, {"attempt": attempt})])
        return True


@pytest.fixture
def start_worker(lane: RedisLane) -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def start(name: str, **how: Any) -> Worker:
        started.append(Worker(lane.worker(name), **how))
        started[-1].start()
        return started[-1]

    yield start
    for worker in started:
        worker.stop.set()
    for worker in started:
        worker.join(HANG_SECONDS)


def text_of(events: list[LaneEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TokensEvent))


# -- calls, with faults


@pytest.mark.slow
def test_a_call_whose_worker_dies_in_the_middle_goes_on_elsewhere_behind_its_tokens(
    lane: RedisLane, start_worker: Callable[..., Worker]
) -> None:
    start_worker("dies", dies_after=3)
    events = answer(lane, request(), SystemClock(), QUICK)
    first = [next(events) for _ in range(3)]
    lives = start_worker("lives")
    rest = list(events)
    assert text_of([*first, *rest]) == "0 1 2 3 4 5 "
    assert isinstance(rest[-1], EndEvent)
    assert lives.seen == [(2, 3)], "the tokens of the first attempt weren't computed again"


@pytest.mark.parametrize("fault", ["emptied", "stopped"])
@pytest.mark.slow
def test_a_call_goes_on_when_the_server_is_restarted_empty_or_stands_still(
    redis_server: RedisServer, lane: RedisLane, start_worker: Callable[..., Worker], fault: str
) -> None:
    start_worker("w", count=30)
    events = answer(
        lane,
        request(),
        SystemClock(),
        CallSettings(silence_timeout_seconds=0.3, poll_interval_seconds=0.1, unavailable_timeout_seconds=10.0),
    )
    came = [next(events) for _ in range(3)]
    if fault == "emptied":
        redis_server.start_empty()
    else:
        redis_server.pause()
        threading.Timer(1.0, redis_server.resume).start()
    came += list(events)
    assert isinstance(came[-1], EndEvent), came[-1]
    assert text_of(came) == "".join(f"{token} " for token in range(30))


@pytest.mark.slow
def test_a_call_that_no_worker_survives_ends_with_an_error(
    lane: RedisLane, start_worker: Callable[..., Worker]
) -> None:
    for number in range(3):
        start_worker(f"dies{number}", count=100, dies_after=number + 1)
    *_, last = answer(lane, request(), SystemClock(), QUICK)
    assert isinstance(last, ErrorEvent)
    assert (last.code, last.status) == ("worker_lost", 503)


def test_a_call_without_a_server_ends_with_an_error_that_names_it(redis_server: RedisServer, lane: RedisLane) -> None:
    redis_server.kill()
    (last,) = answer(
        lane, request(), SystemClock(), CallSettings(unavailable_timeout_seconds=0.3, poll_interval_seconds=0.1)
    )
    assert isinstance(last, ErrorEvent)
    assert (last.code, last.status) == ("lane_unavailable", 503)
    assert f"127.0.0.1:{redis_server.port}" in last.message


@pytest.mark.slow
def test_a_call_that_no_worker_takes_ends_at_its_deadline(lane: RedisLane) -> None:
    clock = SystemClock()
    began = time.monotonic()
    (last,) = answer(lane, request(deadline=in_seconds(clock, 0.5)), clock, QUICK)
    assert isinstance(last, ErrorEvent)
    assert last.code == "request_timeout"
    assert time.monotonic() - began >= 0.4


def test_a_caller_that_goes_away_cancels(lane: RedisLane, start_worker: Callable[..., Worker]) -> None:
    worker = start_worker("w", count=10_000)
    events = answer(lane, request(), SystemClock(), QUICK)
    next(events)
    events.close()
    assert lane.lost([request()]) == {"r1"}
    worker.count = 3
    *_, last = answer(lane, request("r2"), SystemClock(), QUICK)
    assert isinstance(last, EndEvent), "the worker was free again"


def in_seconds(clock: SystemClock, seconds: float) -> Any:
    return clock.now() + timedelta(seconds=seconds)


@pytest.mark.slow
def test_a_server_that_stands_still_fails_every_call_in_time(redis_server: RedisServer, lane: RedisLane) -> None:
    worker = lane.worker("w")
    lane.send(request())
    worker.take([LaneQueue(MODEL)], 1, 2.0)
    redis_server.pause()
    for call in (
        lambda: lane.send(request("r2")),
        lambda: lane.read({"r1": START}, 0.1),
        lambda: lane.cancel(request()),
        lambda: lane.lost([request()]),
        lambda: worker.take([LaneQueue(MODEL)], 1, 0.1),
        lambda: worker.emit([tokens("r1", 0)]),
        lambda: worker.hold(["r1"]),
    ):
        with pytest.raises(ServiceUnavailable):
            call()


# -- other programs' data, and what is left


@pytest.mark.slow
def test_what_is_no_request_or_event_is_counted_and_passed_over(lane: RedisLane, raw: Any, prefix: str) -> None:
    worker = lane.worker("w")
    another = b'{"id": "r9", "model": "another", "body": {}}'
    strange = {"a": b"\xff", "b": b'{"id": "../x"}', "c": another, "d": b'{"id": "e", "model": "%s", "body": {}}'}
    lane.send(request())
    for number, (name, data) in enumerate(strange.items()):
        raw.hset(f"{prefix}:lane:wanted:{name}", mapping={"attempt": 1, "number": number, "request": data})
        raw.zadd(f"{prefix}:lane:queue:{MODEL}:default", {name: number})
    raw.zadd(f"{prefix}:lane:queue:{MODEL}:default", {"no such request": 9})
    assert [one.id for one in worker.take([LaneQueue(MODEL)], 1, 20.0)] == ["r1"]
    assert worker.dropped == 4
    assert not raw.exists(*(f"{prefix}:lane:wanted:{name}" for name in strange))
    raw.xadd(f"{prefix}:lane:events:r1", {"event": b'{"kind": "exec"}'}, id="1-0")
    worker.emit([tokens("r1", 1)])
    assert read_events(lane, "r1") == [tokens("r1", 1)]
    assert lane.unreadable == 1


@pytest.mark.slow
def test_every_key_runs_out(open_lane: OpenRedisLane, raw: Any, prefix: str) -> None:
    lane = open_lane(LaneSettings(worker_timeout_seconds=0.3, default_deadline_seconds=0.8, retention_seconds=0.3))
    worker = lane.worker("w")
    worker.take([LaneQueue(MODEL)], 1, 0)
    for name in ("r1", "r2", "r3"):
        lane.send(request(name))
    lane.send(request("r5", queue="@elsewhere"))
    worker.take([LaneQueue(MODEL)], 2, 1.0)
    worker.emit([tokens("r1", 0), tokens("r2", 0), end("r2", 1)])
    keys = list(raw.scan_iter(f"{prefix}:*"))
    assert len(keys) >= 6
    assert all(raw.pttl(key) > 0 for key in keys)
    time.sleep(1.8)
    assert list(raw.scan_iter(f"{prefix}:*")) == []
    lane.send(request("r4"))
    assert [one.id for one in worker.take([LaneQueue(MODEL)], 1, 2.0)] == ["r4"]


def test_given_many_tenants_whose_requests_ran_out_then_the_next_one_is_taken_at_once(
    lane: RedisLane, prefix: str, raw: Any
) -> None:
    for number in range(150):
        lane.send(request(f"r{number}", tenant=f"gone-{number}"))
        raw.delete(f"{prefix}:lane:wanted:r{number}")  # as at its deadline
    lane.send(request("living", tenant="here"))
    # Waiting for a further request before each of them would take twice as long.
    assert [one.id for one in lane.worker("w").take([LaneQueue(MODEL)], 1, 10.0)] == ["living"]


def let_callers_die(raw: Any, prefix: str) -> None:
    """As when they have said nothing for their lifetime."""
    key = f"{prefix}:lane:callers:{MODEL}"
    for member in raw.zrange(key, 0, -1):
        raw.zadd(key, {member: 1})


def test_given_callers_that_died_then_their_requests_leave_the_count_and_others_are_admitted(
    open_lane: OpenRedisLane, raw: Any, prefix: str
) -> None:
    lane = open_lane(LaneSettings(max_waiting=2))
    worker = lane.worker("w")
    lane.send(request("taken"))
    assert [one.id for one in worker.take([LaneQueue(MODEL)], 1, 2.0)] == ["taken"]
    lane.send(request("waits", tenant="gone"))
    with pytest.raises(LaneFull):
        lane.send(request("next"))
    let_callers_die(raw, prefix)
    lane.send(request("next"))
    assert lane.waiting([MODEL]) == {MODEL: 1}
    assert [one.id for one in worker.take([LaneQueue(MODEL)], 5, 2.0)] == ["next"]
    assert worker.hold(["taken", "next"]) == {"taken"}
    assert not raw.exists(f"{prefix}:lane:queue:{MODEL}:gone", f"{prefix}:lane:wanted:waits")
    let_callers_die(raw, prefix)
    assert lane.waiting([MODEL]) == {MODEL: 0}, "the count alone drops them too"


def test_given_callers_that_died_then_their_addressed_requests_leave_all_queues(
    lane: RedisLane, raw: Any, prefix: str
) -> None:
    lane.send(request("r1", tenant="gone", queue="@w"))
    let_callers_die(raw, prefix)
    assert lane.waiting([MODEL]) == {MODEL: 0}
    left = {key.decode().removeprefix(f"{prefix}:lane:") for key in raw.scan_iter(f"{prefix}:lane:*")}
    assert left == {f"sent:{MODEL}"}


def test_given_an_entry_of_a_request_that_was_sent_again_after_its_deadline_then_it_is_taken_where_it_was_sent(
    lane: RedisLane, raw: Any, prefix: str
) -> None:
    worker = lane.worker("w")
    own, anyone = LaneQueue(MODEL, "@w"), LaneQueue(MODEL, ADDRESSED_TO_ANY)
    lane.send(request("r1", queue="@w"))
    raw.delete(f"{prefix}:lane:wanted:r1")  # as at its deadline
    lane.send(request("r1"))
    assert not raw.exists(f"{prefix}:lane:queue:{MODEL}/@:default"), "the entry of before does not count"
    assert worker.take([own, anyone], 9, 0) == []
    assert lane.waiting([MODEL]) == {MODEL: 1}
    assert worker.take([LaneQueue(MODEL)], 9, 0) == [request("r1")]


@pytest.mark.parametrize("expiry", ["its own", "its caller's too"])
def test_given_an_addressed_request_that_expired_then_no_entry_of_it_counts(
    lane: RedisLane, raw: Any, prefix: str, expiry: str
) -> None:
    lane.send(request("r1", tenant="gone", queue="@w"))
    raw.delete(f"{prefix}:lane:wanted:r1")  # as at its deadline
    if expiry == "its own":
        assert lane.worker("w").take([LaneQueue(MODEL, "@w")], 1, 0) == []
    else:
        let_callers_die(raw, prefix)
    assert lane.waiting([MODEL]) == {MODEL: 0}
    assert not raw.exists(f"{prefix}:lane:queue:{MODEL}/@:gone", f"{prefix}:lane:turns:{MODEL}/@")


def test_given_requests_of_many_tenants_for_another_worker_then_no_more_of_them_are_read_than_are_needed(
    lane: RedisLane, raw: Any
) -> None:
    for number in range(100):
        lane.send(request(f"r{number}", tenant=f"t{number}", queue="@other"))
    lane.send(request("own", tenant="here", queue="@w"))
    own, others = LaneQueue(MODEL, "@w"), LaneQueue(MODEL, ADDRESSED_TO_ANY, 0.001)
    worker = lane.worker("w")
    time.sleep(0.01)
    raw.config_resetstat()
    assert [one.id for one in worker.take([own, others], 1, 0)] == ["own"]
    assert raw.info("commandstats")["cmdstat_zrange"]["calls"] == 1, "the tenants of the first queue"
    raw.config_resetstat()
    assert len(worker.take([own, others], 2, 0)) == 2
    assert raw.info("commandstats")["cmdstat_zrange"]["calls"] == 4, "the tenants of both queues, and two of their own"


def test_given_a_request_of_an_earlier_version_without_a_queue_then_it_is_handed_on(
    lane: RedisLane, raw: Any, prefix: str
) -> None:
    lane.send(request("r1"))
    raw.hdel(f"{prefix}:lane:wanted:r1", "queue")
    assert len(lane.worker("dies").take([LaneQueue(MODEL)], 1, 0)) == 1
    raw.zadd(f"{prefix}:lane:waiting:{MODEL}", {"r1": 1})  # as when it has said nothing for its lifetime
    assert lane.worker("lives").take([LaneQueue(MODEL)], 1, 0) == [request("r1")]


def test_given_a_caller_that_polls_or_has_an_answer_then_its_request_is_not_dropped(
    lane: RedisLane, raw: Any, prefix: str
) -> None:
    worker = lane.worker("w")
    lane.send(request("begun"))
    worker.take([LaneQueue(MODEL)], 1, 2.0)
    worker.emit([tokens("begun", 0)])
    lane.send(request("waits"))
    let_callers_die(raw, prefix)
    assert lane.lost([request("waits")]) == frozenset()
    assert lane.waiting([MODEL]) == {MODEL: 1}
    assert worker.hold(["begun"]) == frozenset()
    let_callers_die(raw, prefix)
    lane.send(request("waits"))  # by another who took it over
    assert [one.id for one in worker.take([LaneQueue(MODEL)], 5, 2.0)] == ["waits"]
