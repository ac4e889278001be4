"""Extracts the texts of a request that content policies check."""

from __future__ import annotations

from collections.abc import Iterator

from schemas.requests.parsing import ChatBody, ChatMessage, CompletionBody
from workers.text.tokenizer import SPELT, TokenIds, Tokenizer
from workers.translation.embeddings import Input


def texts_of_prompt(body: ChatBody | CompletionBody, prompt: str | TokenIds, tokenizer: Tokenizer) -> tuple[str, ...]:
    """The prompt as the model reads it (rendered text, or int32 [tokens]), followed by its messages as received: a
    template may omit or respell parts of them."""
    whole = prompt.replace(SPELT, "") if isinstance(prompt, str) else tokenizer.decode(prompt)
    messages = body.messages if isinstance(body, ChatBody) else ()
    return (whole, *(text for message in messages for text in _texts_of_message(message)))


def texts_to_embed(inputs: list[Input], tokenizer: Tokenizer) -> tuple[str, ...]:
    """The inputs of an embeddings request, as the model reads them."""
    return tuple(text if isinstance(text, str) else tokenizer.decode(text) for text in inputs)


def _texts_of_message(message: ChatMessage) -> Iterator[str]:
    yield message.text
    if message.name is not None:
        yield message.name
    for call in message.tool_calls:
        yield call.function.name
        yield call.function.arguments
