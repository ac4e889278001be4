"""Response schemas of inference requests for the OpenAPI document; see `build_schemas`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.jobs.batch import CachedTokens, ResponseModel, UnixTime
from schemas.requests.policy_report import JudgedSide, PolicyAction
from schemas.stored import Count

ServiceTier = Literal["priority", "default", "flex"]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class PolicyVerdictOfText(ResponseModel):
    """A content policy's verdict on a text that doesn't simply pass. `model`: to which a `route` sent the request.
    `failed`: the policy could not judge the text; absent: it did."""

    policy: str
    rule: str
    action: PolicyAction
    on: JudgedSide
    model: str | None = None
    failed: Literal[True] = True


class GuardUsage(ResponseModel):
    """The tokens of the guard models that judged the texts."""

    prompt_tokens: Count
    completion_tokens: Count


class ContentPolicyReport(ResponseModel):
    """The verdicts of content policies on the request and its answer."""

    verdicts: list[PolicyVerdictOfText]
    usage: GuardUsage


class ResponseExtension(ResponseModel):
    """Extensions of a response."""

    content_policies: ContentPolicyReport


class JudgedResponse(ResponseModel):
    """A response that content policies may have judged. `tokenmill`: absent when all texts simply passed."""

    tokenmill: ResponseExtension | None = None


class PromptTokensDetails(CachedTokens):
    """`truncated_tokens`: that `truncate_prompt_tokens` dropped; absent: none. `cache_write_tokens`: of the prefix that
    `cache_breakpoints` mark, those that were not read from the cache; absent: nothing is marked."""

    cache_write_tokens: Count | None = None
    truncated_tokens: Count | None = None


class CompletionTokens(ResponseModel):
    """Details of an answer's tokens. `reasoning_tokens`: those of the model's thought."""

    reasoning_tokens: Count


class CompletionUsage(ResponseModel):
    """Token usage of a request. `tokenmill_cached`: the response comes from the answer store."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokens | None = None
    tokenmill_cached: Literal[True] = True


class MadeFunctionCall(ResponseModel):
    """The function of a tool call. `arguments`: JSON as text."""

    name: str
    arguments: str


class MadeToolCall(ResponseModel):
    """A tool call of the model."""

    id: str
    type: Literal["function"]
    function: MadeFunctionCall


class AnswerMessage(ResponseModel):
    """The assistant's message. `reasoning`, and the same as `reasoning_content`: the thought of a model that marks its
    thought."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MadeToolCall] = Field(default_factory=list)


class TopLogprob(ResponseModel):
    """A candidate token. `bytes`: its UTF-8 bytes, as a token isn't always valid text."""

    token: str
    logprob: float
    bytes: list[Count]


class TokenLogprob(TopLogprob):
    """A token of the response, and the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """The log-probabilities of a choice's tokens."""

    content: list[TokenLogprob]
    refusal: None


class PromptLogprob(ResponseModel):
    """A token at a position of the prompt. `rank`: from 1; null beyond the likeliest that were asked for."""

    logprob: float
    rank: Count | None
    decoded_token: str


class ChatChoice(ResponseModel):
    """One of `n` choices. `stop_reason`: the stop string that ended it. `token_ids`: with `return_token_ids`, the end
    token included."""

    index: Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | None = None
    token_ids: list[Count] | None = None


class ChatCompletion(JudgedResponse):
    """A complete chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: UnixTime
    model: str
    choices: list[ChatChoice]
    service_tier: ServiceTier = "priority"
    usage: CompletionUsage
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class FunctionDelta(ResponseModel):
    """The next piece of a function call."""

    name: str = ""
    arguments: str


class ToolCallDelta(ResponseModel):
    """A piece of the tool call with this `index`; the first piece has its id and name."""

    index: Count
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(ResponseModel):
    """The part of a message that a chunk adds."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)


class ChunkChoice(ResponseModel):
    """The part of one of `n` choices that a chunk adds."""

    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[Count] | None = None


class ChatCompletionChunk(JudgedResponse):
    """A chunk of a chat stream. With `include_usage` the last chunk has the usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: UnixTime
    model: str
    choices: list[ChunkChoice]
    service_tier: ServiceTier = "priority"
    usage: CompletionUsage | None = None
    prompt_token_ids: list[Count] | None = None


class CompletionLogprobs(ResponseModel):
    """The log-probabilities of a text's tokens; the first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class TextChoice(ResponseModel):
    """One of `n` texts, or the part of it that a chunk adds. `stop_reason`: the stop string that ended it."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | None = None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class TextCompletion(JudgedResponse):
    """A text completion, complete or as a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: UnixTime
    model: str
    choices: list[TextChoice]
    service_tier: ServiceTier = "priority"
    usage: CompletionUsage | None = None


class Embedding(ResponseModel):
    """The embedding of an input: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingUsage(ResponseModel):
    """Token usage of all inputs. `tokenmill_cached`: the answer comes from the answer store."""

    prompt_tokens: Count
    total_tokens: Count
    tokenmill_cached: Literal[True] = True


class Embeddings(JudgedResponse):
    """The embeddings of all inputs, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
