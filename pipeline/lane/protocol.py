"""The lane: requests whose caller waits, straight to a worker's running batch, and tokens back as they come.

Nothing here is durable. The caller owns its request: it sends it, reads events by position, and when the lane or a
worker lost it, sends the next attempt with the tokens that it has (`LaneStream`, `pipeline.lane.client`). A request is
wanted as long as the lane has it on record with this attempt: a cancel, a deadline, a later attempt or an emptied
server all end that, and a worker learns it with the next thing that it tells. So a cancel is no message that could miss
the worker that has the request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from pipeline.ports import PipelineError
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest, Position, TokensEvent, position_of

START: Final = Position(0, 0)
"""Before all events."""

LANE_OVERRUN: Final = "lane_overrun"


class LaneFull(PipelineError):
    """Raised when so many requests wait for a model that one more is refused. Callers answer 429."""


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """Bounds of a lane; seconds. The same for all who share it.

    Attributes:
        lifetime: after this long without a sign (`LaneWorker.hold`, `emit`) a worker has lost its requests.
        caller_lifetime: a caller that hasn't asked after its request (`Lane.lost`) for so long is dead, and the request
            is dropped where its answer hasn't begun. No less than a caller waits for a lane that it can't reach
            (`CallSettings.give_up`).
        longest: a request without a deadline is wanted for so long.
        retention: events are kept for so long after the last one.
        most_waiting: requests of a model that no worker has begun to answer; only first attempts are refused for it.
            One tenant alone may have seven eighths of them.
        most_events: of a request, that are kept for its reader.
        most_bytes: of a request.
    """

    lifetime: float = 10.0
    caller_lifetime: float = 30.0
    longest: float = 3_600.0
    retention: float = 300.0
    most_waiting: int = 10_000
    most_events: int = 16_384
    most_bytes: int = 16 << 20

    @property
    def most_waiting_each(self) -> int:
        """Requests of one tenant for a model that may wait."""
        return self.most_waiting - self.most_waiting // 8


class Lane(Protocol):
    """The caller's side. Calls raise `ServiceUnavailable` when the lane can't be reached."""

    def send(self, request: LaneRequest) -> None:
        """Hand the request to whoever serves its model. To send the same attempt again changes nothing; a later attempt
        takes the place of those before. Raises `LaneFull`."""
        ...

    def read(self, after: Mapping[str, Position], timeout: float) -> list[LaneEvent]:
        """Events of these requests (ids), each behind its position (`START`: from the beginning), those of a request in
        order; waits up to `timeout` seconds for the first. Events that were pushed out by later ones are missing."""
        ...

    def cancel(self, request: LaneRequest) -> None:
        """Nobody wants the answer any more."""
        ...

    def lost(self, requests: Collection[LaneRequest]) -> frozenset[str]:
        """Those (ids) that nobody will answer: they neither wait, nor are with a worker that lives, nor have an end.
        Read once more before believing it of a request: its end may just have come. A caller asks every few seconds
        until its answer begins: a request that isn't asked after may be dropped (`LaneSettings.caller_lifetime`)."""
        ...


@dataclass(frozen=True, slots=True)
class TenantShares:
    """What a worker holds of each tenant. The next request that it takes is the oldest one of the tenant of which it
    holds the fewest; of equal ones the tenant whose turn was longest ago.

    Attributes:
        held: requests that the worker holds, by tenant.
        most_each: requests of one tenant that it may hold, with those that it takes now.
    """

    held: Mapping[str, int] = field(default_factory=dict)
    most_each: int = 2**31


NO_SHARES: Final = TenantShares()
"""Nothing is held."""


class LaneWorker(Protocol):
    """A worker's side. Calls raise `ServiceUnavailable` when the lane can't be reached."""

    def take(
        self, models: Sequence[str], most: int, timeout: float, shares: TenantShares = NO_SHARES
    ) -> list[LaneRequest]:
        """Up to `most` requests for these models, tenants in turn, or none after `timeout` seconds. One that another
        worker took and didn't begin to answer before it fell silent is handed out again."""
        ...

    def emit(self, events: Sequence[LaneEvent]) -> frozenset[str]:
        """Hand events over, those of a request in order. Returns the requests that nobody wants from this worker any
        more: stop computing them. The first event of an attempt decides whose the request is."""
        ...

    def hold(self, requests: Collection[str]) -> frozenset[str]:
        """The worker lives and has these; to be told every third of the lifetime. Returns those that nobody wants from
        it any more."""
        ...

    def close(self) -> None:
        """Let go of connections. What was taken and not answered others get after the lifetime."""
        ...


class LaneMonitor(Protocol):
    """The side of who starts workers. Calls raise `ServiceUnavailable` when the lane can't be reached."""

    def waiting(self, models: Collection[str]) -> Mapping[str, int]:
        """Requests for each of these models (`ModelPin.key`) that no worker has begun to answer; 0 where there are
        none."""
        ...


class OpenLane(Lane, LaneMonitor, Protocol):
    """All sides."""

    def worker(self, name: str) -> LaneWorker:
        """The side of the worker of this name; names are never used twice."""
        ...


def full_message(request: LaneRequest, settings: LaneSettings, own: int) -> str:
    """Why a request can't wait; `own`: requests of its tenant that do."""
    if own >= settings.most_waiting_each:
        return f"{own} requests of this tenant wait for model {request.model}; try again later"
    return f"{settings.most_waiting} requests wait for model {request.model}; try again later"


class LaneStream:
    """One answer, as its caller sees it: of the current attempt only, in order, and always with an end.

    A worker that is being stopped may hand its attempt back (`HandBackEvent`): then the next one is due.

    Attributes:
        request: the attempt that counts now.
        position: of the last event that counted.
        ended: whether the end, or an error, was seen.
    """

    def __init__(self, request: LaneRequest) -> None:
        self.request = request
        self.position = START
        self.ended = False
        self._next = 0
        self._tokens: dict[int, list[int]] = {place: list(ids) for place, ids in enumerate(request.tokens)}

    def accept(self, event: LaneEvent) -> LaneEvent | None:
        """The event if it counts; an error in its place if others before it are missing; None if it doesn't count."""
        if self.ended or event.attempt != self.request.attempt or event.sequence < self._next:
            return None
        if event.sequence > self._next:
            missing = event.sequence - self._next
            return self.fail(LANE_OVERRUN, f"{missing} events were pushed out unread; read faster", 503)
        self.position, self._next = position_of(event), self._next + 1
        self.ended = isinstance(event, EndEvent | ErrorEvent)
        if isinstance(event, TokensEvent):
            self._tokens.setdefault(event.choice, []).extend(event.tokens)
        return event

    def again(self) -> LaneRequest:
        """The next attempt, which goes on behind the tokens that have come; from now on only its events count."""
        choices = range(max(self._tokens, default=-1) + 1)
        tokens = tuple(tuple(self._tokens.get(choice, ())) for choice in choices)
        self.request = replace(self.request, attempt=self.request.attempt + 1, tokens=tokens)
        self.position, self._next = Position(self.request.attempt - 1, 2**53 - 1), 0
        return self.request

    def fail(self, code: str, message: str, status: int) -> ErrorEvent:
        """End it with an error of the caller's own making."""
        self.ended = True
        return ErrorEvent(self.request.id, self.request.attempt, self._next, code, message, status)
