"""Response schemas of Anthropic's Messages API for the OpenAPI document; see `build_schemas`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from pipeline.gateway.openapi.completion_schemas import JudgedResponse
from schemas.jobs.batch import ResponseModel
from schemas.stored import Count

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]


class AnthropicText(ResponseModel):
    """A text of the model."""

    type: Literal["text"]
    text: str


class AnthropicThinking(ResponseModel):
    """The model's reasoning. It isn't signed: `signature` is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class AnthropicToolUse(ResponseModel):
    """A tool call of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnthropicBlock = Annotated[AnthropicText | AnthropicThinking | AnthropicToolUse, Field(discriminator="type")]


class ThinkingTokens(ResponseModel):
    """Tokens of the reasoning, which `output_tokens` contain."""

    thinking_tokens: Count


class AnthropicUsage(ResponseModel):
    """Token usage of a request. `input_tokens` were neither read from the cache nor written to it."""

    input_tokens: Count
    cache_creation_input_tokens: Count = 0
    cache_read_input_tokens: Count = 0
    output_tokens: Count
    output_tokens_details: ThinkingTokens = ThinkingTokens(thinking_tokens=0)


class AnthropicMessage(JudgedResponse):
    """A complete message; in `message_start`, one without content."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class MessageStart(ResponseModel):
    """The beginning of a stream."""

    type: Literal["message_start"]
    message: AnthropicMessage


class Ping(ResponseModel):
    """An event without meaning."""

    type: Literal["ping"]


class BlockStart(ResponseModel):
    """The beginning of a block, without its text."""

    type: Literal["content_block_start"]
    index: Count
    content_block: AnthropicBlock


class TextDelta(ResponseModel):
    """More of a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(ResponseModel):
    """More of the reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(ResponseModel):
    """More of a tool call's input, as JSON text."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(ResponseModel):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: Count
    delta: Annotated[TextDelta | ThinkingDelta | InputJsonDelta, Field(discriminator="type")]


class BlockStop(ResponseModel):
    """The end of a block."""

    type: Literal["content_block_stop"]
    index: Count


class MessageEnd(ResponseModel):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(JudgedResponse):
    """The end of a message, and the usage."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: AnthropicUsage


class MessageStop(ResponseModel):
    """The last event."""

    type: Literal["message_stop"]


class AnthropicEvent(
    RootModel[
        Annotated[
            MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop,
            Field(discriminator="type"),
        ]
    ]
):
    """An event of a message's stream."""


class AnthropicErrorCode(ResponseModel):
    """A short, stable name of the reason."""

    error_code: str


class AnthropicErrorDetails(ResponseModel):
    """The details of an error. `message`: what is wrong, and what to do."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "billing_error",
        "permission_error",
        "not_found_error",
        "timeout_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
    ]
    message: str
    details: AnthropicErrorCode


class AnthropicError(ResponseModel):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str | None
