"""Bodies of `/tokenize` and `/detokenize`, as vLLM takes them, and of Anthropic's `count_tokens`. A worker answers them
with its tokenizer alone; they are no requests of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from schemas.requests.bodies import INT32_MAX, ChatBody, ChatMessage, Effort, TemplateKwargs, TokenId
from schemas.requests.dialects.anthropic.body import COUNTED, MESSAGES_URL
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.fields import defaulting
from schemas.requests.limits import Limits
from schemas.requests.parsing import CHAT_URL, dump_body, parse_as, parse_body
from schemas.requests.structured import Tool, invalid

TOKENIZE_URL: Final = "/tokenize"
DETOKENIZE_URL: Final = "/detokenize"
COUNT_TOKENS_URL: Final = f"{MESSAGES_URL}/count_tokens"
"""The body of its lane request is that of /tokenize, and its response the count alone."""

OF_CHAT: Final = (
    "messages", "tools", "chat_template_kwargs", "enable_thinking", "reasoning_effort", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip
"""Fields of a tokenized conversation that mean what they do in a chat."""


class TokenizeBody(BaseModel):
    """Body of /tokenize: a `prompt`, or `messages` with what else a chat has.

    Attributes:
        add_special_tokens: the tokenizer's own (BOS), for a prompt; a chat template writes them itself.
        return_token_strs: the response has the tokens' spellings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    prompt: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], Strict(False), Field(min_length=1)] | None = None
    tools: Annotated[tuple[Tool, ...], Strict(False), defaulting(())] = ()
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[bool, defaulting(False)] = False
    add_special_tokens: bool | None = None
    return_token_strs: Annotated[bool, defaulting(False)] = False

    @model_validator(mode="after")
    def _check_kind(self) -> TokenizeBody:
        if (self.prompt is None) is (self.messages is None):
            text = "is missing; give a prompt, or messages" if self.prompt is None else "and messages are both set"
            raise invalid(text if self.prompt is None else f"{text}; remove one", "prompt")
        if self.prompt is not None:
            for name in OF_CHAT:
                field = type(self).model_fields[name]
                if getattr(self, name) != field.get_default(call_default_factory=True):
                    raise invalid("goes with messages; remove it", name)
        elif self.add_special_tokens:
            raise invalid("goes with a prompt: a chat template writes special tokens itself", "add_special_tokens")
        return self


class DetokenizeBody(BaseModel):
    """Body of /detokenize."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    tokens: Annotated[tuple[TokenId, ...], Strict(False)]


TOKENIZER_BODIES: Final[Mapping[str, type[TokenizeBody] | type[DetokenizeBody]]] = {
    TOKENIZE_URL: TokenizeBody,
    DETOKENIZE_URL: DetokenizeBody,
}
TOKENIZER_URLS: Final = frozenset((*TOKENIZER_BODIES, COUNT_TOKENS_URL))
"""The urls of lane requests that a worker's tokenizer answers."""


def parse_tokenizing(
    url: str, body: Mapping[str, Any], limits: Limits | None = None
) -> tuple[TokenizeBody | DetokenizeBody, ChatBody | None]:
    """Validate the body of a lane request to one of `TOKENIZER_URLS`; returns it, and the chat that it tokenizes, if
    any. Raises `RowError`."""
    parsed = parse_as(TOKENIZER_BODIES.get(url, TokenizeBody), body)
    if not isinstance(parsed, TokenizeBody) or parsed.messages is None:
        return parsed, None
    chat = parse_body(CHAT_URL, {name: body[name] for name in ("model", *OF_CHAT) if name in body}, limits)
    assert isinstance(chat, ChatBody), "of the url"
    return parsed, chat


def counted_chat(body: Mapping[str, Any], limits: Limits | None = None) -> tuple[ChatBody, dict[str, Any]]:
    """Validate a body of `count_tokens`; returns its chat, and the body of the lane request that counts the tokens.

    Raises:
        RowError: the body is invalid.  ValueError: it holds half a surrogate pair.
    """
    if unknown := next((name for name in body if name not in COUNTED), None):
        message = f"{unknown[:80]} is not a parameter known here; remove it"
        raise RowError(RowErrorCode.UNSUPPORTED_PARAMETER, message, param=unknown[:80])
    chat = parse_body(MESSAGES_URL, {**body, "max_tokens": INT32_MAX}, limits)
    assert isinstance(chat, ChatBody), "of the url"
    dumped = orjson.loads(dump_body(chat))
    prompt = {name: dumped[name] for name in ("model", *OF_CHAT) if name in dumped}
    if not chat.offered_tools:
        prompt.pop("tools", None)
    return chat, prompt
