"""Requests are addressed by the heartbeats as they are, and go to any worker where these say nothing useful."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.lane.client import CallSettings, LaneCalls
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import ADDRESSED_TO_ANY, LaneFull, LaneQueue
from pipeline.lane.prefix_router import PrefixRouter
from pipeline.ports import WorkerState
from pipeline.runtime.availability import ServiceUnavailable
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import EndEvent, HandBackEvent, LaneRequest, TokensEvent
from tests.pipeline.simulation import SimulatedClock
from tests.waiting import HANG_SECONDS, wait_for

MODEL = "m"
LIFETIME = 10.0


class Beats(MemoryHeartbeats):
    """Heartbeats that may be unreachable; counts how often they are read."""

    is_away = False
    reads = 0

    def workers(self) -> list[WorkerState]:
        self.reads += 1
        if self.is_away:
            raise ServiceUnavailable("redis://host: can't")
        return super().workers()


def chat(name: str, system: int = 0, **more: Any) -> LaneRequest:
    """A chat with a long system prompt, of these numbered ones."""
    messages = [{"role": "system", "content": f"{system} " * 200}, {"role": "user", "content": name}]
    return LaneRequest(name, MODEL, {"messages": messages}, **more)


class Setup:
    def __init__(self, workers: Sequence[str] = ("w1", "w2", "w3", "w4"), ratio: float = 1.25) -> None:
        self.clock = SimulatedClock()
        self.beats = Beats(self.clock, LIFETIME)
        for name in workers:
            self.beat(name)
        self.router = PrefixRouter(self.clock, self.beats, ratio)
        self.router.refresh()

    def beat(self, name: str, **state: Any) -> None:
        self.beats.send_heartbeat(
            WorkerState(name, **({"models": frozenset({MODEL}), "takes_lane_requests": True} | state))
        )

    def refresh(self, seconds: float = 1.0) -> None:
        self.clock.sleep(seconds)
        self.router.refresh()

    def queue(self, request: LaneRequest) -> str:
        return self.router.route(request).queue


def own(setup: Setup, request: LaneRequest) -> str:
    """The worker that an idle installation gives the request."""
    addressed = setup.queue(replace(request, id="probe"))
    setup.router.release("probe")
    return addressed.removeprefix("@")


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_requests_with_one_prefix_go_to_one_worker_one_after_the_other(setup: Setup) -> None:
    queues = set()
    for number in range(10):
        queues.add(setup.queue(chat(f"r{number}")))
        setup.router.release(f"r{number}")
    assert len(queues) == 1
    assert setup.router.routes() == {"prefix": 10, "bound": 0, "general": 0, "decode": 0}
    assert len({setup.queue(chat(f"s{number}", system=number)) for number in range(40)}) == 4


def test_gateways_agree(setup: Setup) -> None:
    other = PrefixRouter(setup.clock, setup.beats, 1.25)
    other.refresh()
    for number in range(20):
        assert other.route(chat("r", number)) == setup.router.route(chat("r", number))
        other.release("r")
        setup.router.release("r")


def test_a_hot_prefix_is_spread_by_the_bound(setup: Setup) -> None:
    queues = Counter(setup.queue(chat(f"r{number}")) for number in range(100))
    assert max(queues.values()) <= 32, "1.25 of the mean, rounded up"
    assert len(queues) == 4
    routes = setup.router.routes()
    assert (routes["prefix"], routes["bound"]) == (max(queues.values()), 100 - max(queues.values()))
    for number in range(100):
        setup.router.release(f"r{number}")
    assert setup.queue(chat("after")) == queues.most_common(1)[0][0], "all have ended"


def test_a_request_without_a_prefix_goes_to_any_worker(setup: Setup) -> None:
    plain = LaneRequest("r", MODEL, {"messages": [{"role": "user", "content": "hello"}]})
    assert setup.router.route(plain) is plain
    assert setup.router.routes()["general"] == 1


def test_a_later_attempt_and_a_request_with_a_queue_stay_as_they_are(setup: Setup) -> None:
    for one in (chat("r", attempt=2), chat("s", queue="decode")):
        assert setup.router.route(one) is one


@pytest.mark.parametrize("state", [{"draining": True}, {"takes_lane_requests": False}, {"models": frozenset({"n"})}])
def test_only_workers_that_take_requests_of_the_model_get_any(state: dict[str, Any]) -> None:
    setup = Setup(["w1", "w2"])
    setup.beat("w3", **state)
    setup.beat("not a queue's name", takes_lane_requests=True)
    setup.refresh()
    assert {setup.queue(chat(f"r{number}", number)) for number in range(60)} == {"@w1", "@w2"}


@pytest.mark.parametrize("workers", [[], ["w1"]])
def test_with_fewer_than_two_workers_nothing_is_addressed(workers: list[str]) -> None:
    assert Setup(workers).queue(chat("r")) == ""


def test_a_worker_that_falls_silent_gets_no_more_and_only_its_prefixes_move(setup: Setup) -> None:
    before = {number: own(setup, chat("r", number)) for number in range(40)}
    setup.clock.sleep(LIFETIME)
    for name in ("w1", "w2", "w4"):
        setup.beat(name)
    setup.refresh()
    for number, worker in before.items():
        after = own(setup, chat("r", number))
        assert after != "w3"
        assert worker in ("w3", after)


@pytest.mark.slow
def test_heartbeats_are_read_on_a_thread_of_their_own_until_it_is_stopped(setup: Setup) -> None:
    stop, reads = threading.Event(), setup.beats.reads
    reading = threading.Thread(target=setup.router.run, args=(stop,))
    reading.start()
    wait_for(lambda: setup.beats.reads > reads, "they are read")
    setup.beats.reads = 0
    wait_for(lambda: setup.beats.reads, "and read again")
    stop.set()
    reading.join(HANG_SECONDS)
    assert not reading.is_alive()


def test_polling_for_events_reads_no_heartbeats(setup: Setup) -> None:
    calls = LaneCalls(MemoryLane(setup.clock, LaneSettings()), setup.clock, CallSettings(), router=setup.router)
    calls.start(chat("r"))
    setup.clock.sleep(LIFETIME)
    reads = setup.beats.reads
    list(calls.poll())
    assert setup.beats.reads == reads, "hundreds of workers would delay all streams"


def test_while_heartbeats_can_not_be_read_the_last_ones_count_and_then_any_worker(setup: Setup) -> None:
    setup.beats.is_away = True
    setup.refresh()
    assert setup.queue(chat("r1"))
    for _ in range(6):
        setup.refresh()
    assert setup.queue(chat("r2")) == ""
    setup.beats.is_away = False
    for name in ("w1", "w2"):
        setup.beat(name)
    setup.refresh()
    assert setup.queue(chat("r3"))


# -- in a client's calls


def test_a_call_is_addressed_and_its_next_attempt_goes_to_any_worker(setup: Setup) -> None:
    lane = MemoryLane(setup.clock, LaneSettings(worker_timeout_seconds=1.0))
    calls = LaneCalls(lane, setup.clock, CallSettings(poll_interval_seconds=0.0), router=setup.router)
    name = own(setup, chat("r1"))
    calls.start(chat("r1"))
    worker = lane.worker(name)
    assert worker.take([LaneQueue(MODEL)], 1, 0) == []
    (taken,) = worker.take([LaneQueue(MODEL, f"@{name}")], 1, 0)
    worker.emit([TokensEvent("r1", 1, 0, tokens=(1,)), HandBackEvent("r1", 1, 1)])
    assert [event.kind for event in (*calls.poll(), *calls.poll())] == ["tokens"]
    (again,) = lane.worker("any").take([LaneQueue(MODEL)], 1, 0)
    assert (taken.queue, again.queue, again.attempt) == (f"@{name}", "", 2)
    assert setup.queue(chat("r2")) == f"@{name}", "the first one is not counted at its worker any more"


@pytest.mark.parametrize("end", ["ends", "is cancelled", "is refused"])
def test_a_call_that_has_ended_is_not_counted(setup: Setup, end: str) -> None:
    full = LaneSettings(max_waiting=0) if end == "is refused" else LaneSettings()
    lane = MemoryLane(setup.clock, full)
    calls = LaneCalls(lane, setup.clock, CallSettings(poll_interval_seconds=0.0), router=setup.router)
    name = own(setup, chat("r"))
    for number in range(8):
        if end == "is refused":
            with pytest.raises(LaneFull):
                calls.start(chat(f"r{number}"))
            continue
        calls.start(chat(f"r{number}"))
        if end == "is cancelled":
            calls.cancel(f"r{number}")
        else:
            worker = lane.worker(name)
            worker.take([LaneQueue(MODEL, ADDRESSED_TO_ANY)], 1, 0)
            worker.emit([EndEvent(f"r{number}", 1, 0, {})])
            assert [event.kind for event in calls.poll()] == ["end"]
    assert setup.router.routes()["prefix"] == 8 + 1, "each found its worker idle"


def test_threads_may_route_and_release_at_once(setup: Setup) -> None:
    def work(first: int) -> None:
        for number in range(first, first + 300):
            assert setup.queue(chat(f"r{number}", number % 5))
            setup.router.release(f"r{number}")

    threads = [threading.Thread(target=work, args=(1_000 * at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    routes = setup.router.routes()
    assert (routes["prefix"] + routes["bound"], routes["general"]) == (1_200, 0)
    for number in range(8):
        assert own(setup, chat("x", number))
    assert setup.router.routes()["bound"] == routes["bound"], "nothing is counted any more"
