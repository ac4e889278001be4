"""Conversion of a response's events into those of Anthropic's message streams.

A message is a list of blocks, one after another: reasoning, text, and each tool call. A block is closed when a delta
for another one arrives. The prompt's tokens are counted by the worker and arrive with its last event, so only
`message_delta` has them: the usage in `message_start` is 0, and clients take the later numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.inference.chunks import lane_error
from pipeline.gateway.inference.request_builder import InferenceRequest
from pipeline.gateway.inference.stream_buffer import ServerEvent
from schemas.requests.dialects.anthropic.response import message_head, message_id, stop_of, tool_use, usage_of
from schemas.requests.policy_report import extension_of
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, TokensEvent

_NO_USAGE = {"input_tokens": 0, "output_tokens": 0}


class AnthropicEvents:
    """Converts the events of one response into those of a message's stream."""

    def __init__(self, inference: InferenceRequest, _created: int) -> None:
        name = message_id(inference.request.id.removeprefix("http-"))
        self._head = message_head(name, inference.model)
        self._begun = False
        self._index = -1  # of the last block
        self._open: Any = None  # which block is open: "thinking", "text", or the index of a call

    def convert(self, event: LaneEvent) -> list[ServerEvent]:
        """The stream's events for an event of the response."""
        if isinstance(event, TokensEvent):
            return list(self._tokens(event))
        if isinstance(event, EndEvent):
            return list(self._end(event.response))
        if isinstance(event, ErrorEvent):
            return self.fail(lane_error(event))
        return []

    def fail(self, error: ApiError) -> list[ServerEvent]:
        """The error, as the last event."""
        return [ServerEvent(orjson.dumps(error.anthropic_body()), "error")]

    def _tokens(self, event: TokensEvent) -> Iterator[ServerEvent]:
        yield from self._begin()
        if event.reasoning:
            yield from self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": event.reasoning})
        if event.text:
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": event.text})
        for call in event.tool_calls or ():
            function = call.get("function", {})
            if "id" in call:
                yield from self._switch(call["index"], tool_use(call["id"], function["name"], {}))
            if text := function.get("arguments"):
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _end(self, response: Mapping[str, Any]) -> Iterator[ServerEvent]:
        yield from self._begin()
        yield from self._close()
        delta = stop_of(response["choices"][0])
        yield _event("message_delta", delta=delta, usage=usage_of(response["usage"]), **extension_of(response))
        yield _event("message_stop")

    def _begin(self) -> Iterator[ServerEvent]:
        if not self._begun:
            self._begun = True
            unknown = {"stop_reason": None, "stop_sequence": None, "usage": _NO_USAGE}
            yield _event("message_start", message={**self._head, "content": [], **unknown})
            yield _event("ping")

    def _switch(self, block: Any, begun: dict[str, Any]) -> Iterator[ServerEvent]:
        if self._open != block:
            yield from self._close()
            self._open = block
            self._index += 1
            yield _event("content_block_start", index=self._index, content_block=begun)

    def _close(self) -> Iterator[ServerEvent]:
        if self._open is not None:
            self._open = None
            yield _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> ServerEvent:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(name: str, **fields: Any) -> ServerEvent:
    return ServerEvent(orjson.dumps({"type": name, **fields}), name)
