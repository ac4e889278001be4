"""Anthropic's Messages API (`POST /v1/messages`) as a dialect of chat.

A user's `tool_result` blocks become messages of the role `tool`, an assistant's `thinking` blocks become its
`reasoning_content`, and neighbouring turns of one role become one message, as Anthropic says. A conversation that ends
with the assistant is continued.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, Final, NamedTuple

import orjson
from pydantic import Field, Strict, model_validator

from schemas.requests.bodies import INT32_MAX, ChatBody, Finite
from schemas.requests.breakpoints import MAX_BREAKPOINTS
from schemas.requests.dialects.anthropic.blocks import (
    Block,
    CacheControl,
    ClientTool,
    Metadata,
    OutputConfig,
    TextBlock,
    Thinking,
    ToolChoice,
    ToolResultBlock,
    Turn,
    client_tools,
    text_or_blocks,
)
from schemas.requests.dialects.anthropic.response import message_of
from schemas.requests.dialects.dialect import Dialect, DialectBody
from schemas.requests.fields import defaulting
from schemas.requests.structured import invalid

MESSAGES_URL: Final = "/v1/messages"

COUNTED: Final = (
    "model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control", "speed",
)  # fmt: skip
"""The fields of /v1/messages that /v1/messages/count_tokens has too."""

_TEXT: Final = frozenset({"text"})


class MessagesBody(DialectBody):
    """Body of /v1/messages. `metadata` doesn't change an answer."""

    messages: Annotated[tuple[Turn, ...], Strict(False), Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    system: Annotated[tuple[TextBlock, ...], Strict(False), text_or_blocks(_TEXT), defaulting(())] = ()
    temperature: Annotated[Finite, Field(ge=0, le=1)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    stop_sequences: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False), defaulting(())] = ()
    tools: Annotated[tuple[ClientTool, ...], Strict(False), client_tools(), defaulting(())] = ()
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _check(self) -> MessagesBody:
        made: set[str] = set()
        for at, message in enumerate(self.messages):
            message.check(f"messages[{at}]")
            for block in message.content:
                if block.type == "tool_use":
                    made.add(block.id)
                elif block.type == "tool_result" and block.tool_use_id not in made:
                    name = block.tool_use_id[:40]
                    raise invalid(f"has a tool_result of {name!r}, which no tool_use before it is", f"messages[{at}]")
        last = self.messages[-1]
        if last.role == "assistant" and last.content and last.content[-1].type == "tool_use":
            where = f"messages[{len(self.messages) - 1}]"
            raise invalid("ends with a tool_use; add a message of the user with its tool_result", where)
        self._check_continued()
        count = sum(1 for _ in self._breakpoints())
        if count > MAX_BREAKPOINTS:
            raise invalid(f"is set {count} times, but at most {MAX_BREAKPOINTS} are possible", "cache_control")
        self._check_thinking()
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") is (choice.name is None):
            text = "is missing; name the tool" if choice.name is None else "goes with the type tool only; remove it"
            raise invalid(text, "tool_choice.name")
        return self

    def _check_continued(self) -> None:
        """Refuse assistant's messages at the end that have no text to go on with."""
        last = list(takewhile(lambda message: message.role == "assistant", reversed(self.messages)))
        if last and not any(block.type == "text" and block.text for message in last for block in message.content):
            where = f"messages[{len(self.messages) - 1}].content"
            raise invalid("needs text, which the answer goes on with; write some, or remove the message", where)

    def _check_thinking(self) -> None:
        thinking = self.thinking
        if thinking is None:
            return
        budget = thinking.budget_tokens
        if (thinking.type == "enabled") is (budget is None):
            text = "is missing; add it" if budget is None else "goes with the type enabled only; remove it"
            raise invalid(text, "thinking.budget_tokens")
        if budget is not None and budget >= self.max_tokens:
            text = f"is {budget}, but must be less than max_tokens, which is {self.max_tokens}"
            raise invalid(text, "thinking.budget_tokens")

    def _breakpoints(self) -> Iterator[CacheControl]:
        marked: list[ClientTool | Block | MessagesBody] = [self, *self.tools, *self.system]
        for message in self.messages:
            for block in message.content:
                marked += [*block.content, block] if block.type == "tool_result" else [block]
        for one in marked:
            if (mark := getattr(one, "cache_control", None)) is not None:
                yield mark

    def to_chat(self) -> ChatBody:
        messages, marks = self._conversation()
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "cache_breakpoints": marks,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": list(self.stop_sequences),
            "user": None if self.metadata is None else self.metadata.user_id,
            **self._tool_fields(),
            **self._reasoning_fields(),
        }
        if self.output_config is not None and self.output_config.format is not None:
            form = {"name": "answer", "schema": self.output_config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        if self.messages[-1].role == "assistant":
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})

    def _conversation(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The chat's messages, and its `cache_breakpoints`."""
        made: list[dict[str, Any]] = []
        marks: list[_Mark] = []
        if self.system:
            marks += _add(made, {"role": "system"}, self.system)
        for message in self.messages:
            texts = [block for block in message.content if block.type == "text"]
            if message.role == "assistant":
                marks += _add(made, _assistant(message.content), texts)
                called = [block for block in message.content if block.type == "tool_use"]
                marks += [_Mark(len(made), 0, block.cache_control) for block in called]
                continue
            for block in message.content:
                if block.type == "tool_result":
                    made.append(_result(block))
                    marks += _part_marks(len(made) - 1, 0, block.content)
                    marks.append(_Mark(len(made), 0, block.cache_control))
            if texts or not message.content:
                marks += _add(made, {"role": message.role}, texts)
        # Most templates write tools behind the system's text, or into the first user's message.
        behind_tools = int(made[0]["role"] == "system")
        marks += [_Mark(behind_tools, 0, tool.cache_control) for tool in self.tools]
        marks.append(_Mark(len(made), 0, self.cache_control))
        return [_with_content(message) for message in made], _breakpoints(marks, made)

    def _tool_fields(self) -> dict[str, Any]:
        offered = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in self.tools
        ]
        choice = self.tool_choice
        if choice is None:
            return {"tools": offered}
        words: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        named = {"type": "function", "function": {"name": choice.name}}
        chosen = {"tools": offered, "tool_choice": words.get(choice.type, named)}
        return chosen | ({"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {})

    def _reasoning_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.thinking is not None:
            fields["enable_thinking"] = self.thinking.type != "disabled"
            fields["thinking_token_budget"] = self.thinking.budget_tokens
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
        return fields


def _texts(given: Sequence[TextBlock]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": block.text} for block in given]


class _Mark(NamedTuple):
    """The end of a prefix: whole messages, and text parts of the next one."""

    messages: int
    parts: int
    control: CacheControl | None


def _part_marks(message: int, parts: int, texts: Sequence[TextBlock]) -> list[_Mark]:
    """The marks of text blocks behind the message's first `parts` ones."""
    return [_Mark(message, parts + at, block.cache_control) for at, block in enumerate(texts, 1)]


def _breakpoints(marks: Sequence[_Mark], made: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat's `cache_breakpoints`, each prefix once. A mark on a message's last part is one behind the message."""
    seconds: dict[tuple[int, int], int] = {}
    for messages, parts, control in marks:
        if control is not None:
            is_last = parts and parts == len(made[messages]["content"]) and not made[messages].get("tool_calls")
            prefix = (messages + 1, 0) if is_last else (messages, parts)
            seconds[prefix] = max(control.ttl_seconds, seconds.get(prefix, 0))
    return [{"messages": prefix[0], "parts": prefix[1], "ttl": ttl} for prefix, ttl in sorted(seconds.items())]


def _add(made: list[dict[str, Any]], message: dict[str, Any], texts: Sequence[TextBlock]) -> list[_Mark]:
    """Append a message, or add it to the last one if that has the same role; returns the marks of its texts."""
    before = made[-1] if made and made[-1]["role"] == message["role"] else None
    if before is None:
        made.append({**message, "content": _texts(texts)})
        return _part_marks(len(made) - 1, 0, texts)
    marks = _part_marks(len(made) - 1, len(before["content"]), texts)
    before["content"] += _texts(texts)
    for name in ("tool_calls", "reasoning_content"):
        if name in message:
            before.setdefault(name, []).extend(message[name])
    return marks


def _assistant(content: Sequence[Block]) -> dict[str, Any]:
    """An assistant's message without its text; its `reasoning_content` is a list of thoughts."""
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": orjson.dumps(block.input).decode()},
        }
        for block in content
        if block.type == "tool_use"
    ]
    thoughts = [block.thinking for block in content if block.type == "thinking"]
    message: dict[str, Any] = {"role": "assistant"}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = thoughts
    return message


def _result(block: ToolResultBlock) -> dict[str, Any]:
    """The message of a tool's result. Chat templates have no word for a failure, so the text says it."""
    parts = _texts(block.content)
    if block.is_error:
        first = parts[0]["text"] if parts else ""
        parts = [{"type": "text", "text": f"Error: {first}"}, *parts[1:]]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": parts}


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text parts as a chat's content: one part is a string. Its thoughts become one text."""
    parts = message["content"]
    content: Any = parts
    if len(parts) < 2:
        content = parts[0]["text"] if parts else (None if message.get("tool_calls") else "")
    if (thoughts := message.get("reasoning_content")) is not None:
        message = {**message, "reasoning_content": "\n".join(filter(None, thoughts))}
    return {**message, "content": content}


_NO_CHANGE: Final[Mapping[str, tuple[Any, ...]]] = {
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "stream": (False,),
    "stream_options": (),
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_format": (),
}
_HINTS: Final[Mapping[str, str]] = {
    "stream": "a batch has no stream; remove it",
    "stream_options": "a stream always ends with its usage; remove it",
    "service_tier": "use auto or standard_only; the tier of a batch is set with it",
    "container": "no tools run on this server; remove it",
    "mcp_servers": "no tools run on this server; offer tools of your own",
    "context_management": "send the messages that count",
    "output_format": "use output_config.format",
}
_NAMES: Final[Mapping[str, str]] = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    ".function.parameters": ".input_schema",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
}

ANTHROPIC: Final = Dialect(MessagesBody, message_of, _NO_CHANGE, _HINTS, _NAMES)
