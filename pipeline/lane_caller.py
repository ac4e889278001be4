"""Calling over the lane: one request, its events until the end, whatever happens to workers and servers on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import structlog

from pipeline.availability import ServiceUnavailable
from pipeline.lane import Lane, LaneFull, LaneStream
from pipeline.ports import Clock
from schemas.lane import LaneEvent, LaneRequest

LANE_UNAVAILABLE: Final = "lane_unavailable"
LANE_FULL: Final = "lane_full"
WORKER_LOST: Final = "worker_lost"
REQUEST_TIMEOUT: Final = "request_timeout"

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CallSettings:
    """How a call is looked after; seconds.

    Attributes:
        attempts: how often a request is sent, at most.
        patience: after this long without an event it is asked whether the request was lost.
        give_up: after this long without a lane to reach the call fails.
        look: how long one read waits.
    """

    attempts: int = 3
    patience: float = 3.0
    give_up: float = 30.0
    look: float = 0.5


def answer(lane: Lane, request: LaneRequest, clock: Clock, settings: CallSettings | None = None) -> Iterator[LaneEvent]:
    """The events of the answer; the last is an `EndEvent` or an `ErrorEvent`, always.

    Closing the iterator before that cancels the request. When a worker or the lane lost the request it is sent again
    with the tokens that came; the events go on as if nothing had been.
    """
    call = _Call(lane, request, clock, settings or CallSettings())
    try:
        yield from call.events()
    finally:
        call.close()


class _Call:
    def __init__(self, lane: Lane, request: LaneRequest, clock: Clock, settings: CallSettings) -> None:
        self._lane = lane
        self._clock = clock
        self._settings = settings
        self._stream = LaneStream(request)
        self._sent = False
        self._reached = self._heard = clock.monotonic()  # the lane answered; an event came

    def events(self) -> Iterator[LaneEvent]:
        while not self._stream.ended:
            try:
                yield from self._step()
                self._reached = self._clock.monotonic()
            except ServiceUnavailable as error:
                if self._clock.monotonic() - self._reached > self._settings.give_up:
                    yield self._stream.fail(LANE_UNAVAILABLE, str(error), 503)
                    return
                self._clock.sleep(self._settings.look)
            if not self._stream.ended and self._is_late():
                yield self._stream.fail(REQUEST_TIMEOUT, "the deadline passed before the answer was whole", 408)
                self._cancel()

    def close(self) -> None:
        if not self._stream.ended:
            self._stream.ended = True
            self._cancel()

    def _step(self) -> Iterator[LaneEvent]:
        """Send what isn't sent, pass on what came, and look after a request that is silent."""
        if not self._sent:
            try:
                self._lane.send(self._stream.request)
            except LaneFull as error:
                yield self._stream.fail(LANE_FULL, str(error), 429)
                return
            self._sent, self._heard = True, self._clock.monotonic()
        came = list(self._read(self._settings.look))
        yield from came
        if came or self._clock.monotonic() - self._heard < self._settings.patience or self._stream.ended:
            return
        self._heard = self._clock.monotonic()
        if not self._lane.lost([self._stream.request]):
            return
        last = list(self._read(0))
        yield from last
        if not last:
            yield from self._send_again()

    def _read(self, timeout: float) -> Iterator[LaneEvent]:
        request = self._stream.request
        for event in self._lane.read({request.id: self._stream.position}, timeout):
            if (counted := self._stream.accept(event)) is not None:
                self._heard = self._clock.monotonic()
                yield counted

    def _send_again(self) -> Iterator[LaneEvent]:
        request = self._stream.request
        if request.attempt >= self._settings.attempts:
            yield self._stream.fail(WORKER_LOST, f"lost with its worker {request.attempt} times", 503)
            return
        logger.warning("request lost, sent again", request=request.id, attempt=request.attempt + 1)
        self._stream.again()
        self._sent = False

    def _is_late(self) -> bool:
        deadline = self._stream.request.deadline
        return deadline is not None and self._clock.now() >= deadline

    def _cancel(self) -> None:
        try:
            self._lane.cancel(self._stream.request)
        except ServiceUnavailable as error:  # it ends with its deadline then
            logger.warning("request not cancelled", request=self._stream.request.id, reason=str(error))
