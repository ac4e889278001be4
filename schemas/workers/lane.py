"""What travels on the lane: a request whose answer somebody waits for, and the events of its answer, as JSON.

Plain frozen dataclasses, checked by pydantic where they are read: whoever reaches the server can write there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AwareDatetime, ConfigDict, Field, StringConstraints, TypeAdapter

from schemas.identifiers import Attempt, Id, Traceparent
from schemas.jobs.job import Tier

Text = Annotated[str, StringConstraints(max_length=4_096)]
Sequence = Annotated[int, Field(ge=0, lt=2**53)]
Choice = Annotated[int, Field(ge=0, lt=2**16)]
TokenIds = tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]
_STRICT = ConfigDict(extra="forbid")


class Position(NamedTuple):
    """A place in the events of a request: the attempt, and the number of an event in it, from 0."""

    attempt: int
    sequence: int


@dataclass(frozen=True, slots=True)
class LaneRequest:
    """A request, as one attempt at it.

    Attributes:
        id: the caller's; an answer belongs to it.
        model: `ModelPin.key` of the model that is to answer.
        url: which of OpenAI's endpoints the body is for.
        body: OpenAI's request body.
        attempt: from 1; only events of the last attempt that was sent count.
        deadline: nobody wants the answer after that; None: for as long as the lane keeps requests.
        tokens: token ids that earlier attempts gave, for each choice: the answer goes on behind them.
        traceparent: what it belongs to, where its sender traces.
    """

    __pydantic_config__ = _STRICT

    id: Id
    model: Text
    body: dict[str, Any]
    url: Text = "/v1/chat/completions"
    tier: Tier = Tier.INTERACTIVE
    tenant: Text = "default"
    attempt: Attempt = 1
    deadline: AwareDatetime | None = None
    tokens: tuple[TokenIds, ...] = ()
    traceparent: Traceparent | None = None


@dataclass(frozen=True, slots=True)
class _Event:
    """What all events of an answer say: whose they are, and where they stand."""

    __pydantic_config__ = _STRICT

    request: Id
    attempt: Attempt
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class TokensEvent(_Event):
    """Tokens that were added to a choice, and the text they add (perhaps none yet: half a letter is kept back, and what
    may be the beginning of a stop string). `logprobs`: of these tokens, for chat; a completion's are in the response.
    `tool_calls`: what they add to calls, as `delta.tool_calls` of OpenAI's streams has it; the text holds none of that.
    """

    choice: Choice = 0
    tokens: TokenIds = ()
    text: str = ""
    logprobs: dict[str, Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    kind: Literal["tokens"] = "tokens"


@dataclass(frozen=True, slots=True)
class EndEvent(_Event):
    """The answer is whole. `response`: OpenAI's response body, of all attempts together. `policies`: the fingerprint of
    the content policies that judged it; None: none did."""

    response: dict[str, Any] = field(default_factory=dict)
    policies: Text | None = None
    kind: Literal["end"] = "end"


@dataclass(frozen=True, slots=True)
class ErrorEvent(_Event):
    """There will be no (more of an) answer. `status`: as HTTP would answer; `param`: the field that is to blame."""

    code: Text
    message: str
    status: Annotated[int, Field(ge=400, le=599)] = 500
    param: Text | None = None
    kind: Literal["error"] = "error"


@dataclass(frozen=True, slots=True)
class HandBackEvent(_Event):
    """The worker is being stopped, and will not go on with this attempt: the next one is the caller's to send."""

    kind: Literal["hand_back"] = "hand_back"


LaneEvent = TokensEvent | EndEvent | ErrorEvent | HandBackEvent


def closes_attempt(event: LaneEvent) -> bool:
    """Whether no other event of the attempt follows."""
    return not isinstance(event, TokensEvent)


def position_of(event: LaneEvent) -> Position:
    """Where the event stands."""
    return Position(event.attempt, event.sequence)


def request_json(request: LaneRequest) -> bytes:
    """The request on the wire."""
    return _requests().dump_json(request, exclude_defaults=True)


def read_request(data: bytes | str) -> LaneRequest:
    """A request from the wire; raises pydantic's ValidationError."""
    return _requests().validate_json(data)


def event_json(event: LaneEvent) -> bytes:
    """The event on the wire."""
    return _events().dump_json(event)


def read_event(data: bytes | str) -> LaneEvent:
    """An event from the wire; raises pydantic's ValidationError."""
    return _events().validate_json(data)


@functools.cache
def _requests() -> TypeAdapter[LaneRequest]:
    return TypeAdapter(LaneRequest)


@functools.cache
def _events() -> TypeAdapter[LaneEvent]:
    return TypeAdapter(Annotated[LaneEvent, Field(discriminator="kind")])
