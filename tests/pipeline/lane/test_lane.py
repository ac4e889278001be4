"""One answer as its caller sees it, the paths of a call that a real server hardly shows, and what the wire refuses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta

import pytest
from pydantic import ValidationError

from pipeline.lane.client import (
    FAILED,
    HANDED_BACK,
    LANE_FULL,
    NO_ANSWER,
    ROUTED,
    WORKER_LOST,
    CallSettings,
    Fallback,
    LaneCalls,
    Received,
    answer,
)
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import LANE_OVERRUN, LaneQueue, LaneStream
from pipeline.runtime.availability import ServiceUnavailable
from schemas.jobs.job import Tier
from schemas.requests.policy_report import ContentVerdict, PolicyReport
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import (
    EndEvent,
    ErrorEvent,
    HandBackEvent,
    LaneEvent,
    LaneRequest,
    Position,
    Route,
    TokensEvent,
    addressed_to,
    event_json,
    read_event,
    read_request,
    request_json,
)
from tests.pipeline.simulation import START, SimulatedClock

REPORT = PolicyReport((ContentVerdict("rules", "r", "route", "prompt", "big"),), 3, 1)
REQUEST = LaneRequest("r1", "m", {"messages": [{"role": "user", "content": "é\u2028\x00"}], "seed": 2**63})


def tokens(sequence: int, *ids: int, attempt: int = 1, choice: int = 0) -> TokensEvent:
    return TokensEvent("r1", attempt, sequence, choice, ids, text="x")


# -- an answer


def test_events_of_other_attempts_and_repeats_do_not_count() -> None:
    stream = LaneStream(REQUEST)
    assert stream.accept(tokens(0, 1)) is not None
    assert stream.accept(tokens(0, 1)) is None
    stream.again()
    assert stream.accept(tokens(1, 9)) is None, "of the attempt before"
    assert stream.accept(tokens(0, 2, attempt=2)) is not None
    assert stream.again().tokens == ((1, 2),)


def test_the_next_attempt_is_addressed_to_no_worker() -> None:
    assert LaneStream(replace(REQUEST, queue="@w")).again().queue == ""


def test_the_next_attempt_knows_the_tokens_of_every_choice() -> None:
    stream = LaneStream(LaneRequest("r1", "m", {}, tokens=((7,), (8,))))
    stream.accept(tokens(0, 1, 2, choice=3))
    stream.accept(tokens(1, 3, choice=1))
    again = stream.again()
    assert (again.attempt, again.tokens) == (2, ((7,), (8, 3), (), (1, 2)))
    assert Position(1, 10**9) < stream.position < Position(2, 0)


def test_missing_events_end_the_answer_with_an_error() -> None:
    stream = LaneStream(REQUEST)
    stream.accept(tokens(0, 1))
    last = stream.accept(tokens(3, 1))
    assert isinstance(last, ErrorEvent)
    assert (last.code, stream.ended) == (LANE_OVERRUN, True)
    assert stream.accept(tokens(1, 1)) is None


# -- a call


class BrokenLane:
    """A lane in memory whose first calls fail."""

    def __init__(self, lane: MemoryLane, failures: int) -> None:
        self._lane = lane
        self.failures = failures

    def _fail(self) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise ServiceUnavailable("redis://host: can't")

    def send(self, request: LaneRequest) -> None:
        self._fail()
        self._lane.send(request)

    def read(self, after: Mapping[str, Position], timeout: float) -> list[LaneEvent]:
        self._fail()
        return self._lane.read(after, 0)

    def cancel(self, request: LaneRequest) -> None:
        self._fail()
        self._lane.cancel(request)

    def lost(self, requests: Collection[LaneRequest]) -> frozenset[str]:
        self._fail()
        return self._lane.lost(requests)


def test_a_lane_that_is_away_for_a_while_is_waited_for() -> None:
    clock = SimulatedClock()
    lane = MemoryLane(clock)
    events = answer(
        BrokenLane(lane, failures=5),
        REQUEST,
        clock,
        CallSettings(unavailable_timeout_seconds=30, poll_interval_seconds=0.5),
    )
    worker = lane.worker("w")
    lane.send(REQUEST)  # as an answer lost on its way back: the request had come through
    assert worker.take([LaneQueue("m")], 1, 0) == [REQUEST]
    worker.emit([tokens(0, 1), EndEvent("r1", 1, 1, {"id": "x"})])
    assert [event.kind for event in events] == ["tokens", "end"]
    assert clock.monotonic() == pytest.approx(2.0)


def test_an_answer_in_memory_is_dropped_when_its_end_was_read() -> None:
    lane = MemoryLane(SimulatedClock())
    worker = lane.worker("w")
    begin = {"r1": Position(0, 0)}
    lane.send(REQUEST)
    worker.take([LaneQueue("m")], 1, 0)
    worker.emit([tokens(0, 1)])
    for _ in range(2):
        assert [event.kind for event in lane.read(begin, 0)] == ["tokens"], "it has not ended"
    worker.emit([HandBackEvent("r1", 1, 1)])
    for _ in range(2):
        assert [event.kind for event in lane.read(begin, 0)] == ["tokens", "hand_back"], "another attempt follows"
    lane.send(replace(REQUEST, attempt=2))
    worker.take([LaneQueue("m")], 1, 0)
    worker.emit([EndEvent("r1", 2, 0, {"id": "x"})])
    assert [event.kind for event in lane.read(begin, 0)] == ["tokens", "hand_back", "end"]
    assert lane.read(begin, 0) == []
    assert worker.emit([EndEvent("r1", 2, 0, {"id": "x"})]) == {"r1"}, "the worker has nothing to do for it"


def test_a_lane_that_stays_away_ends_the_call_with_an_error() -> None:
    clock = SimulatedClock()
    (last,) = answer(
        BrokenLane(MemoryLane(clock), 10**9),
        REQUEST,
        clock,
        CallSettings(unavailable_timeout_seconds=10, poll_interval_seconds=0.5),
    )
    assert isinstance(last, ErrorEvent)
    assert (last.code, last.message) == ("lane_unavailable", "redis://host: can't")
    assert 10 <= clock.monotonic() < 12


def test_a_full_lane_ends_the_call_at_once() -> None:
    clock = SimulatedClock()
    lane = MemoryLane(clock, LaneSettings(max_waiting=0))
    (last,) = answer(lane, REQUEST, clock)
    assert isinstance(last, ErrorEvent)
    assert (last.code, last.status) == ("lane_full", 429)


def test_a_request_that_is_lost_too_often_ends_with_an_error_but_handing_back_costs_no_attempt() -> None:
    clock = SimulatedClock()
    lane = MemoryLane(clock, LaneSettings(worker_timeout_seconds=1.0))
    calls = LaneCalls(
        PollingLane(lane, clock),
        clock,
        CallSettings(attempts=2, silence_timeout_seconds=1.0, poll_interval_seconds=0.5),
    )
    assert calls.start(REQUEST)
    assert not calls.start(REQUEST), "it is there already"
    events: list[LaneEvent] = []
    for attempt in range(1, 6):  # handed back by one worker after the other,
        worker = lane.worker(f"w{attempt}")
        assert [one.attempt for one in worker.take([LaneQueue("m")], 1, 0)] == [attempt]
        worker.emit([tokens(0, attempt, attempt=attempt), HandBackEvent("r1", attempt, 1)])
        events += [*calls.poll(), *calls.poll()]
    assert [event.kind for event in events] == ["tokens"] * 5
    for attempt in (6, 7):  # then lost with two
        worker = lane.worker(f"w{attempt}")
        (taken,) = worker.take([LaneQueue("m")], 1, 0)
        assert (taken.attempt, len(taken.tokens[0])) == (attempt, 5)
        worker.emit([TokensEvent("r1", attempt, 0)])
        clock.sleep(2.0)
        events += [event for _ in range(8) for event in calls.poll()]
    assert isinstance(events[-1], ErrorEvent)
    assert (events[-1].code, len(calls)) == ("worker_lost", 0)


def test_between_two_reads_there_is_a_pause_for_each_call_and_what_comes_meanwhile_comes_together() -> None:
    clock = SimulatedClock()
    lane = MemoryLane(clock)
    calls = LaneCalls(BrokenLane(lane, failures=0), clock, CallSettings(pause_per_call_seconds=0.1))
    for number in range(3):
        calls.start(replace(REQUEST, id=f"r{number}"))
    assert list(calls.poll()) == []
    worker = lane.worker("w")
    assert len(worker.take([LaneQueue("m")], 3, 0)) == 3
    emitted = [TokensEvent(f"r{number}", 1, sequence, 0, (1,)) for sequence in range(2) for number in range(3)]
    worker.emit(emitted)
    assert sorted(calls.poll(), key=emitted.index) == emitted
    assert clock.monotonic() == pytest.approx(0.3)
    assert list(calls.poll()) == []
    assert clock.monotonic() == pytest.approx(0.6)


# -- versions on trial


class Trial:
    """Calls with a fallback from model "m" to "old", by the simulated clock."""

    def __init__(self, received: Received, model: str | None = "old", bounds: LaneSettings | None = None) -> None:
        self.clock = SimulatedClock()
        self.lane = MemoryLane(self.clock, bounds or LaneSettings(worker_timeout_seconds=1.0))
        settings = CallSettings(silence_timeout_seconds=1.0, poll_interval_seconds=0.5)
        self.calls = LaneCalls(PollingLane(self.lane, self.clock), self.clock, settings)
        self.reports: list[str] = []
        self.fallback = Fallback(model, 5.0, received, self.reports.append)

    def start(self) -> None:
        assert self.calls.start(REQUEST, self.fallback)

    def take(self, model: str) -> list[LaneRequest]:
        self.worker = self.lane.worker(f"w-{model}")
        return self.worker.take([LaneQueue(model)], 9, 0)

    def turn(self, times: int = 3) -> list[LaneEvent]:
        return [event for _ in range(times) for event in self.calls.poll()]


@pytest.mark.parametrize(
    ("received", "expected"), [("restart", ()), ("continue", ((1, 2),)), ("fail", None)]
)  # fmt: skip
def test_what_a_version_on_trial_lost_is_answered_by_the_other_one(
    received: Received, expected: tuple[tuple[int, ...], ...] | None
) -> None:
    trial = Trial(received)
    trial.start()
    assert len(trial.take("m")) == 1
    trial.worker.emit([tokens(0, 1, 2)])
    assert trial.turn(1) == [tokens(0, 1, 2)]
    trial.clock.sleep(2.0)
    events = trial.turn(6)
    assert trial.reports == [WORKER_LOST]
    assert trial.take("m") == []
    if expected is None:
        assert [(event.kind, getattr(event, "code", None)) for event in events] == [("error", WORKER_LOST)]
        return
    (taken,) = trial.take("old")
    assert (taken.model, taken.attempt, taken.tokens) == ("old", 2, expected)
    trial.worker.emit([EndEvent("r1", 2, 0, {"a": 1})])
    assert trial.turn(1) == [EndEvent("r1", 2, 0, {"a": 1})]
    assert len(trial.calls) == 0


def test_what_a_version_on_trial_hands_back_goes_to_the_other_one() -> None:
    trial = Trial("continue")
    trial.start()
    trial.take("m")
    trial.worker.emit([tokens(0, 1), HandBackEvent("r1", 1, 1)])
    assert trial.turn(2) == [tokens(0, 1)]
    assert trial.reports == [HANDED_BACK]
    assert [one.tokens for one in trial.take("old")] == [((1,),)]


@pytest.mark.parametrize("began", [False, True])
def test_what_a_version_on_trial_does_not_begin_goes_to_the_other_one(began: bool) -> None:
    trial = Trial("continue", bounds=LaneSettings())
    trial.start()
    trial.take("m")
    if began:
        trial.worker.emit([tokens(0, 1)])
    for _ in range(6):
        trial.clock.sleep(1.0)
        trial.worker.hold(["r1"])
        trial.turn(1)
    assert trial.reports == ([] if began else [NO_ANSWER])
    assert len(trial.take("old")) == (0 if began else 1)


@pytest.mark.parametrize(("status", "received", "falls_back"), [(500, "fail", True), (400, "fail", False)])
def test_a_failure_of_a_version_on_trial_is_not_the_callers_and_a_refusal_is(
    status: int, received: Received, falls_back: bool
) -> None:
    trial = Trial(received)
    trial.start()
    trial.take("m")
    trial.worker.emit([ErrorEvent("r1", 1, 0, "it_broke", "it broke", status)])
    events = trial.turn(2)
    assert (trial.reports, events == []) == ([FAILED] if falls_back else [], falls_back)
    assert len(trial.take("old")) == falls_back


def test_a_full_lane_of_a_version_on_trial_is_not_the_callers() -> None:
    trial = Trial("continue", bounds=LaneSettings(max_waiting=1))
    trial.lane.send(LaneRequest("another", "m", {}))
    trial.start()
    assert trial.reports == [LANE_FULL]
    assert [one.id for one in trial.take("old")] == ["r1"]


@pytest.mark.parametrize("is_copy", [False, True])
def test_content_policies_choose_the_model_of_a_request_on_trial_and_a_copy_ends(is_copy: bool) -> None:
    trial = Trial("continue", model=None if is_copy else "old")
    trial.start()
    trial.take("m")
    trial.worker.emit([HandBackEvent("r1", 1, 0, route=Route("k", "big", REPORT))])
    events = trial.turn(2)
    assert trial.reports == [ROUTED]
    assert [event.code for event in events if isinstance(event, ErrorEvent)] == ([ROUTED] if is_copy else [])
    assert len(trial.take("k")) == (not is_copy)
    assert trial.take("old") == []


def test_a_copy_that_is_lost_is_not_sent_again() -> None:
    trial = Trial("fail", model=None)
    trial.start()
    trial.take("m")
    trial.worker.emit([tokens(0, 1)])
    trial.turn(1)
    trial.clock.sleep(2.0)
    (last,) = trial.turn(6)
    assert isinstance(last, ErrorEvent)
    assert (last.code, len(trial.calls)) == (WORKER_LOST, 0)


class PollingLane(BrokenLane):
    """A lane in memory with slow reads."""

    def __init__(self, lane: MemoryLane, clock: SimulatedClock) -> None:
        super().__init__(lane, 0)
        self._clock = clock

    def read(self, after: Mapping[str, Position], timeout: float) -> list[LaneEvent]:
        self._clock.sleep(timeout)
        return super().read(after, 0)


# -- the wire


def test_requests_and_events_survive_the_wire() -> None:
    request = LaneRequest(
        "r-1.x_Y",
        "m",
        {"a": [1, {"b": None}], "big": 2**70},
        url="/v1/embeddings",
        tier=Tier.STANDARD,
        tenant="t",
        attempt=2,
        deadline=START + timedelta(seconds=1),
        tokens=((1, 2), ()),
        queue=addressed_to("host-1.example-77-ab"),
    )
    for one in (request, REQUEST):
        assert read_request(request_json(one)) == one
    for event in (
        TokensEvent("r1", 1, 0, 2, (1,), "\ud7ff", {"content": []}),
        EndEvent("r1", 1, 1, {"x": 1.5}),
        ErrorEvent("r1", 1, 1, "c", "m", 503, "max_tokens", ("max_tokens",)),
        HandBackEvent("r1", 1, 1),
        HandBackEvent(
            "r1",
            1,
            1,
            route=Route("k", "big", REPORT),
        ),
    ):
        assert read_event(event_json(event)) == event


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"id": "a/b", "model": "m", "body": {}}',
        b'{"id": "a", "model": "m", "body": []}',
        b'{"id": "a", "model": "m", "body": {}, "run": 1}',
        b'{"id": "a", "model": "m", "body": {}, "attempt": 0}',
        b'{"id": "a", "model": "m", "body": {}, "queue": "another"}',
        b'{"id": "a", "model": "m", "body": {}, "queue": "@"}',
        b'{"id": "a", "model": "m", "body": {}, "queue": "@a\\n"}',
        b'{"id": "a", "model": "m", "body": {}, "queue": "@a:b"}',
        b'{"id": "a", "model": "m", "body": {}, "queue": "@' + b"w" * 256 + b'"}',
        b'{"id": "a", "model": "m", "body": {}, "tokens": [[-1]]}',
        b'{"id": "a", "model": "m", "body": {}, "deadline": "2026-01-01T00:00:00"}',
        b'{"id": "a", "model": "m", "body": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
    ],
)
def test_what_is_no_request_is_refused(wire: bytes) -> None:
    with pytest.raises(ValidationError):
        read_request(wire)
