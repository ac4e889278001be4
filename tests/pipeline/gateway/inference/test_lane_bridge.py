"""The bridge between the lane and the event loop: a failure of one request doesn't affect others."""

from __future__ import annotations

import asyncio
import threading

from pipeline.adapters.system_clock import SystemClock
from pipeline.gateway.http.metrics import HttpMetrics
from pipeline.gateway.inference.lane_bridge import LaneBridge
from pipeline.lane.client import CallSettings
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import LaneQueue
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest
from tests.waiting import HANG_SECONDS


def test_an_event_that_cant_be_handled_ends_only_its_own_request() -> None:
    clock = SystemClock()
    lane, stop = MemoryLane(clock), threading.Event()
    bridge = LaneBridge(lane, clock, CallSettings(poll_interval_seconds=0.01), HttpMetrics(clock))
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
