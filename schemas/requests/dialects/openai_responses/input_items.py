"""Input items of the Responses API, as the messages of a chat.

An assistant's reasoning, text and function calls are items of their own there, and one message in a chat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic.json_schema import JsonSchemaValue

from schemas.requests.bodies import ChatMessage, unsupported
from schemas.requests.fields import NAME, NULL, TEXT, one_of, record
from schemas.requests.structured import NAME as NAME_PATTERN
from schemas.requests.structured import CalledFunction, ToolCall, invalid

ROLES: Final = ("user", "assistant", "system", "developer")
TEXT_TYPES: Final = ("input_text", "output_text")
MAX_ID_CHARS: Final = 256

Content = str | list[dict[str, str]]

_NOTES: Final[Mapping[str, tuple[str, ...]]] = {
    # Fields that items of a response have, besides what they hold; they don't change a prompt.
    "message": ("id", "status", "phase"),
    "reasoning": ("id", "status", "summary", "encrypted_content"),
    "function_call": ("id", "status"),
    "function_call_output": ("id", "status", "name"),
    "part": ("annotations", "logprobs"),
}
_NOTHING: Final = one_of({"type": "array", "maxItems": 0}, NULL)


def read_input(value: Any) -> Any:
    """The messages of `input`: a string, or a list of items."""
    if isinstance(value, str):
        return (ChatMessage(role="user", content=_not_empty(value, "input")),)
    if isinstance(value, tuple) and value and all(isinstance(one, ChatMessage) for one in value):
        return value
    if not isinstance(value, list):
        raise invalid("must be a string or a list of items")
    if not value:
        raise invalid("is empty; give at least one item")
    conversation = _Conversation()
    for at, item in enumerate(value):
        _read_item(item, f"input[{at}]", conversation)
    return conversation.finish()


@dataclass(slots=True)
class _Conversation:
    """The messages so far, and the parts of the assistant's message that may go on with the next item."""

    messages: list[ChatMessage] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    reasoning: str | None = None
    content: Content | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, **message: Any) -> None:
        self._close()
        self.messages.append(ChatMessage.model_validate(message))

    def add_reasoning(self, text: str) -> None:
        if self.reasoning is not None or self.content is not None or self.calls:
            self._close()
        self.reasoning = text

    def add_content(self, content: Content) -> None:
        if self.content is not None or self.calls:
            self._close()
        self.content = content

    def add_call(self, call: ToolCall) -> None:
        self.calls.append(call)
        self.made.add(call.id)

    def finish(self) -> tuple[ChatMessage, ...]:
        self._close()
        return tuple(self.messages)

    def _close(self) -> None:
        if self.reasoning is None and self.content is None and not self.calls:
            return
        content = "" if self.content is None and not self.calls else self.content
        message = {"role": "assistant", "content": content, "reasoning_content": self.reasoning}
        self.messages.append(ChatMessage.model_validate(message | {"tool_calls": tuple(self.calls)}))
        self.reasoning, self.content, self.calls = None, None, []


def _read_item(item: Any, where: str, conversation: _Conversation) -> None:
    if not isinstance(item, dict):
        raise invalid("must be an object", where)
    match item.get("type", "message" if "role" in item else None):
        case "message":
            _read_message(item, where, conversation)
        case "reasoning":
            _read_reasoning(item, where, conversation)
        case "function_call":
            conversation.add_call(_read_call(item, where))
        case "function_call_output":
            _read_output(item, where, conversation)
        case None:
            raise invalid("is missing; add it", f"{where}.type")
        case "item_reference":
            raise unsupported("is 'item_reference', but no items are stored here; send the item", f"{where}.type")
        case str() as kind:
            known = "message, reasoning, function_call and function_call_output"
            raise unsupported(f"is {kind[:40]!r}, but only {known} are supported; remove the item", f"{where}.type")
        case _:
            raise invalid("must be a string", f"{where}.type")


def _read_message(item: dict[str, Any], where: str, conversation: _Conversation) -> None:
    _check_fields(item, where, "message", ("type", "role", "content"))
    role = item.get("role")
    if role not in ROLES:
        raise invalid(f"must be one of {', '.join(ROLES)}", f"{where}.role")
    content = _read_content(item, "content", where)
    if role == "assistant":
        conversation.add_content(content)
    else:
        conversation.add(role=role, content=content)


def _read_reasoning(item: dict[str, Any], where: str, conversation: _Conversation) -> None:
    _check_fields(item, where, "reasoning", ("type", "content"))
    if item.get("encrypted_content") is not None:
        message = "is not supported: reasoning is text here; give it as content, or remove the item"
        raise unsupported(message, f"{where}.encrypted_content")
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise invalid("must be a list", f"{where}.content")
    texts = []
    for at, part in enumerate(parts):
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "reasoning_text":
            raise invalid('must be {"type": "reasoning_text", "text": …}', f"{where}.content[{at}]")
        texts.append(_text(part, "text", f"{where}.content[{at}]"))
    if not texts and item.get("summary"):
        raise unsupported("is given without content; give the content, or remove the item", f"{where}.summary")
    if texts:
        conversation.add_reasoning("\n".join(texts))


def _read_call(item: dict[str, Any], where: str) -> ToolCall:
    _check_fields(item, where, "function_call", ("type", "call_id", "name", "arguments"))
    name = _text(item, "name", where)
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise invalid("must have 1 to 64 letters, digits, _ or -", f"{where}.name")
    function = CalledFunction(name=name, arguments=_text(item, "arguments", where))
    return ToolCall(id=_call_id(item, where), type="function", function=function)


def _read_output(item: dict[str, Any], where: str, conversation: _Conversation) -> None:
    _check_fields(item, where, "function_call_output", ("type", "call_id", "output"))
    call_id = _call_id(item, where)
    if call_id not in conversation.made:
        raise invalid(f"is {call_id[:40]!r}, which no function_call before it has", f"{where}.call_id")
    conversation.add(role="tool", content=_read_content(item, "output", where), tool_call_id=call_id)


def _read_content(item: dict[str, Any], name: str, where: str) -> Content:
    """A string, or the text parts of a chat's message."""
    where, content = f"{where}.{name}", item.get(name)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid("must be a string or a list of text parts", where)
    if not content:
        raise invalid("is an empty list; give at least one text part", where)
    parts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in TEXT_TYPES:
            message = f"is {kind[:40]!r}, but only {' and '.join(TEXT_TYPES)} are supported; remove the part"
            raise unsupported(message, f"{where}[{at}].type")
        if not isinstance(part, dict) or kind is None:
            raise invalid('must be an object such as {"type": "input_text", "text": …}', f"{where}[{at}]")
        _check_fields(part, f"{where}[{at}]", "part", ("type", "text"))
        parts.append({"type": "text", "text": _text(part, "text", f"{where}[{at}]")})
    return parts


def _call_id(item: dict[str, Any], where: str) -> str:
    found = _text(item, "call_id", where)
    if not 0 < len(found) <= MAX_ID_CHARS:
        raise invalid(f"must have 1 to {MAX_ID_CHARS} characters", f"{where}.call_id")
    return found


def _text(item: dict[str, Any], name: str, where: str) -> str:
    if name not in item:
        raise invalid("is missing; add it", f"{where}.{name}")
    if not isinstance(item[name], str):
        raise invalid("must be a string", f"{where}.{name}")
    found: str = item[name]
    return found


def _not_empty(text: str, name: str) -> str:
    if not text:
        raise invalid("is empty; give some text", name)
    return text


def _check_fields(item: dict[str, Any], where: str, kind: str, known: tuple[str, ...]) -> None:
    """Refuse unknown fields."""
    for name, value in item.items():
        if name not in known and name not in _NOTES[kind] and value is not None:
            raise unsupported("is not known here; remove it", f"{where}.{name[:80]}")


def _item_schema(kind: str, required: tuple[str, ...], **fields: JsonSchemaValue) -> JsonSchemaValue:
    """An object of this kind. Fields that don't change a prompt may have any value; unknown ones must be null."""
    notes: dict[str, JsonSchemaValue] = {name: {} for name in _NOTES[kind]}
    return {"type": "object", "properties": notes | fields, "required": list(required), "additionalProperties": NULL}


_STRING: Final[JsonSchemaValue] = {"type": "string"}
_CALL_ID: Final[JsonSchemaValue] = {"type": "string", "minLength": 1, "maxLength": MAX_ID_CHARS}
_PARTS: Final[JsonSchemaValue] = {
    "type": "array",
    "items": _item_schema("part", ("type", "text"), type={"enum": list(TEXT_TYPES)}, text=_STRING),
    "minItems": 1,
}
_REASONING_PARTS: Final[JsonSchemaValue] = {
    "type": "array",
    "items": record(("type", "text"), type={"const": "reasoning_text"}, text=_STRING),
}
ITEM: Final = one_of(
    _item_schema(
        "message",
        ("role", "content"),
        type={"const": "message"},
        role={"enum": list(ROLES)},
        content=one_of(_STRING, _PARTS),
    ),
    _item_schema(
        "reasoning",
        ("type",),
        type={"const": "reasoning"},
        content=one_of(_REASONING_PARTS, NULL),
        encrypted_content=NULL,
    ),
    _item_schema(
        "function_call",
        ("type", "call_id", "name", "arguments"),
        type={"const": "function_call"},
        call_id=_CALL_ID,
        name=NAME,
        arguments=_STRING,
    ),
    _item_schema(
        "function_call_output",
        ("type", "call_id", "output"),
        type={"const": "function_call_output"},
        call_id=_CALL_ID,
        output=one_of(_STRING, _PARTS),
    ),
)
INPUT: Final = one_of(TEXT, {"type": "array", "items": ITEM, "minItems": 1})
