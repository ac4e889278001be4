"""Encodes the prompts of requests, those of many requests in one call."""

from __future__ import annotations

from collections.abc import Sequence

from workers.text.tokenizer import TokenIds, Tokenizer

Prompt = str | TokenIds
"""A prompt: text to encode, or token ids (int32 [tokens])."""


def encode(tokenizer: Tokenizer, prompts: Sequence[Sequence[Prompt]], *, chat: bool) -> list[list[TokenIds]]:
    """Encode the prompts of many requests. `chat`: they are rendered conversations, which contain their special tokens;
    other texts get those that the tokenizer adds."""
    texts = [prompt for request in prompts for prompt in request if isinstance(prompt, str)]
    encoded = iter(tokenizer.encode_chats(texts) if chat else tokenizer.encode_batch(texts, add_special_tokens=True))
    return [[next(encoded) if isinstance(prompt, str) else prompt for prompt in request] for request in prompts]
