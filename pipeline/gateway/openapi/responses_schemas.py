"""Schemas of /v1/responses for the OpenAPI document: the response, its items, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pipeline.gateway.openapi.completion_schemas import JudgedResponse, ServiceTier, TokenLogprob
from schemas.jobs.batch import CachedTokens, ReasoningTokens, ResponseModel, UnixTime
from schemas.requests.bodies import Effort
from schemas.requests.dialects.openai_responses.body import FunctionTool
from schemas.stored import Count

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseModel):
    """The text of a message. `logprobs`: of its tokens, when `include` asks for them."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[TokenLogprob]


class OutputMessage(ResponseModel):
    """The assistant's text. It has no content when it is added to a stream."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(ResponseModel):
    """A text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(ResponseModel):
    """The model's reasoning before its answer, for models that reason. There is never a summary."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any] = Field(max_length=0)
    content: list[ReasoningText]


class FunctionCallItem(ResponseModel):
    """A call of a function. `call_id`: for the item with its output. `arguments`: JSON as text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(CachedTokens):
    """Prompt tokens that were read from the prefix cache. None are charged for being written to it."""

    cache_write_tokens: Literal[0]


class ResponseUsage(ResponseModel):
    """Token usage of a response. `tokenmill_cached`: the response comes from the answer store."""

    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: ReasoningTokens
    total_tokens: Count
    tokenmill_cached: Literal[True] = True


class IncompleteDetails(ResponseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


class FailedResponseError(ResponseModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class TextFormat(ResponseModel):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseTextSettings(ResponseModel):
    """The request's `text`."""

    format: TextFormat


class ResponseReasoningSettings(ResponseModel):
    """The request's `reasoning`."""

    effort: Effort | None
    summary: None


class ChosenFunction(ResponseModel):
    """A `tool_choice` that names the function."""

    type: Literal["function"]
    name: str


class ResponseObject(JudgedResponse):
    """A response. It isn't stored; `instructions` aren't repeated."""

    id: str
    object: Literal["response"]
    created_at: UnixTime
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    background: Literal[False]
    error: FailedResponseError | None
    incomplete_details: IncompleteDetails | None
    max_output_tokens: Count | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ResponseReasoningSettings
    service_tier: ServiceTier = "priority"
    store: Literal[False]
    temperature: float
    text: ResponseTextSettings
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction
    tools: list[FunctionTool]
    top_logprobs: Count
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class _StreamEvent(ResponseModel):
    """The fields that all events of a stream have; `sequence_number`: from 0."""

    sequence_number: Count


class ResponseStateEvent(_StreamEvent):
    """The response begins, or ends; the last event of a stream has the whole response."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseObject


class OutputItemEvent(_StreamEvent):
    """An item of the output begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: Count
    item: OutputItem


class _ItemPartEvent(_StreamEvent):
    item_id: str
    output_index: Count


class ContentPartEvent(_ItemPartEvent):
    """An item's content begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: Count
    part: OutputText | ReasoningText


class OutputTextDeltaEvent(_ItemPartEvent):
    """More text of a message."""

    type: Literal["response.output_text.delta"]
    content_index: Count
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDoneEvent(_ItemPartEvent):
    """The whole text of a message."""

    type: Literal["response.output_text.done"]
    content_index: Count
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDeltaEvent(_ItemPartEvent):
    """More text of the reasoning."""

    type: Literal["response.reasoning_text.delta"]
    content_index: Count
    delta: str


class ReasoningTextDoneEvent(_ItemPartEvent):
    """The whole text of the reasoning."""

    type: Literal["response.reasoning_text.done"]
    content_index: Count
    text: str


class ArgumentsDeltaEvent(_ItemPartEvent):
    """More of a function call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_ItemPartEvent):
    """The whole arguments of a function call."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class StreamErrorEvent(_StreamEvent):
    """The response failed; `response.failed` follows. `error`: the same, as in an error response."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None
    error: dict[str, Any]


RESPONSE_EVENTS = (
    ResponseStateEvent,
    OutputItemEvent,
    ContentPartEvent,
    OutputTextDeltaEvent,
    OutputTextDoneEvent,
    ReasoningTextDeltaEvent,
    ReasoningTextDoneEvent,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    StreamErrorEvent,
)
"""The events of a stream."""
