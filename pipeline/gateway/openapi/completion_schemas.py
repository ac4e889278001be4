"""What requests to a model are answered with, as the OpenAPI document describes it; see `shapes`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.gateway.openapi.schemas import Amount, CachedTokens, Moment, ResponseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class CompletionUsage(ResponseModel):
    """Tokens of a request. `tokenmill_cached`: the answer was kept, and none were computed."""

    prompt_tokens: Amount
    completion_tokens: Amount
    total_tokens: Amount
    prompt_tokens_details: CachedTokens
    tokenmill_cached: Literal[True] = True


class MadeFunctionCall(ResponseModel):
    """What is called. `arguments`: JSON as text."""

    name: str
    arguments: str


class MadeToolCall(ResponseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: MadeFunctionCall


class AnswerMessage(ResponseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[MadeToolCall] = Field(default_factory=list)


class TopLogprob(ResponseModel):
    """A token that might have been. `bytes`: of it, since it need not be text."""

    token: str
    logprob: float
    bytes: list[Amount]


class TokenLogprob(TopLogprob):
    """A token of the answer, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """Of a choice's tokens."""

    content: list[TokenLogprob]
    refusal: None


class ChatChoice(ResponseModel):
    """One of `n` answers."""

    index: Amount
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(ResponseModel):
    """The whole answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: Moment
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class FunctionDelta(ResponseModel):
    """The next piece of a call."""

    name: str = ""
    arguments: str


class ToolCallDelta(ResponseModel):
    """A piece of the call number `index`; the first has its id and name."""

    index: Amount
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(ResponseModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)


class ChunkChoice(ResponseModel):
    """What a chunk adds to one of `n` answers."""

    index: Amount
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(ResponseModel):
    """An event of a stream. With `include_usage` the last has the usage, and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Moment
    model: str
    choices: list[ChunkChoice]
    usage: CompletionUsage | None = None


class CompletionLogprobs(ResponseModel):
    """Of a text's tokens; the first of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Amount]


class TextChoice(ResponseModel):
    """One of `n` texts, or what a chunk adds to it."""

    index: Amount
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class TextCompletion(ResponseModel):
    """How a text goes on: whole, or as an event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: Moment
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage | None = None


class Embedding(ResponseModel):
    """The vector of an input: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: Amount
    embedding: list[float] | str


class EmbeddingUsage(ResponseModel):
    """Tokens of all inputs. `tokenmill_cached`: the vectors were kept, and none were computed."""

    prompt_tokens: Amount
    total_tokens: Amount
    tokenmill_cached: Literal[True] = True


class Embeddings(ResponseModel):
    """The vectors of all inputs, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
