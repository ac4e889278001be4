"""Messages of the lane: interactive requests, and the events of their answers, as JSON.

Plain frozen dataclasses, validated by pydantic on reading, because any client of the server can write them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AwareDatetime, ConfigDict, Field, StringConstraints, TypeAdapter

from schemas.identifiers import Attempt, Host, Id, Traceparent
from schemas.jobs.job import Tier
from schemas.requests.policy_report import NO_REPORT, PolicyReport

Text = Annotated[str, StringConstraints(max_length=4_096)]
Sequence = Annotated[int, Field(ge=0, lt=2**53)]
Choice = Annotated[int, Field(ge=0, lt=2**16)]
Ticket = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,99}$")]
TokenIds = tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]
_STRICT = ConfigDict(extra="forbid")

ADDRESSED_MARK: Final = "@"
DECODE: Final = "decode"
"""The sub-queue of requests whose prompt was computed by another worker."""
_QUEUE_NAME: Final = r"^(decode|@[A-Za-z0-9._-]{1,255})?$"
QueueName = Annotated[str, StringConstraints(pattern=_QUEUE_NAME)]
"""The name of a model's sub-queue: "" is the general one, "@NAME" holds the requests that are addressed to a worker."""


class Position(NamedTuple):
    """The position of an event in a request's stream: the attempt, and the event's index in it, from 0."""

    attempt: int
    sequence: int


@dataclass(frozen=True, slots=True)
class KVSource:
    """Where the KV blocks of a request's prompt can be fetched (`workers.kv_transfer`).

    Attributes:
        host, port: of the worker that computed the prompt.
        ticket: a secret that names the blocks, in hexadecimal digits.
        machine, local_name: of that worker's machine since its start, and of its Unix socket there.
        cached_tokens: of the prompt, those that this worker had in its prefix cache. The answer's usage has them: the
            transferred ones were computed.
    """

    __pydantic_config__ = _STRICT

    host: Host
    port: Annotated[int, Field(ge=1, lt=2**16)]
    ticket: Ticket = field(repr=False)
    machine: Name
    local_name: Name
    cached_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0


@dataclass(frozen=True, slots=True)
class Route:
    """Another model for a request, chosen by a content policy of the worker that had it.

    Attributes:
        model: `ModelPin.key` of the model.  name: as requests name it.
        report: the verdicts on the request so far.
    """

    __pydantic_config__ = _STRICT

    model: Text
    name: Text
    report: PolicyReport = NO_REPORT


@dataclass(frozen=True, slots=True)
class LaneRequest:
    """One attempt at a request.

    Attributes:
        id: chosen by the caller; the answer's events carry it.
        model: `ModelPin.key` of the requested model.
        url: the OpenAI endpoint of the body.
        body: OpenAI's request body.
        attempt: from 1; only events of the latest attempt count.
        deadline: the answer is useless after that; None: as long as the lane retains requests.
        tokens: token ids from earlier attempts, for each choice; the answer continues after them.
        traceparent: the sender's span context, if it traces.
        queue: the sub-queue of the model in which the request waits for a worker.
        kv_source: where the prompt's blocks are, if an earlier attempt computed it to hand it over.
        sampled_as: id of the request of which this is a copy: without a seed both are sampled with the same random
            numbers. None: it is no copy.
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
    queue: QueueName = ""
    kv_source: KVSource | None = None
    sampled_as: Id | None = None


@dataclass(frozen=True, slots=True)
class _Event:
    """The common fields of an answer's events: its request, and the event's position."""

    __pydantic_config__ = _STRICT

    request: Id
    attempt: Attempt
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class TokensEvent(_Event):
    """Tokens that were added to a choice, and their text (perhaps none yet: an incomplete character is held back, and a
    possible beginning of a stop string). `logprobs`: of these tokens, for chat; a completion's are in the response.
    `reasoning`: their text in the model's thought; `tool_calls`: their additions to calls, as in `delta.tool_calls` of
    OpenAI's streams. The text contains neither. `prompt_token_ids`: with an attempt's first event of each prompt, where
    the request wants token ids.
    """

    choice: Choice = 0
    tokens: TokenIds = ()
    text: str = ""
    logprobs: dict[str, Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning: str = ""
    prompt_token_ids: TokenIds | None = None
    kind: Literal["tokens"] = "tokens"


@dataclass(frozen=True, slots=True)
class EndEvent(_Event):
    """The answer is complete. `response`: OpenAI's response body, over all attempts. `policies`: the fingerprint of the
    content policies that checked it; None: none did."""

    response: dict[str, Any] = field(default_factory=dict)
    policies: Text | None = None
    kind: Literal["end"] = "end"


@dataclass(frozen=True, slots=True)
class ErrorEvent(_Event):
    """The answer failed; no more of it follows. `status`: the HTTP status; `param`: the invalid field; `fields`: those
    that the message itself names, in their order (`RowError.fields`)."""

    code: Text
    message: str
    status: Annotated[int, Field(ge=400, le=599)] = 500
    param: Text | None = None
    fields: tuple[Text, ...] = ()
    kind: Literal["error"] = "error"


@dataclass(frozen=True, slots=True)
class HandBackEvent(_Event):
    """The worker ends this attempt; the caller sends the next one. `kv_source`: the prompt is computed, and another
    worker is to go on with it. `route`: another model is to answer, and no token was computed. Neither: the worker
    stops."""

    kv_source: KVSource | None = None
    route: Route | None = None
    kind: Literal["hand_back"] = "hand_back"


LaneEvent = TokensEvent | EndEvent | ErrorEvent | HandBackEvent


def addressed_to(worker: str) -> str:
    """The name of the sub-queue of requests that are addressed to this worker."""
    return f"{ADDRESSED_MARK}{worker}"


def is_addressed(queue: str) -> bool:
    """Whether the sub-queue's requests are addressed to one worker."""
    return queue.startswith(ADDRESSED_MARK)


def is_queue_name(text: str) -> bool:
    """Whether the text is the name of a sub-queue."""
    return re.fullmatch(_QUEUE_NAME, text) is not None


def closes_attempt(event: LaneEvent) -> bool:
    """Whether no other event of the attempt follows."""
    return not isinstance(event, TokensEvent)


def position_of(event: LaneEvent) -> Position:
    """The event's position."""
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
