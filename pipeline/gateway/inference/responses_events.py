"""Conversion of a response's events into those of the Responses API.

A stream begins with `response.created` and `response.in_progress`. Each item of the output is added, grows by deltas
and is done. The text item stays open until the end, because more text may follow a call or a further thought; each
thought is an item. The last event holds the whole response, with the items as they were streamed: `response.completed`,
`response.incomplete`, or, after `error`, `response.failed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.inference.chunks import lane_error
from pipeline.gateway.inference.request_builder import InferenceRequest
from pipeline.gateway.inference.stream_buffer import ServerEvent
from schemas.requests.bodies import ChatBody
from schemas.requests.dialects.openai_responses.response import (
    INCOMPLETE,
    PREFIX,
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    response_object,
    text_part,
)
from schemas.requests.policy_report import extension_of
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, TokensEvent

Json = dict[str, Any]

_ERROR_CODES = {429: "rate_limit_exceeded"}
"""`response.error.code`, of which OpenAI has few values; the event `error` has the gateway's own code."""


@dataclass(slots=True)
class _OpenItem:
    """An item of the output that grows.

    Attributes:
        kind: message, reasoning or function_call.  index: in the output.  item: as it was added, still empty.
        pieces: of the content or the arguments so far.  status: of the item that is done; None: it still grows.
    """

    kind: str
    index: int
    item: Json
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    status: str | None = None

    @property
    def text(self) -> str:
        """The content or the arguments so far."""
        return "".join(self.pieces)


class ResponsesEvents:
    """Converts the events of one response.

    Args:
        created: the time of the request; seconds since 1970.
    """

    def __init__(self, inference: InferenceRequest, created: int) -> None:
        assert isinstance(inference.body, ChatBody), "a dialect's request is a chat"
        self._body = inference.body
        self._added = inference.added_fields
        self._created = created
        self._name = PREFIX + inference.request.id.removeprefix("http-")
        self._items: list[_OpenItem] = []
        self._calls: dict[int, _OpenItem] = {}
        self._latest: dict[str, _OpenItem] = {}  # of each kind: no earlier one of it grows
        self._counts: Counter[str] = Counter()  # of the items of each kind
        self._grown: _OpenItem | None = None  # the one that grew last, which an answer's cut-off leaves incomplete
        self._logprobs: list[Json] = []  # of tokens since the last text: a text item gets those of all tokens
        self._has_begun = False
        self._sequence = 0

    def convert(self, event: LaneEvent) -> list[ServerEvent]:
        """The stream's events for an event of the response."""
        if isinstance(event, TokensEvent):
            return [*self._begin(), *self._tokens(event)]
        if isinstance(event, EndEvent):
            return [*self._begin(), *self._end(event.response)]
        if isinstance(event, ErrorEvent):
            return self.fail(lane_error(event))
        return []

    def fail(self, error: ApiError) -> list[ServerEvent]:
        """The events `error`, which OpenAI's clients raise, and `response.failed`."""
        said = error.body()["error"]
        failed = response_object(self._name, self._created, self._body, self._output("incomplete"))
        code = _ERROR_CODES.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
        failed |= {"status": "failed", "error": {"code": code, "message": said["message"]}}
        return [
            self._event("error", code=said["code"], message=said["message"], param=said["param"], error=said),
            self._event("response.failed", response=failed),
        ]

    def _begin(self) -> Iterator[ServerEvent]:
        if self._has_begun:
            return
        self._has_begun = True
        begun = response_object(self._name, self._created, self._body)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def _tokens(self, event: TokensEvent) -> Iterator[ServerEvent]:
        if event.reasoning:
            yield from self._grow_text("reasoning", event.reasoning)
        self._logprobs += (event.logprobs or {}).get("content") or ()
        if event.text:
            yield from self._grow_text("message", event.text)
        for delta in event.tool_calls or ():
            yield from self._grow_call(delta)

    def _grow_text(self, kind: str, text: str) -> Iterator[ServerEvent]:
        if kind == "message":
            yield from self._finish_latest("reasoning")
        open_item = self._latest.get(kind)
        if open_item is None or open_item.status is not None:
            made = message_item if kind == "message" else reasoning_item
            earlier = self._counts[kind]
            name = f"{self._name}-{earlier}" if earlier else self._name
            open_item = self._open(kind, made(name, None, status="in_progress"))
            yield self._item_event("response.output_item.added", open_item, item=open_item.item)
            yield self._part_event("response.content_part.added", open_item, part=_part(open_item))
        self._grown = open_item
        open_item.pieces.append(text)
        if kind == "message":
            logprobs, self._logprobs = self._logprobs, []
            open_item.logprobs += logprobs
            yield self._part_event("response.output_text.delta", open_item, delta=text, logprobs=logprobs)
        else:
            yield self._part_event("response.reasoning_text.delta", open_item, delta=text)

    def _grow_call(self, delta: Mapping[str, Any]) -> Iterator[ServerEvent]:
        function, open_item = delta["function"], self._calls.get(delta["index"])
        if open_item is None:
            yield from self._finish_latest("reasoning")
            yield from self._finish_latest("function_call")
            item = call_item(delta["id"], function["name"], "", "in_progress")
            open_item = self._calls[delta["index"]] = self._open("function_call", item)
            yield self._item_event("response.output_item.added", open_item, item=item)
        self._grown = open_item
        if arguments := function.get("arguments"):
            open_item.pieces.append(arguments)
            yield self._named_event("response.function_call_arguments.delta", open_item, delta=arguments)

    def _end(self, chat: Mapping[str, Any]) -> Iterator[ServerEvent]:
        choice = chat["choices"][0]
        reason = choice["finish_reason"]
        if not self._items and choice["message"]["content"] is not None:
            yield from self._grow_text("message", "")
        last = "incomplete" if reason in INCOMPLETE else "completed"
        for open_item in self._items:
            yield from self._finish(open_item, last if open_item is self._grown else "completed")
        kind = "response.incomplete" if reason in INCOMPLETE else "response.completed"
        whole = response_object(self._name, self._created, self._body, self._output(last), reason, chat["usage"])
        yield self._event(kind, response=whole | extension_of(chat))

    def _finish_latest(self, kind: str) -> Iterator[ServerEvent]:
        if (open_item := self._latest.get(kind)) is not None:
            yield from self._finish(open_item)

    def _finish(self, open_item: _OpenItem, status: str = "completed") -> Iterator[ServerEvent]:
        if open_item.status is not None:
            return
        open_item.status = status
        if open_item.kind == "function_call":
            name = open_item.item["name"]
            yield self._named_event(
                "response.function_call_arguments.done", open_item, name=name, arguments=open_item.text
            )
        else:
            if open_item.kind == "message":
                open_item.logprobs += self._logprobs
                yield self._part_event(
                    "response.output_text.done", open_item, text=open_item.text, logprobs=open_item.logprobs
                )
            else:
                yield self._part_event("response.reasoning_text.done", open_item, text=open_item.text)
            yield self._part_event("response.content_part.done", open_item, part=_part(open_item))
        yield self._item_event("response.output_item.done", open_item, item=self._whole(open_item, status))

    def _open(self, kind: str, item: Json) -> _OpenItem:
        opened = self._latest[kind] = _OpenItem(kind, len(self._items), item)
        self._items.append(opened)
        self._counts[kind] += 1
        return opened

    def _output(self, last: str) -> list[Json]:
        """The items of the output so far. `last`: the status of the one that grew last, unless it is done."""
        return [self._whole(one, one.status or (last if one is self._grown else "completed")) for one in self._items]

    def _whole(self, open_item: _OpenItem, status: str) -> Json:
        """The item with its content so far."""
        item = open_item.item | {"status": status}
        if open_item.kind == "function_call":
            return item | {"arguments": open_item.text}
        return item | {"content": [_part(open_item)]}

    def _part_event(self, kind: str, open_item: _OpenItem, **fields: Any) -> ServerEvent:
        return self._named_event(kind, open_item, content_index=0, **fields)

    def _named_event(self, kind: str, open_item: _OpenItem, **fields: Any) -> ServerEvent:
        return self._item_event(kind, open_item, item_id=open_item.item["id"], **fields)

    def _item_event(self, kind: str, open_item: _OpenItem, **fields: Any) -> ServerEvent:
        return self._event(kind, output_index=open_item.index, **fields)

    def _event(self, kind: str, **fields: Any) -> ServerEvent:
        if "response" in fields:
            fields["response"] = fields["response"] | self._added
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return ServerEvent(orjson.dumps(data), kind)


def _part(open_item: _OpenItem) -> Json:
    """The content of a text or reasoning item so far."""
    if open_item.kind == "message":
        return text_part(open_item.text, open_item.logprobs)
    return reasoning_part(open_item.text)
