"""The bridge between the lane and the event loop: a failure of one request doesn't affect others."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pipeline.adapters.system_clock import SystemClock
from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.http.goodput import GoodputMetrics
from pipeline.gateway.http.metrics import HttpMetrics
from pipeline.gateway.inference.lane_bridge import LaneBridge
from pipeline.lane.client import CallSettings
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import AnswerCounts, LaneQueue
from schemas.jobs.job import Tier
from schemas.settings.lane import LaneSettings, LatencyPromise, SloOptions
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest, TokensEvent
from tests.waiting import HANG_SECONDS


def test_an_event_that_cant_be_handled_ends_only_its_own_request() -> None:
    clock = SystemClock()
    lane, stop = MemoryLane(clock), threading.Event()
    bridge = LaneBridge(
        lane,
        clock,
        CallSettings(poll_interval_seconds=0.01),
        HttpMetrics(clock, GoodputMetrics(SloOptions().promises, 100)),
    )
    events: dict[str, list[LaneEvent]] = {"bad": [], "good": []}

    async def calls() -> None:
        both = asyncio.Event()

        def handle_event(event: LaneEvent) -> None:
            if event.request == "bad" and isinstance(event, EndEvent):
                raise KeyError("choices")
            events[event.request].append(event)
            if all(events.values()):
                both.set()

        for name in events:
            await bridge.start(LaneRequest(name, "m", {}), handle_event)
        worker = lane.worker("w")
        assert len(worker.take([LaneQueue("m")], 2, 2.0)) == 2
        worker.emit([EndEvent(name, 1, 0, {}) for name in events])
        running = threading.Thread(target=bridge.run, args=(stop,))
        running.start()
        try:
            await asyncio.wait_for(both.wait(), HANG_SECONDS)
        finally:
            stop.set()
            await asyncio.to_thread(running.join, 10)

    asyncio.run(calls())
    (bad,), (good,) = events["bad"], events["good"]
    assert isinstance(good, EndEvent)
    assert isinstance(bad, ErrorEvent)
    assert (bad.code, bad.status) == ("internal_error", 500)


def test_latencies_of_answers_are_reported_on_the_lane() -> None:
    """Those that a lane refuses included; the rest when the bridge stops."""
    clock = SystemClock()
    lane, stop = MemoryLane(clock, LaneSettings(max_waiting=1)), threading.Event()
    goodput = GoodputMetrics({Tier.INTERACTIVE: LatencyPromise(ttft_seconds=HANG_SECONDS, itl_seconds=1.0)}, 100)
    bridge = LaneBridge(lane, clock, CallSettings(poll_interval_seconds=0.01), HttpMetrics(clock, goodput))

    async def calls() -> None:
        ended = asyncio.Event()
        await bridge.start(LaneRequest("one", "m", {}), lambda event: ended.set() if event.kind == "end" else None)
        with pytest.raises(ApiError, match="wait for model m"):
            await bridge.start(LaneRequest("two", "m", {}), lambda _: None)
        worker = lane.worker("w")
        worker.take([LaneQueue("m")], 1, 2.0)
        worker.emit([TokensEvent("one", 1, 0, tokens=(5,)), EndEvent("one", 1, 1, {})])
        running = threading.Thread(target=bridge.run, args=(stop,))
        running.start()
        try:
            await asyncio.wait_for(ended.wait(), HANG_SECONDS)
        finally:
            stop.set()
            await asyncio.to_thread(running.join, 10)

    asyncio.run(calls())
    assert lane.answers(["m"]) == {"m": AnswerCounts(in_time=1, late_first_tokens=1)}


def test_a_gateway_refuses_requests_beyond_its_limit() -> None:
    clock = SystemClock()
    goodput = GoodputMetrics(SloOptions().promises, 100)
    bridge = LaneBridge(MemoryLane(clock), clock, CallSettings(), HttpMetrics(clock, goodput), max_calls=1)

    async def calls() -> None:
        await bridge.start(LaneRequest("one", "m", {}), lambda _: None)
        with pytest.raises(ApiError, match="1 requests wait here already"):
            await bridge.start(LaneRequest("two", "m", {}), lambda _: None)
        bridge.forget("one")
        await bridge.start(LaneRequest("three", "m", {}), lambda _: None)

    asyncio.run(calls())
    assert goodput.counts()["interactive", "default", "refused"] == 1
