"""Between the lane's calls, which one thread looks after, and an event loop, where requests wait.

What a turn of the thread brings goes over in one piece, and the next turn waits until it has been taken in: so however
fast workers are, what lies between is no more than a turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

import structlog

from pipeline.gateway.http.errors import ApiError, bad_request, internal_error, unavailable
from pipeline.gateway.http.metrics import HttpMetrics
from pipeline.lane.client import CallSettings, LaneCalls
from pipeline.lane.protocol import Lane, LaneFull
from pipeline.ports import Clock, PipelineError
from pipeline.tracing import NO_TRACES, Traces
from schemas.workers.lane import ErrorEvent, LaneEvent, LaneRequest

_IDLE_SECONDS: Final = 0.2
_TAKING_SECONDS: Final = 30.0

Sink = Callable[[LaneEvent], None]
"""Takes an event of a request, on the event loop."""

logger = structlog.get_logger(__name__)


class LaneBridge:
    """Calls over the lane, for one event loop.

    Args:
        figures: count how answers fare.
        most_calls: that wait at once; further ones are refused.
    """

    def __init__(
        self,
        lane: Lane,
        clock: Clock,
        settings: CallSettings,
        figures: HttpMetrics,
        most_calls: int = 10_000,
        traces: Traces = NO_TRACES,
    ) -> None:
        self.figures = figures
        self._calls = LaneCalls(lane, clock, settings, traces)
        self._most_calls = most_calls
        self._sinks: dict[str, Sink] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._sinks)

    async def start(self, request: LaneRequest, sink: Sink) -> None:
        """Send the request; its events go to `sink`, until the end or `cancel`. Raises `ApiError`."""
        if len(self._sinks) >= self._most_calls:
            raise _full(f"{self._most_calls} requests wait here already")
        self._loop = asyncio.get_running_loop()
        self._sinks[request.id] = sink
        self.figures.sent(request)
        sending = asyncio.ensure_future(asyncio.to_thread(self._calls.start, request))
        try:
            await asyncio.shield(sending)
        except LaneFull as error:
            self.forget(request.id)
            raise _full(str(error)) from None
        except PipelineError as error:
            self.forget(request.id)
            raise bad_request(str(error)) from None
        except asyncio.CancelledError:  # the caller went away while it is sent: it can be cancelled when it is
            sending.add_done_callback(lambda sent: self._cancel_sent(request.id, sent))
            raise

    def _cancel_sent(self, request_id: str, sent: asyncio.Future[bool]) -> None:
        """Nobody wants what was sent just now, whether or not it was known here then that nobody does."""
        self.cancel(request_id)
        if sent.cancelled() or sent.exception() is not None:
            return  # it was never sent
        asyncio.get_running_loop().run_in_executor(None, self._calls.cancel, request_id)

    def cancel(self, request_id: str) -> None:
        """Nobody wants the answer any more."""
        self.figures.ended(request_id, "cancelled")
        if self._sinks.pop(request_id, None) is not None:
            asyncio.get_running_loop().run_in_executor(None, self._calls.cancel, request_id)

    def forget(self, request_id: str) -> None:
        """The end has come."""
        self.figures.ended(request_id, "failed")  # unless an answer has come
        self._sinks.pop(request_id, None)

    def run(self, stop: threading.Event) -> None:
        """Look after the calls, until `stop`."""
        while not stop.is_set():
            self._calls.wait(_IDLE_SECONDS)
            events = list(self._calls.turn())
            loop = self._loop
            if not events or loop is None:
                continue
            taken: Future[None] = Future()
            try:
                loop.call_soon_threadsafe(self._deliver, events, taken)
                taken.result(_TAKING_SECONDS)
            except RuntimeError:  # the loop has ended, and nobody waits any more
                break
            except TimeoutError:
                logger.error("the event loop doesn't turn", seconds=_TAKING_SECONDS)
        self._calls.leave()

    def _deliver(self, events: list[LaneEvent], taken: Future[None]) -> None:
        try:
            for event in events:
                self.figures.heard(event)
                sink = self._sinks.get(event.request)
                if sink is not None:
                    self._hand_over(event, sink)
        finally:
            taken.set_result(None)

    def _hand_over(self, event: LaneEvent, sink: Sink) -> None:
        """An event that can't be taken in ends its own request, and keeps nothing from others."""
        try:
            sink(event)
        except Exception as error:  # noqa: BLE001 - its own, and nobody else's
            logger.error("an event can't be taken in", request=event.request, error=type(error).__name__)
            self.cancel(event.request)
            broken = internal_error()
            with suppress(Exception):  # it has no end then but its connection's
                sink(ErrorEvent(event.request, event.attempt, event.sequence, broken.code, broken.message, 500))


def draining() -> ApiError:
    """This gateway is being stopped."""
    return unavailable("this gateway is being stopped; ask again", "draining", seconds=1)


def _full(why: str) -> ApiError:
    return ApiError(429, "lane_full", f"{why}; ask again later", headers={"Retry-After": "5"})
