"""The bridge between the lane client, which one thread polls, and the event loop, where requests wait for events.

Each poll's events are passed to the event loop as one batch, and the next poll starts after the batch is handled. So at
most one batch is queued between them, however fast the workers are.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

import structlog

from pipeline.gateway.http.errors import ApiError, bad_request, internal_error, unavailable
from pipeline.gateway.http.metrics import HttpMetrics
from pipeline.lane.client import CallSettings, Fallback, LaneCalls
from pipeline.lane.ports import Lane, LaneFull
from pipeline.lane.prefix_router import PrefixRouter
from pipeline.overload.controller import OverloadController, Overloaded
from pipeline.ports import Clock, PipelineError
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.tracing import NO_TRACES, Traces
from schemas.requests.tokenizing import TOKENIZER_URLS
from schemas.workers.lane import ErrorEvent, LaneEvent, LaneRequest

_IDLE_SECONDS: Final = 0.2
_DELIVERY_SECONDS: Final = 30.0
_REPORT_SECONDS: Final = 3.0
"""Between two reports of answers' latencies to the autoscaler."""

Sink = Callable[[LaneEvent], None]
"""Handles an event of a request, on the event loop."""

logger = structlog.get_logger(__name__)


class LaneBridge:
    """Sends requests over the lane and delivers their events, for one event loop.

    Args:
        metrics: count requests and responses.
        max_calls: concurrent requests; further ones are refused.
        router: chooses the workers of requests; None: any worker takes them.
        overload: refuses requests that would be late; None: none is refused.

    Attributes:
        on_cancel: called with the id of each request that is cancelled.
    """

    def __init__(
        self,
        lane: Lane,
        clock: Clock,
        settings: CallSettings,
        metrics: HttpMetrics,
        max_calls: int = 10_000,
        traces: Traces = NO_TRACES,
        router: PrefixRouter | None = None,
        overload: OverloadController | None = None,
    ) -> None:
        self.metrics = metrics
        self._lane = lane
        self._clock = clock
        self._next_report = clock.monotonic() + _REPORT_SECONDS
        self._overload = overload
        self._calls = LaneCalls(lane, clock, settings, traces, router)
        self._max_calls = max_calls
        self._sinks: dict[str, Sink] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_cancel: Callable[[str], None] = _ignore

    def __len__(self) -> int:
        return len(self._sinks)

    @property
    def is_nearly_full(self) -> bool:
        """Whether only a tenth of the concurrent requests is left."""
        return len(self._sinks) >= 0.9 * self._max_calls

    @property
    def lost_at(self) -> float:
        """When workers lost a request last, but for those on trial; monotonic seconds."""
        return self._calls.lost_at

    async def start(
        self, request: LaneRequest, sink: Sink, fallback: Fallback | None = None, *, is_counted: bool = True
    ) -> None:
        """Send the request; its events are passed to `sink` until the last one or `cancel`. Raises `ApiError`.

        Args:
            fallback: where the request's model is on trial.
            is_counted: in the metrics of callers' requests, and in the forecast of their load. A copy isn't.
        """
        if is_counted:
            self._admit(request)
        self._loop = asyncio.get_running_loop()
        self._sinks[request.id] = sink
        if is_counted and request.url not in TOKENIZER_URLS:  # which would distort the times of answers
            self.metrics.inference_started(request)
        sending = asyncio.ensure_future(asyncio.to_thread(self._calls.start, request, fallback))
        try:
            await asyncio.shield(sending)
        except LaneFull as error:
            if is_counted:
                self.metrics.goodput.refused(request)
            self.forget(request.id)
            raise _full(str(error)) from None
        except PipelineError as error:
            self.forget(request.id)
            raise bad_request(str(error)) from None
        except asyncio.CancelledError:  # the caller disconnected during the send: cancel after the send
            sending.add_done_callback(lambda sent: self._cancel_sent(request.id, sent))
            raise

    def _admit(self, request: LaneRequest) -> None:
        """Raise `ApiError` for a request that is refused."""
        if len(self._sinks) >= self._max_calls:
            self.metrics.goodput.refused(request)
            raise _full(f"{self._max_calls} requests wait here already")
        if self._overload is not None:
            try:
                self._overload.admit(request)
            except Overloaded as error:
                self.metrics.goodput.refused(request)
                raise _overloaded(error) from None

    def _cancel_sent(self, request_id: str, sent: asyncio.Future[bool]) -> None:
        """Cancel a request whose caller disconnected while it was being sent."""
        self.cancel(request_id)
        if sent.cancelled() or sent.exception() is not None:
            return  # the send failed
        asyncio.get_running_loop().run_in_executor(None, self._calls.cancel, request_id)

    def cancel(self, request_id: str) -> None:
        """Cancel the request: its response isn't needed any more."""
        self.metrics.inference_finished(request_id, "cancelled")
        self._end_load(request_id)
        self.on_cancel(request_id)
        if self._sinks.pop(request_id, None) is not None:
            asyncio.get_running_loop().run_in_executor(None, self._calls.cancel, request_id)

    def forget(self, request_id: str) -> None:
        """Remove a request that has ended."""
        self.metrics.inference_finished(request_id, "failed")  # unless its result is counted already
        self._end_load(request_id)
        self._sinks.pop(request_id, None)

    def _end_load(self, request_id: str) -> None:
        if self._overload is not None:
            self._overload.forget(request_id)

    def run(self, stop: threading.Event) -> None:
        """Poll the lane and deliver events until `stop` is set."""
        while not stop.is_set():
            self._calls.wait(_IDLE_SECONDS)
            events = list(self._calls.poll())
            if self._clock.monotonic() >= self._next_report:
                self._report_answers()
            loop = self._loop
            if not events or loop is None:
                continue
            delivered: Future[None] = Future()
            try:
                loop.call_soon_threadsafe(self._deliver, events, delivered)
                delivered.result(_DELIVERY_SECONDS)
            except RuntimeError:  # the event loop is closed, and no request waits
                break
            except TimeoutError:
                logger.error("event_loop_blocked", seconds=_DELIVERY_SECONDS)
        self._calls.leave()
        self._report_answers()

    def _report_answers(self) -> None:
        self._next_report = self._clock.monotonic() + _REPORT_SECONDS
        reports = self.metrics.goodput.take_reports()
        try:
            if reports:
                self._lane.add_answers(reports)
        except ServiceUnavailable as error:  # a sample is lost, and more follow
            logger.warning("latencies not reported", reason=str(error))

    def _deliver(self, events: list[LaneEvent], delivered: Future[None]) -> None:
        try:
            for event in events:
                self.metrics.record_event(event)
                if self._overload is not None:
                    self._overload.record(event)
                sink = self._sinks.get(event.request)
                if sink is not None:
                    self._pass_to_sink(event, sink)
        finally:
            delivered.set_result(None)

    def _pass_to_sink(self, event: LaneEvent, sink: Sink) -> None:
        """Pass an event to its sink. When the sink fails, only its own request ends; others get their events."""
        try:
            sink(event)
        except Exception as error:  # noqa: BLE001 - of this request alone
            logger.error("event_not_handled", request=event.request, error=type(error).__name__)
            self.cancel(event.request)
            broken = internal_error()
            with suppress(Exception):  # then the request ends with its connection
                sink(ErrorEvent(event.request, event.attempt, event.sequence, broken.code, broken.message, 500))


def _ignore(_: str) -> None:
    """The default of `LaneBridge.on_cancel`."""


def draining() -> ApiError:
    """The gateway is shutting down (503)."""
    return unavailable("this gateway is being stopped; ask again", "draining", seconds=1)


def _full(why: str) -> ApiError:
    return ApiError(429, "lane_full", f"{why}; ask again later", headers={"Retry-After": "5"})


def _overloaded(error: Overloaded) -> ApiError:
    """Whole seconds are all that Retry-After can say; OpenAI's clients wait for `retry-after-ms`."""
    seconds = error.retry_seconds
    headers = {"Retry-After": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, round(seconds * 1_000)))}
    return ApiError(429, "overloaded", str(error), headers=headers)
