"""The response of /v1/responses, from a complete chat response. The events of a stream use the same items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from schemas.requests.bodies import ChatBody
from schemas.requests.structured import NamedTool

PREFIX: Final = "resp_"
_CHAT_PREFIX: Final = "chatcmpl-"
INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why a response is incomplete, by the chat's finish reason."""

Json = dict[str, Any]


def to_response(chat: Mapping[str, Any], body: ChatBody) -> Json:
    """The response of a complete chat response with one choice."""
    name = PREFIX + chat["id"].removeprefix(_CHAT_PREFIX)
    choice = chat["choices"][0]
    output = output_items(name, choice)
    return response_object(name, chat["created"], body, output, choice["finish_reason"], chat["usage"])


def response_object(
    name: str,
    created: int,
    body: ChatBody,
    output: Sequence[Json] = (),
    finish_reason: str | None = None,
    usage: Mapping[str, Any] | None = None,
) -> Json:
    """A response object.

    Args:
        name: its id.  created: seconds since 1970.  body: the request.
        finish_reason: the chat's; None: the response is in progress.
        usage: the chat's; None: not known yet.
    """
    reason = INCOMPLETE.get(finish_reason or "")
    status = "in_progress" if finish_reason is None else "completed" if reason is None else "incomplete"
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None if reason is None else {"reason": reason},
        "max_output_tokens": body.output_limit,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": list(output),
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning_effort, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": _format(body)},
        "tool_choice": _tool_choice(body),
        "tools": [_tool(tool.function.model_dump()) for tool in body.tools],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None if usage is None else _usage(usage),
        "user": body.user,
    }


def output_items(name: str, choice: Mapping[str, Any]) -> list[Json]:
    """The items of a choice: reasoning, text, function calls. `name`: the response's id."""
    message, finish_reason = choice["message"], choice["finish_reason"]
    items: list[Json] = []
    if message.get("reasoning_content"):
        items.append(reasoning_item(name, message["reasoning_content"]))
    calls = message.get("tool_calls") or ()
    if message["content"] or (message["content"] is not None and not calls and not items):
        logprobs = (choice.get("logprobs") or {}).get("content")
        items.append(message_item(name, message["content"], logprobs))
    items += [call_item(call["id"], **call["function"]) for call in calls]
    if items and finish_reason in INCOMPLETE:
        items[-1]["status"] = "incomplete"
    return items


def reasoning_item(name: str, text: str | None, status: str = "completed") -> Json:
    """A reasoning item of the response `name`; text None: it has no content yet."""
    content = [] if text is None else [reasoning_part(text)]
    return {
        "id": f"rs_{name.removeprefix(PREFIX)}",
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": content,
    }


def message_item(
    name: str, text: str | None, logprobs: Sequence[Json] | None = None, status: str = "completed"
) -> Json:
    """The text item of the response `name`; text None: it has no content yet."""
    content = [] if text is None else [text_part(text, logprobs)]
    return {
        "id": f"msg_{name.removeprefix(PREFIX)}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def call_item(call_id: str, name: str, arguments: str, status: str = "completed") -> Json:
    """A function call. `call_id`: its id in chats."""
    return {
        "id": f"fc_{call_id.removeprefix('call_')}",
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def text_part(text: str, logprobs: Sequence[Json] | None = None) -> Json:
    """The content of a text item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs or ())}


def reasoning_part(text: str) -> Json:
    """The content of a reasoning item."""
    return {"type": "reasoning_text", "text": text}


def _usage(chat: Mapping[str, Any]) -> Json:
    """The chat's usage under the names of the Responses API, with tokenmill's own fields."""
    own = {name: value for name, value in chat.items() if name.startswith("tokenmill_")}
    cached = (chat.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    reasoning = (chat.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},  # nothing is charged for writing
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": chat["total_tokens"],
        **own,
    }


def _format(body: ChatBody) -> Json:
    chosen = body.response_format
    if chosen is None:
        return {"type": "text"}
    return {"type": chosen.type, **(chosen.json_schema or {})}


def _tool(function: Mapping[str, Any]) -> Json:
    return {"type": "function", **function}


def _tool_choice(body: ChatBody) -> str | Json:
    if isinstance(body.tool_choice, NamedTool):
        return {"type": "function", "name": body.tool_choice.function.name}
    return body.tool_choice or "auto"
