"""Copies a share of the requests to the other version of an open release, and compares both answers.

A copy is sent after the caller's own request, in a task of its own, and its answer goes nowhere. It counts against no
limit of the tenant, is cancelled with the caller's request, and isn't sent where the other version's lane is busy, too
many copies are open here, or the gateway is nearly full. So it delays no caller, however slow the other version is.

While the stable version answers callers the candidate gets copies. In the canary stage it is the other way round: what
the candidate answers is copied to the stable version. Both are compared alike, and events are timed at the same point.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Final

import structlog

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.inference.answer_comparison import AnswerTimer, agreement_of
from pipeline.gateway.inference.lane_bridge import LaneBridge, Sink
from pipeline.lane.client import (
    HANDED_BACK,
    LANE_FULL,
    LANE_UNAVAILABLE,
    NO_ANSWER,
    REQUEST_TIMEOUT,
    ROUTED,
    WORKER_LOST,
    Fallback,
    Received,
)
from pipeline.lane.ports import LANE_OVERRUN
from pipeline.models.open_releases import OpenRelease, OpenReleases
from pipeline.ports import World
from schemas.releases import AnswerSample, RequestSample
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest

MAX_OPEN_COPIES: Final = 64
"""Copies that one gateway may have sent at once."""

_LATE_FACTOR: Final = 3.0
_SAME_OUTAGE_SECONDS: Final = 10.0
_NOT_COMPARED: Final = frozenset(
    {LANE_FULL, LANE_UNAVAILABLE, LANE_OVERRUN, REQUEST_TIMEOUT, HANDED_BACK, ROUTED, "draining"}
)
"""Errors that say nothing about the version of the model."""

logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Pair:
    """A caller's request and its copy.

    Attributes:
        fell_back: why the stable version answers a canary request; None: the candidate does.
        is_lost: the candidate's worker ended, or did not begin to answer what the stable version's had begun.
        is_late: the copy was cancelled because it took too long.
        cancel_late: cancels the copy then.
    """

    found: OpenRelease
    request: LaneRequest
    copy: LaneRequest
    caller: AnswerTimer
    copied: AnswerTimer
    fell_back: str | None = None
    is_lost: bool = False
    is_late: bool = False
    cancel_late: asyncio.TimerHandle | None = None


class Mirror:
    """The copies of one gateway's requests. For one event loop.

    Args:
        bridge: sends the copies.
    """

    def __init__(self, releases: OpenReleases, bridge: LaneBridge, world: World) -> None:
        self._releases = releases
        self._bridge = bridge
        bridge.on_cancel = self.cancel
        self._now = world.clock.monotonic
        self._random = world.random
        self._pairs: dict[str, _Pair] = {}  # by the caller's request
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, request: LaneRequest, sink: Sink, canary: OpenRelease | None, *, is_stream: bool) -> None:
        """Send a caller's request, and then perhaps a copy. `canary`: the release whose candidate is to answer it.
        Raises `ApiError`."""
        pair = self._pair(request, canary)
        fallback = None if canary is None else self._fallback(canary, request, is_stream)
        if pair is None:
            await self._bridge.start(request, sink, fallback)
            return
        self._pairs[request.id] = pair
        pair.caller.began = self._now()
        try:
            await self._bridge.start(request, self._timed(pair, pair.caller, sink), fallback)
        except BaseException:
            self._drop(pair)
            raise
        if self._pairs.get(request.id) is pair:
            task = asyncio.ensure_future(self._send_copy(pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cancel(self, request_id: str) -> None:
        """The caller's request is cancelled: so is its copy, unless the caller has its answer."""
        pair = self._pairs.get(request_id)
        if pair is not None and pair.caller.end is None:
            self._drop(pair)

    def _pair(self, request: LaneRequest, canary: OpenRelease | None) -> _Pair | None:
        found = self._releases.copied(request, canary)
        if found is None:
            return None
        if len(self._pairs) >= MAX_OPEN_COPIES or self._bridge.is_nearly_full:
            self._releases.count_dropped(found)
            return None
        name = f"copy-{self._random.token(16).hex()}"
        copy = replace(request, id=name, model=found.copies_go_to, sampled_as=request.id, traceparent=None)
        return _Pair(found, request, copy, AnswerTimer(self._now()), AnswerTimer(self._now()))

    def _fallback(self, canary: OpenRelease, request: LaneRequest, is_stream: bool) -> Fallback:
        loop = asyncio.get_running_loop()

        def report(code: str) -> None:
            loop.call_soon_threadsafe(self._fell_back, canary, request.id, code)

        release = canary.release
        received: Received = "restart" if not is_stream else "continue" if canary.shares_tokens else "fail"
        return Fallback(release.stable.pin.key, release.rules.start_seconds, received, report)

    def _fell_back(self, canary: OpenRelease, request_id: str, code: str) -> None:
        """The candidate does not answer a caller's request."""
        logger.warning("canary request not answered by the candidate", request=request_id, why=code)
        if code != ROUTED:
            self._releases.fell_back(canary, is_dead=code in (WORKER_LOST, NO_ANSWER))
        pair = self._pairs.get(request_id)
        if pair is not None:
            pair.fell_back = code
            pair.is_lost = code == WORKER_LOST or (code == NO_ANSWER and pair.copied.has_begun)
            if code in _NOT_COMPARED:
                self._drop(pair)
            else:
                self._settle(pair)

    async def _send_copy(self, pair: _Pair) -> None:
        fails = Fallback(None, float("inf"), "fail", _ignore)
        pair.copied.began = self._now()
        try:
            await self._bridge.start(pair.copy, self._timed(pair, pair.copied, _ignore), fails, is_counted=False)
        except ApiError:
            self._drop(pair)
            return
        if self._pairs.get(pair.request.id) is not pair:  # cancelled meanwhile
            self._bridge.cancel(pair.copy.id)

    def _timed(self, pair: _Pair, timer: AnswerTimer, sink: Sink) -> Sink:
        """A sink that measures the events that it passes on."""

        def handle_event(event: LaneEvent) -> None:
            now = self._now()
            sink(event)
            timer.record(event, now)
            if timer.end is not None:
                if timer is pair.copied:
                    self._bridge.forget(pair.copy.id)
                self._settle(pair)

        return handle_event

    def _settle(self, pair: _Pair) -> None:
        """Compare both answers once they have ended."""
        if self._pairs.get(pair.request.id) is not pair:
            return
        stable, candidate = (pair.copied, pair.caller) if pair.found.is_canary else (pair.caller, pair.copied)
        codes = {timer.end.code for timer in (stable, candidate) if isinstance(timer.end, ErrorEvent)}
        if codes & _NOT_COMPARED or _is_lost(stable):
            self._drop(pair)
            return
        has_candidate_ended = candidate.end is not None or pair.fell_back is not None or pair.is_late
        if stable.end is None and pair.is_late:
            self._drop(pair)
        elif stable.end is not None and has_candidate_ended:
            self._compare(pair, stable, candidate)
        elif pair.caller.end is not None and pair.cancel_late is None:
            late = pair.found.release.rules.start_seconds + _LATE_FACTOR * pair.caller.seconds(self._now())
            pair.cancel_late = asyncio.get_running_loop().call_later(late, self._give_up, pair)

    def _give_up(self, pair: _Pair) -> None:
        pair.is_late = True
        self._bridge.cancel(pair.copy.id)
        self._settle(pair)

    def _compare(self, pair: _Pair, stable: AnswerTimer, candidate: AnswerTimer) -> None:
        is_lost, agreement = pair.is_lost or _is_lost(candidate), None
        if is_lost and self._now() - self._bridge.lost_at < _SAME_OUTAGE_SECONDS:
            self._drop(pair)  # the stable version's workers lost requests, too: the lane did
            return
        failed = pair.fell_back is not None or pair.is_late
        if not failed and isinstance(stable.end, EndEvent) and isinstance(candidate.end, EndEvent):
            agreement = agreement_of(stable.end.response, candidate.end.response)
        self._forget(pair)
        sample = RequestSample(
            stable=stable.sample(),
            candidate=AnswerSample(failed=True) if failed else candidate.sample(),
            agreement=agreement,
            lost=is_lost,
        )
        self._releases.add_sample(pair.found, sample)

    def _drop(self, pair: _Pair) -> None:
        """Don't compare the pair, and cancel its copy."""
        if self._pairs.get(pair.request.id) is pair:
            self._forget(pair)
            self._releases.count_dropped(pair.found)
            if pair.copied.end is None:
                self._bridge.cancel(pair.copy.id)

    def _forget(self, pair: _Pair) -> None:
        self._pairs.pop(pair.request.id, None)
        if pair.cancel_late is not None:
            pair.cancel_late.cancel()


def _is_lost(timer: AnswerTimer) -> bool:
    return isinstance(timer.end, ErrorEvent) and timer.end.code == WORKER_LOST


def _ignore(_: object) -> None:
    """The answers of copies go nowhere."""
