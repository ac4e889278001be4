"""Requests that a content policy sends to another model: the call goes on there, with the verdicts in its response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipeline.lane.client import MAX_ROUTES, ROUTE_LOOP, CallSettings, LaneCalls
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import LaneQueue
from schemas.requests.policy_report import ContentVerdict, PolicyReport, add_report, may_be_repeated
from schemas.workers.lane import EndEvent, ErrorEvent, HandBackEvent, LaneEvent, LaneRequest, Route
from tests.pipeline.simulation import SimulatedClock

REQUEST = LaneRequest("r1", "small-key", {"model": "small", "messages": []})
TO_BIG = ContentVerdict("rules", "medical", "route", "prompt", "big")
FLAG = ContentVerdict("guard", "odd", "flag", "prompt")


def route(verdicts: Sequence[ContentVerdict] = (TO_BIG,), model: str = "big-key", tokens: int = 5) -> Route:
    return Route(model, "big", PolicyReport(tuple(verdicts), tokens, 1))


@pytest.fixture
def lane() -> MemoryLane:
    return MemoryLane(SimulatedClock())


@pytest.fixture
def calls(lane: MemoryLane) -> LaneCalls:
    return LaneCalls(lane, SimulatedClock(), CallSettings(poll_interval_seconds=0.0, pause_per_call_seconds=0.0))


def turns(calls: LaneCalls) -> list[LaneEvent]:
    return [event for _ in range(3) for event in calls.poll()]


def test_given_a_routed_request_then_the_other_models_worker_gets_it_and_the_response_has_the_verdicts(
    lane: MemoryLane, calls: LaneCalls
) -> None:
    calls.start(REQUEST)
    small, big = lane.worker("a"), lane.worker("b")
    assert small.take([LaneQueue("small-key")], 1, 0) == [REQUEST]
    handed_back = HandBackEvent("r1", 1, 0, route=route([FLAG, TO_BIG]))
    small.emit([handed_back])
    assert turns(calls) == [handed_back], "the caller learns who answers"
    assert small.take([LaneQueue("small-key")], 1, 0) == []
    assert lane.waiting(["small-key", "big-key"]) == {"small-key": 0, "big-key": 1}
    (taken,) = big.take([LaneQueue("big-key")], 1, 0)
    assert taken == replace(REQUEST, model="big-key", body={"model": "big", "messages": []}, attempt=2)
    own = add_report({"id": "x"}, PolicyReport((TO_BIG,), 7, 2))  # its policies see the same prompt
    big.emit([EndEvent("r1", 2, 0, own)])
    (end,) = turns(calls)
    assert isinstance(end, EndEvent)
    report = end.response["tokenmill"]["content_policies"]
    assert [verdict["rule"] for verdict in report["verdicts"]] == ["odd", "medical"]
    assert report["usage"] == {"prompt_tokens": 12, "completion_tokens": 3}
    assert not may_be_repeated(end.response)
    assert len(calls) == 0


def test_given_workers_that_route_to_each_other_then_the_call_ends_with_an_error(
    lane: MemoryLane, calls: LaneCalls
) -> None:
    calls.start(REQUEST)
    worker = lane.worker("a")
    events: list[LaneEvent] = []
    queues = [LaneQueue("small-key"), LaneQueue("big-key")]
    for attempt in range(1, MAX_ROUTES + 2):
        (taken,) = worker.take(queues, 1, 0)
        to = "small-key" if taken.model == "big-key" else "big-key"
        worker.emit([HandBackEvent("r1", attempt, 0, route=route(model=to))])
        events += turns(calls)
    *handed_back, last = events
    assert {type(event) for event in handed_back} == {HandBackEvent}
    assert isinstance(last, ErrorEvent)
    assert (last.code, last.status) == (ROUTE_LOOP, 500)
    assert len(calls) == 0


def test_given_no_verdicts_then_a_response_stays_as_it_is() -> None:
    assert add_report({"id": "x"}, PolicyReport()) == {"id": "x"}
    assert may_be_repeated({"id": "x"})
    assert may_be_repeated(add_report({}, PolicyReport((FLAG,))))
