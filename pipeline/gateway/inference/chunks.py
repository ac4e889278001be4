"""Conversion of a response's events into those of its stream: the chunks of OpenAI's chat and completion streams, each
a JSON document.

In chat streams each choice begins with its role, followed by text, tool calls and log-probabilities as they arrive, and
then its finish reason. With `include_usage` the last chunk holds the usage of all choices. In completion streams the
log-probabilities come with the end of their choice. With `return_token_ids` each chunk has the ids of its tokens, and
the first one of the prompt's (of a completion: the first one of each choice), as with vLLM. The chunks of the end have
the verdicts of content policies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import orjson

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.inference.request_builder import InferenceRequest
from pipeline.gateway.inference.stream_buffer import ServerEvent
from schemas.requests.bodies import REASONING_NAMES
from schemas.requests.parsing import CHAT_URL
from schemas.requests.policy_report import extension_of
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, TokensEvent

DONE: Final = b"[DONE]"


class EventConverter(Protocol):
    """Converts the events of one response into those of its stream, for the format of the request's url."""

    def convert(self, event: LaneEvent) -> list[ServerEvent]:
        """The stream's events for an event of the response."""
        ...

    def fail(self, error: ApiError) -> list[ServerEvent]:
        """The last events of a stream that fails."""
        ...


class Chunks:
    """Converts the events of one response into chunks.

    Args:
        created: the time of the request; seconds since 1970.
    """

    def __init__(self, inference: InferenceRequest, created: int) -> None:
        self._chat = inference.request.url == CHAT_URL
        self._include_usage = inference.include_usage
        self._begun: set[int] = set()
        self._returns_ids = bool(inference.request.body.get("return_token_ids"))
        self._n = int(inference.request.body.get("n") or 1)
        self._prompt_ids: dict[int, Sequence[int] | None] = {}  # by the prompt's number
        self._has_prompt_ids: set[int] = set()  # choices; chats have them once
        self._num_ids: Counter[int] = Counter()
        kind = "chatcmpl" if self._chat else "cmpl"
        self._head = {
            "id": f"{kind}-{inference.request.id.removeprefix('http-')}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": inference.model,
            **inference.added_fields,
        }

    def convert(self, event: LaneEvent) -> list[ServerEvent]:
        """The chunks of an event; after those of the last event `[DONE]` follows."""
        if isinstance(event, TokensEvent):
            return [ServerEvent(data) for data in self._tokens(event)]
        if isinstance(event, EndEvent):
            return [ServerEvent(data) for data in (*self._end(event.response), DONE)]
        if isinstance(event, ErrorEvent):
            return self.fail(lane_error(event))
        return []

    def fail(self, error: ApiError) -> list[ServerEvent]:
        """The error and `[DONE]`."""
        return [ServerEvent(orjson.dumps(error.body())), ServerEvent(DONE)]

    def _tokens(self, event: TokensEvent) -> Iterator[bytes]:
        if event.prompt_token_ids is not None:
            self._prompt_ids[event.choice // self._n] = event.prompt_token_ids
        if not self._chat:
            if event.text or self._returns_ids:
                yield self._chunk(event.choice, {"text": event.text}, token_ids=event.tokens)
            return
        yield from self._role(event.choice)
        calls = event.tool_calls
        if event.text or event.logprobs is not None or calls or event.reasoning or self._returns_ids:
            delta: dict[str, Any] = {"content": event.text} if event.text or not (calls or event.reasoning) else {}
            if event.reasoning:
                delta |= dict.fromkeys(REASONING_NAMES, event.reasoning)
            if calls:
                delta["tool_calls"] = calls
            yield self._chunk(event.choice, {"delta": delta}, event.logprobs, token_ids=event.tokens)

    def _end(self, response: Mapping[str, Any]) -> Iterator[bytes]:
        self._head |= extension_of(response)
        for choice in response["choices"]:
            index, reason = choice["index"], choice["finish_reason"]
            self._prompt_ids[index // self._n] = response.get("prompt_token_ids", choice.get("prompt_token_ids"))
            rest = (choice.get("token_ids") or [])[self._num_ids[index] :]
            if self._chat:
                yield from self._role(index)
                yield self._chunk(index, {"delta": {}}, None, reason, rest)
            else:
                yield self._chunk(index, {"text": ""}, choice.get("logprobs"), reason, rest)
        if self._include_usage:
            yield orjson.dumps(self._head | {"choices": [], "usage": response["usage"]})

    def _role(self, index: int) -> Iterator[bytes]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def _chunk(
        self,
        index: int,
        what: Mapping[str, Any],
        logprobs: Any = None,
        finish_reason: str | None = None,
        token_ids: Sequence[int] = (),
    ) -> bytes:
        choice = {"index": index, **what, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk: dict[str, Any] = self._head | {"choices": [choice]}
        if self._returns_ids:
            choice["token_ids"] = token_ids
            self._num_ids[index] += len(token_ids)
            if (owner := 0 if self._chat else index) not in self._has_prompt_ids:
                self._has_prompt_ids.add(owner)
                (chunk if self._chat else choice)["prompt_token_ids"] = self._prompt_ids.get(index // self._n)
        return orjson.dumps(chunk | ({"usage": None} if self._include_usage else {}))


def lane_error(event: ErrorEvent) -> ApiError:
    """Convert a worker's error event into an API error."""
    headers = {"Retry-After": "5"} if event.status in (429, 503) else {}
    if event.status == 408:  # OpenAI's clients would retry, and the computation would take as long again
        headers = {"x-should-retry": "false"}
    return ApiError(event.status, event.code, event.message, param=event.param, headers=headers)
