"""The lane: carries requests whose caller waits straight to a worker's running batch, and streams tokens back.

A model's requests wait in sub-queues: the general one, those of requests that are addressed to one worker, and
`DECODE`. They are a preference of where to compute, no more: all bounds, counts and guarantees are the model's.

Nothing here is durable. The caller owns its request: it sends it, reads events by position, and, if the lane or a
worker lost it, sends the next attempt with the tokens received so far (`LaneStream`, `pipeline.lane.client`). A request
is wanted as long as the lane has it with this attempt: a cancel, a deadline, a later attempt or an emptied server all
end that, and the answer to the worker's next call reports it. So a cancel is no message that could miss the worker.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from pipeline.ports import PipelineError
from schemas.requests.policy_report import PolicyReport, add_report
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import (
    ADDRESSED_MARK,
    DECODE,
    EndEvent,
    ErrorEvent,
    KVSource,
    LaneEvent,
    LaneRequest,
    Position,
    Route,
    TokensEvent,
    position_of,
)

START: Final = Position(0, 0)
"""The position before all events."""

LANE_OVERRUN: Final = "lane_overrun"

COUNTS_SECONDS: Final = 86_400.0
"""How long counts of answers are stored after the last one."""


class LaneFull(PipelineError):
    """Raised when too many requests wait for a model. Callers answer 429."""


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """Numbers of a model's answers by their latency, as their callers saw it.

    Attributes:
        in_time: kept the promised times to first token and between tokens.
        late_first_tokens: their first token was late, or they were refused because too many waited.
        late_tokens: only the time between their tokens was too long.
    """

    in_time: int = 0
    late_first_tokens: int = 0
    late_tokens: int = 0

    def __add__(self, other: AnswerCounts) -> AnswerCounts:
        return AnswerCounts(
            self.in_time + other.in_time,
            self.late_first_tokens + other.late_first_tokens,
            self.late_tokens + other.late_tokens,
        )


NO_ANSWERS: Final = AnswerCounts()


class Lane(Protocol):
    """The caller's side. Calls raise `ServiceUnavailable` when the lane can't be reached."""

    def send(self, request: LaneRequest) -> None:
        """Send the request to the workers of its model. Sending the same attempt again changes nothing; a later attempt
        replaces the earlier ones. Raises `LaneFull`."""
        ...

    def read(self, after: Mapping[str, Position], timeout: float) -> list[LaneEvent]:
        """Events of these requests (ids), each after its position (`START`: from the beginning), those of a request in
        order; waits up to `timeout` seconds for the first. Events that were evicted by later ones are missing.

        Events can be read again until the request's end was: then the lane may drop the request, so later reads have
        all of its events or none, and `lost` may name it. A caller reads a request no further than to its end."""
        ...

    def cancel(self, request: LaneRequest) -> None:
        """Cancel the request: its answer is not wanted any more."""
        ...

    def lost(self, requests: Collection[LaneRequest]) -> frozenset[str]:
        """The requests (ids) that no worker will answer: they neither wait, nor are held by a live worker, nor have an
        end. Read once more before treating a request as lost: its end may just have arrived. A caller checks every few
        seconds until its answer begins: an unchecked request may be dropped (`LaneSettings.client_timeout_seconds`)."""
        ...

    def add_answers(self, counts: Mapping[str, AnswerCounts]) -> None:
        """Add to the counts of answers by model (`ModelPin.key`), for the autoscaler. After an error it is not known
        whether they were added."""
        ...


@dataclass(frozen=True, slots=True)
class TenantShares:
    """A worker's held requests by tenant. It takes next a request of the tenant of which it holds the fewest, whatever
    sub-queues of the model they wait in; among equal ones from the first of the queues that it names, and there of the
    tenant whose last turn was longest ago. Of a queue it takes a tenant's oldest request.

    Attributes:
        held: number of requests that the worker holds, by tenant.
        max_each: maximum number of one tenant's requests that it may hold, including those that it takes now.
    """

    held: Mapping[str, int] = field(default_factory=dict)
    max_each: int = 2**31


NO_SHARES: Final = TenantShares()
"""No requests are held."""


ADDRESSED_TO_ANY: Final = ADDRESSED_MARK
"""The name of all of a model's sub-queues of addressed requests together. A worker takes its own requests from the
sub-queue `addressed_to` itself first, and those of others from this one after `min_wait_seconds`."""


@dataclass(frozen=True, slots=True)
class LaneQueue:
    """A sub-queue of a model, as a worker takes from it.

    Attributes:
        model: `ModelPin.key`.
        name: as in `LaneRequest.queue`, or `ADDRESSED_TO_ANY`.
        min_wait_seconds: how long a request must have waited before the worker may take it.
    """

    model: str
    name: str = ""
    min_wait_seconds: float = 0.0


class LaneWorker(Protocol):
    """A worker's side. Calls raise `ServiceUnavailable` when the lane can't be reached."""

    @property
    def name(self) -> str:
        """The worker's name."""
        ...

    def take(
        self, queues: Sequence[LaneQueue], most: int, timeout: float, shares: TenantShares = NO_SHARES
    ) -> list[LaneRequest]:
        """Up to `most` requests, or none after `timeout` seconds: fairly by tenant (`TenantShares`), and of equal
        tenants, or of one, from the first of a model's queues that has some. Of several models each comes first in
        turn.

        A request whose worker fell silent before it began to answer is handed out again. If it was addressed to a
        worker it is addressed to none then."""
        ...

    def emit(self, events: Sequence[LaneEvent]) -> frozenset[str]:
        """Send events, those of a request in order. Returns the requests that are no longer wanted from this worker:
        stop computing them. The first event of an attempt decides which worker owns the request."""
        ...

    def hold(self, requests: Collection[str]) -> frozenset[str]:
        """Report that the worker lives and holds these; call it every third of the lifetime. Returns those that are no
        longer wanted from it."""
        ...

    def close(self) -> None:
        """Close connections. Other workers get unanswered requests after the lifetime."""
        ...


class LaneMonitor(Protocol):
    """The side of the autoscaler. Calls raise `ServiceUnavailable` when the lane can't be reached."""

    def waiting(self, models: Collection[str]) -> Mapping[str, int]:
        """Number of requests for each of these models (`ModelPin.key`) that no worker has begun to answer; 0 if
        none."""
        ...

    def answers(self, models: Collection[str]) -> Mapping[str, AnswerCounts]:
        """Answers for each of these models (`ModelPin.key`), of all callers, since the lane was emptied or
        `COUNTS_SECONDS` passed without any."""
        ...


class OpenLane(Lane, LaneMonitor, Protocol):
    """All sides of a lane."""

    def worker(self, name: str) -> LaneWorker:
        """The side of the worker with this name; names are never used twice."""
        ...


def full_message(request: LaneRequest, settings: LaneSettings, own: int) -> str:
    """The message of `LaneFull`; `own`: number of the tenant's waiting requests."""
    if own >= settings.max_waiting_per_tenant:
        return f"{own} requests of this tenant wait for model {request.model}; try again later"
    return f"{settings.max_waiting} requests wait for model {request.model}; try again later"


class LaneStream:
    """The stream of one answer: only events of the current attempt, in order, and always with an end.

    A worker that is being stopped, or that only computes prompts, may hand its attempt back (`HandBackEvent`): then the
    next attempt is due.

    Attributes:
        request: the current attempt.
        position: of the last accepted event.
        ended: whether the end, or an error, was received.
        routes: how often content policies sent the request to another model.
    """

    def __init__(self, request: LaneRequest) -> None:
        self.request = request
        self.position = START
        self.ended = False
        self.routes = 0
        self._reports: list[PolicyReport] = []
        self._next = 0
        self._tokens: dict[int, list[int]] = {choice: list(ids) for choice, ids in enumerate(request.tokens)}

    @property
    def has_tokens(self) -> bool:
        """Whether tokens of the answer were received."""
        return any(self._tokens.values())

    def accept(self, event: LaneEvent) -> LaneEvent | None:
        """The event if it is accepted; an error instead if earlier events are missing; None if it is ignored."""
        if self.ended or event.attempt != self.request.attempt or event.sequence < self._next:
            return None
        if event.sequence > self._next:
            missing = event.sequence - self._next
            return self.fail(LANE_OVERRUN, f"{missing} events were pushed out unread; read faster", 503)
        self.position, self._next = position_of(event), self._next + 1
        self.ended = isinstance(event, EndEvent | ErrorEvent)
        if isinstance(event, TokensEvent):
            self._tokens.setdefault(event.choice, []).extend(event.tokens)
        if isinstance(event, EndEvent) and self._reports:
            response: dict[str, Any] = functools.reduce(add_report, self._reports[::-1], event.response)
            event = replace(event, response=response)
        return event

    def again(
        self,
        kv_source: KVSource | None = None,
        route: Route | None = None,
        model: str | None = None,
        *,
        anew: bool = False,
    ) -> LaneRequest:
        """Start the next attempt, which continues after the received tokens; from now on only its events count. It is
        addressed to no worker.

        Args:
            kv_source: where the prompt's blocks are, for a decode worker.
            route: the model that answers instead; the response gets the verdicts that led to it.
            model: `ModelPin.key` of another version that answers instead; None: the same one does.
            anew: the answer begins anew; the received tokens don't count.
        """
        self.ended = False
        if anew:
            self._tokens.clear()
        if route is not None:
            self.routes += 1
            self._reports.append(route.report)
            body = {**self.request.body, "model": route.name}
            self.request = replace(self.request, model=route.model, body=body)
        choices = range(max(self._tokens, default=-1) + 1)
        tokens = tuple(tuple(self._tokens.get(choice, ())) for choice in choices)
        self.request = replace(
            self.request,
            model=self.request.model if model is None else model,
            attempt=self.request.attempt + 1,
            tokens=tokens,
            queue="" if kv_source is None else DECODE,
            kv_source=kv_source,
        )
        self.position, self._next = Position(self.request.attempt - 1, 2**53 - 1), 0
        return self.request

    def fail(self, code: str, message: str, status: int) -> ErrorEvent:
        """End the stream with an error of the caller."""
        self.ended = True
        return ErrorEvent(self.request.id, self.request.attempt, self._next, code, message, status)
