"""Chat responses as messages of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from schemas.requests.bodies import ChatBody

_REASONS: Final[Mapping[str, str]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def message_of(response: Mapping[str, Any], _: ChatBody) -> dict[str, Any]:
    """The message of a complete chat response."""
    choice = response["choices"][0]
    return {
        **message_head(message_id(response["id"]), response["model"]),
        "content": content_of(choice["message"]),
        **stop_of(choice),
        "usage": usage_of(response["usage"]),
    }


def message_head(name: str, model: str) -> dict[str, Any]:
    """The fields of a message that are known before its content."""
    return {"id": name, "type": "message", "role": "assistant", "model": model}


def message_id(chat_id: str) -> str:
    """The id of the message that is made of a chat's response."""
    return f"msg_{chat_id.removeprefix('chatcmpl-')}"


def content_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The content blocks of an assistant's message."""
    content: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message.get("content"):
        content.append({"type": "text", "text": message["content"]})
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    return content + [tool_use(name, called["name"], arguments(called["arguments"])) for name, called in calls]


def tool_use(call_id: str, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """A tool call as a block."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def arguments(text: str) -> dict[str, Any]:
    """A call's arguments. An answer that its last token cut off has none that can be read."""
    try:
        read = orjson.loads(text)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def stop_of(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Why the answer ended: `stop_reason` and `stop_sequence`."""
    stopped_at = choice.get("stop_reason")
    if choice["finish_reason"] == "stop" and isinstance(stopped_at, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_at}
    return {"stop_reason": _REASONS[choice["finish_reason"]], "stop_sequence": None}


def usage_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    """The usage. `input_tokens` are neither read from the cache nor written to it."""
    details = usage["prompt_tokens_details"]
    cached, written = details["cached_tokens"], details.get("cache_write_tokens", 0)
    made = {
        "input_tokens": usage["prompt_tokens"] - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
    output = usage.get("completion_tokens_details")
    if output is not None and output.get("reasoning_tokens") is not None:
        made["output_tokens_details"] = {"thinking_tokens": output["reasoning_tokens"]}
    return made
