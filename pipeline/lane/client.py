"""The caller's client of the lane: sends requests and receives their events until the end, through failures of workers
and servers.

`LaneCalls` serves any number of calls with one thread; `answer` is one call, as an iterator.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import structlog

from pipeline.lane.ports import START, Lane, LaneFull, LaneStream
from pipeline.lane.prefix_router import PrefixRouter
from pipeline.ports import Clock, PipelineError
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.tracing import NO_SPAN, NO_TRACES, Span, Traces
from schemas.workers.lane import ErrorEvent, HandBackEvent, KVSource, LaneEvent, LaneRequest, Route

LANE_UNAVAILABLE: Final = "lane_unavailable"
LANE_FULL: Final = "lane_full"
WORKER_LOST: Final = "worker_lost"
REQUEST_TIMEOUT: Final = "request_timeout"
HANDED_BACK: Final = "handed_back"
NO_ANSWER: Final = "no_answer"
FAILED: Final = "failed"
ROUTED: Final = "routed"
ROUTE_LOOP: Final = "route_loop"
MAX_ROUTES: Final = 3
"""How often content policies may send a request to another model."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CallSettings:
    """Limits and time-outs of a call; seconds.

    Attributes:
        attempts: maximum number of attempts; one that a worker handed back doesn't count.
        silence_timeout_seconds: after this long without an event the client checks whether the request was lost.
        unavailable_timeout_seconds: after this long without a reachable lane the call fails.
        poll_interval_seconds: how long one read waits.
        pause_per_call_seconds: pause between two reads, for each open call: events that arrive meanwhile come with the
            next read, and reading takes time from passing events on.
    """

    attempts: int = 3
    silence_timeout_seconds: float = 3.0
    unavailable_timeout_seconds: float = 30.0
    poll_interval_seconds: float = 0.5
    pause_per_call_seconds: float = 5e-5


Received = Literal["restart", "continue", "fail"]


@dataclass(frozen=True, slots=True)
class Fallback:
    """What becomes of a request whose model's workers lose it, hand it back, fail (5xx) or don't begin to answer it. It
    is for versions of a model that are on trial, and applies once.

    Attributes:
        model: `ModelPin.key` of the model whose workers answer then; None: the request fails.
        after_seconds: how long the first event may take.
        received: with tokens that were received before: the answer begins anew ("restart"), goes on after them
            ("continue"), or fails ("fail").
        report: is called with `WORKER_LOST`, `HANDED_BACK`, `FAILED`, `NO_ANSWER`, `LANE_FULL`, or `ROUTED` (the model
            that content policies chose answers), on the thread that polls or starts the call.
    """

    model: str | None
    after_seconds: float
    received: Received
    report: Callable[[str], None]

    def applies(self, has_tokens: bool) -> bool:
        """Whether another model answers a request of which tokens were received, or none."""
        return self.model is not None and not (has_tokens and self.received == "fail")


@dataclass(slots=True)
class _Call:
    """An open call. `checked_at`: time of its last event, or of the last check whether it was lost. `span`: from its
    start until its end. `fallback`: is due at `fallback_at` unless an event has arrived."""

    stream: LaneStream
    checked_at: float
    span: Span = NO_SPAN
    fallback: Fallback | None = None
    fallback_at: float = 0.0
    sent: bool = False
    losses: int = 0


class LaneCalls:
    """Calls over one lane. One thread calls `poll`; any may start and cancel calls.

    Each call ends with an `EndEvent` or an `ErrorEvent`, always, unless it is cancelled. A `HandBackEvent` names the
    other model to which a content policy sent the request. If a worker or the lane lost
    the request it is sent again with the received tokens; the events continue without a gap.

    Args:
        router: chooses the workers of first attempts; None: any worker takes them.

    Attributes:
        lost_at: when workers lost a request without a fallback last, by the monotonic clock.
    """

    def __init__(
        self,
        lane: Lane,
        clock: Clock,
        settings: CallSettings | None = None,
        traces: Traces = NO_TRACES,
        router: PrefixRouter | None = None,
    ) -> None:
        self._lane = lane
        self._router = router
        self._traces = traces
        self._clock = clock
        self._settings = settings or CallSettings()
        self._changed = threading.Condition()
        self._calls: dict[str, _Call] = {}
        self._answered_at = clock.monotonic()  # of the lane's last answer
        self._next_read = self._answered_at
        self.lost_at = -math.inf

    def __len__(self) -> int:
        return len(self._calls)

    def start(self, request: LaneRequest, fallback: Fallback | None = None) -> bool:
        """Send the request, now or when the lane can be reached; False: its call is open already.

        Raises `LaneFull`, and `PipelineError` for a request that the lane refuses.
        """
        with self._changed:
            if request.id in self._calls:
                return False
        if self._router is not None:
            request = self._router.route(request)
        call = self._open_call(request, fallback)
        request = call.stream.request
        try:
            self._lane.send(request)
            call.sent = True
        except LaneFull:
            if fallback is None or fallback.model is None:
                self._release_worker(request)
                call.span.end(LaneFull.__name__)
                raise
            call.fallback = None
            fallback.report(LANE_FULL)
            return self.start(replace(request, model=fallback.model, queue=""))
        except ServiceUnavailable as error:
            logger.warning("request not sent yet", request=request.id, reason=str(error))
        except PipelineError as error:
            self._release_worker(request)
            call.span.end(type(error).__name__)
            raise
        with self._changed:
            if not self._calls:
                self._answered_at = self._clock.monotonic()
            self._calls[request.id] = call
            self._changed.notify_all()
        return True

    def _open_call(self, request: LaneRequest, fallback: Fallback | None) -> _Call:
        """A call with a span of its own, if tracing is on; the worker's spans are its children."""
        span = NO_SPAN
        if self._traces.is_enabled:
            attributes = {"tokenmill.request.id": request.id, "tokenmill.tier": request.tier.value}
            span = self._traces.begin("lane", attributes, kind="client", parent=request.traceparent)
            request = replace(request, traceparent=span.traceparent)
        now = self._clock.monotonic()
        return _Call(LaneStream(request), now, span, fallback, now + (fallback.after_seconds if fallback else 0.0))

    def wait(self, seconds: float) -> None:
        """Wait until a call is open, for so many seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls, seconds)

    def cancel(self, request_id: str) -> None:
        """End the call, and cancel its request."""
        with self._changed:
            call = self._calls.pop(request_id, None)
        if call is not None:
            self._release_worker(call.stream.request)
            call.span.end("cancelled")
            self._cancel(call)

    def leave(self) -> None:
        """Drop all calls without cancelling their requests, which other processes may continue."""
        with self._changed:
            self._calls.clear()

    def poll(self) -> Iterator[LaneEvent]:
        """Poll all calls once, waiting a while for the first event; yields their events."""
        with self._changed:
            calls = dict(self._calls)
        try:
            yield from self._step(calls)
            self._answered_at = self._clock.monotonic()
        except ServiceUnavailable as error:
            if self._clock.monotonic() - self._answered_at > self._settings.unavailable_timeout_seconds:
                yield from [self._fail(call, LANE_UNAVAILABLE, str(error), 503) for call in self._open(calls)]
                return
            self._clock.sleep(self._settings.poll_interval_seconds)
        now = self._clock.now()
        for call in self._open(calls):
            deadline = call.stream.request.deadline
            if deadline is not None and now >= deadline:
                yield self._fail(call, REQUEST_TIMEOUT, "the deadline passed before the answer was whole", 408)
                self._cancel(call)

    def _step(self, calls: dict[str, _Call]) -> Iterator[LaneEvent]:
        """Send unsent requests, pass on events, and check silent calls."""
        for call in self._open(calls):
            if not call.sent:
                yield from self._send(call)
        early = self._next_read - self._clock.monotonic()
        if early > 0:
            self._clock.sleep(early)
        yield from self._read(self._open(calls), self._settings.poll_interval_seconds)
        now = self._clock.monotonic()
        self._next_read = now + len(calls) * self._settings.pause_per_call_seconds
        for call in self._open(calls):
            if call.fallback is not None and call.stream.position == START and now >= call.fallback_at:
                yield from self._fall_back(call, call.fallback, NO_ANSWER)
        silent = [
            call
            for call in self._open(calls)
            if call.sent and now - call.checked_at >= self._settings.silence_timeout_seconds
        ]
        for call in silent:
            call.checked_at = now
        lost = self._lane.lost([call.stream.request for call in silent]) if silent else ()
        for call in silent:
            if call.stream.request.id not in lost:
                continue
            last = list(self._read([call], 0))
            yield from last
            if not last:
                yield from self._lost(call)

    def _open(self, calls: dict[str, _Call]) -> list[_Call]:
        """The calls without an end that are not cancelled."""
        return [call for name, call in calls.items() if not call.stream.ended and self._calls.get(name) is call]

    def _send(self, call: _Call) -> Iterator[LaneEvent]:
        try:
            self._lane.send(call.stream.request)
        except LaneFull as error:
            yield self._fail(call, LANE_FULL, str(error), 429)
        except ServiceUnavailable:
            raise
        except PipelineError as error:  # with its tokens the request is too large
            yield self._fail(call, WORKER_LOST, str(error), 503)
        else:
            call.sent, call.checked_at = True, self._clock.monotonic()

    def _read(self, calls: Sequence[_Call], timeout: float) -> Iterator[LaneEvent]:
        """Read the valid events. A call that its worker handed back is sent again."""
        found = {call.stream.request.id: call for call in calls if call.sent}
        if not found:
            return
        for event in self._lane.read({name: call.stream.position for name, call in found.items()}, timeout):
            call = found[event.request]
            counted = call.stream.accept(event)
            if counted is None:
                continue
            call.checked_at = self._clock.monotonic()
            if isinstance(counted, HandBackEvent):
                yield from self._go_on(call, counted)
                continue
            if _is_failure(counted) and call.fallback is not None and call.fallback.applies(call.stream.has_tokens):
                yield from self._fall_back(call, call.fallback, FAILED)
                continue
            if call.stream.ended:
                self._forget(call)
                call.span.end(counted.code if isinstance(counted, ErrorEvent) else None)
            yield counted

    def _go_on(self, call: _Call, event: HandBackEvent) -> Iterator[LaneEvent]:
        """Send a request again that its worker handed back."""
        if call.fallback is not None and event.route is not None:
            call.fallback.report(ROUTED)
            is_copy, call.fallback = call.fallback.model is None, None
            if is_copy:
                yield self._fail(call, ROUTED, "content policies sent the copy to another model", 503)
                self._cancel(call)
                return
        if call.fallback is not None and event.kv_source is None:
            yield from self._fall_back(call, call.fallback, HANDED_BACK)
        elif event.route is None:
            self._resend(call, "handed back by its worker", event.kv_source)
        elif call.stream.routes >= MAX_ROUTES:
            message = (
                f"content policies sent the request to another model {MAX_ROUTES} times; give all workers the same"
            )
            yield self._fail(call, ROUTE_LOOP, message, 500)
        else:
            self._resend(call, "routed to another model", route=event.route)
            yield event

    def _lost(self, call: _Call) -> Iterator[LaneEvent]:
        if call.fallback is not None:
            yield from self._fall_back(call, call.fallback, WORKER_LOST)
            return
        self.lost_at = self._clock.monotonic()
        call.losses += 1
        if call.losses >= self._settings.attempts:
            yield self._fail(call, WORKER_LOST, f"lost with its worker {call.losses} times", 503)
            return
        self._resend(call, "lost")

    def _resend(self, call: _Call, why: str, kv_source: KVSource | None = None, route: Route | None = None) -> None:
        request = call.stream.again(kv_source, route)
        self._release_worker(request)
        call.span.event("sent again", {"tokenmill.attempt": request.attempt, "tokenmill.reason": why})
        if route is not None:
            logger.info("request routed", request=request.id, model=route.name)
        elif kv_source is None:
            logger.warning("request sent again", request=request.id, attempt=request.attempt, why=why)
        call.sent = False

    def _fall_back(self, call: _Call, fallback: Fallback, code: str) -> Iterator[LaneEvent]:
        """Send the request to the workers of its other model, or end it."""
        call.fallback = None
        fallback.report(code)
        self._cancel(call)
        if not fallback.applies(call.stream.has_tokens):
            seen = code if fallback.model is None else WORKER_LOST
            yield self._fail(call, seen, "the new version of the model doesn't answer it any more; ask again", 503)
            return
        self._release_worker(call.stream.request)
        request = call.stream.again(model=fallback.model, anew=fallback.received == "restart")
        call.span.event("sent to another version", {"tokenmill.attempt": request.attempt, "tokenmill.reason": code})
        logger.warning("request sent to another version", request=request.id, attempt=request.attempt, why=code)
        call.sent = False

    def _fail(self, call: _Call, code: str, message: str, status: int) -> LaneEvent:
        self._forget(call)
        call.span.end(code)
        return call.stream.fail(code, message, status)

    def _forget(self, call: _Call) -> None:
        self._release_worker(call.stream.request)
        with self._changed:
            if self._calls.get(call.stream.request.id) is call:
                del self._calls[call.stream.request.id]

    def _release_worker(self, request: LaneRequest) -> None:
        if self._router is not None:
            self._router.release(request.id)

    def _cancel(self, call: _Call) -> None:
        try:
            self._lane.cancel(call.stream.request)
        except ServiceUnavailable as error:  # then it ends at its deadline
            logger.warning("request not cancelled", request=call.stream.request.id, reason=str(error))


def _is_failure(event: LaneEvent) -> bool:
    return isinstance(event, ErrorEvent) and event.status >= 500


def answer(lane: Lane, request: LaneRequest, clock: Clock, settings: CallSettings | None = None) -> Iterator[LaneEvent]:
    """The events of the answer; the last is an `EndEvent` or an `ErrorEvent`, always.

    Closing the iterator before that cancels the request.
    """
    calls = LaneCalls(lane, clock, settings)
    try:
        calls.start(request)
    except LaneFull as error:
        yield LaneStream(request).fail(LANE_FULL, str(error), 429)
        return
    try:
        while len(calls):
            yield from calls.poll()
    finally:
        calls.cancel(request.id)
