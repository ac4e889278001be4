"""Extracts the texts of a request that content policies check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from schemas.requests.parsing import ChatBody, ChatMessage, CompletionBody
from workers.text.tokenizer import SPELT, EncodedText, TokenIds, Tokenizer


def texts_of_prompt(body: ChatBody | CompletionBody, prompt: str | TokenIds, tokenizer: Tokenizer) -> tuple[str, ...]:
    """The prompt as the model reads it (rendered text, or int32 [tokens]), followed by its messages as received: a
    template may omit or respell parts of them."""
    whole = prompt.replace(SPELT, "") if isinstance(prompt, str) else tokenizer.decode(prompt)
    messages = body.messages if isinstance(body, ChatBody) else ()
    return (whole, *(text for message in messages for text in _texts_of_message(message)))


def texts_of_inputs(inputs: Sequence[Any], tokenizer: Tokenizer) -> tuple[str, ...]:
    """The inputs of a request for vectors, scores or labels, as the model reads them; each text of a pair by itself."""
    return tuple(text for given in inputs for text in _texts_of_input(given, tokenizer))


def _texts_of_input(given: Any, tokenizer: Tokenizer) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given.replace(SPELT, ""),)
    if isinstance(given, EncodedText):
        return (tokenizer.decode(given.ids),)
    return given if isinstance(given, tuple) else (tokenizer.decode(given),)


def _texts_of_message(message: ChatMessage) -> Iterator[str]:
    yield message.text
    if message.name is not None:
        yield message.name
    for call in message.tool_calls:
        yield call.function.name
        yield call.function.arguments
