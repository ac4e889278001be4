"""An answer's events as the chunks of OpenAI's streams, each of them one JSON document.

Chat: each choice begins with its role; then text, tool calls and log-probabilities as they come; then why it ended; and
if it is wanted the usage of all choices. A completion's log-probabilities come with the end of their choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.inference.request_builder import InferenceRequest
from schemas.requests.requests import CHAT_URL
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, TokensEvent

DONE: Final = b"[DONE]"


class Chunks:
    """The chunks of one answer.

    Args:
        created: when it was asked for; seconds since 1970.
    """

    def __init__(self, asked: InferenceRequest, created: int) -> None:
        self._chat = asked.request.url == CHAT_URL
        self._include_usage = asked.include_usage
        self._begun: set[int] = set()
        kind = "chatcmpl" if self._chat else "cmpl"
        self._head = {
            "id": f"{kind}-{asked.request.id.removeprefix('http-')}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": asked.model,
        }

    def of(self, event: LaneEvent) -> list[bytes]:
        """What the event adds; behind the last event the mark of the end."""
        if isinstance(event, TokensEvent):
            return list(self._tokens(event))
        if isinstance(event, EndEvent):
            return [*self._end(event.response), DONE]
        if isinstance(event, ErrorEvent):
            return failure(error_of(event))
        return []

    def _tokens(self, event: TokensEvent) -> Iterator[bytes]:
        if not self._chat:
            if event.text:
                yield self._chunk(event.choice, {"text": event.text})
            return
        yield from self._role(event.choice)
        calls = getattr(event, "tool_calls", None)
        if event.text or event.logprobs is not None or calls:
            delta: dict[str, Any] = {"content": event.text} if event.text or not calls else {}
            if calls:
                delta["tool_calls"] = calls
            yield self._chunk(event.choice, {"delta": delta}, event.logprobs)

    def _end(self, response: Mapping[str, Any]) -> Iterator[bytes]:
        for choice in response["choices"]:
            index, reason = choice["index"], choice["finish_reason"]
            if self._chat:
                yield from self._role(index)
                yield self._chunk(index, {"delta": {}}, None, reason)
            else:
                yield self._chunk(index, {"text": ""}, choice.get("logprobs"), reason)
        if self._include_usage:
            yield orjson.dumps(self._head | {"choices": [], "usage": response["usage"]})

    def _role(self, index: int) -> Iterator[bytes]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def _chunk(
        self, index: int, what: Mapping[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": index, **what, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return orjson.dumps(self._head | {"choices": [choice]} | usage)


def error_of(event: ErrorEvent) -> ApiError:
    """Why there is no (more of an) answer, as HTTP would say it."""
    headers = {"Retry-After": "5"} if event.status in (429, 503) else {}
    if event.status == 408:  # OpenAI's clients would ask again, and have it computed again for as long
        headers = {"x-should-retry": "false"}
    return ApiError(event.status, event.code, event.message, param=event.param, headers=headers)


def failure(error: ApiError) -> list[bytes]:
    """The end of a stream that can't go on."""
    return [orjson.dumps(error.body()), DONE]
