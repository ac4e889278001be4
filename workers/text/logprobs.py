"""Log-probabilities of tokens in OpenAI's two formats, and the bytes of a token id.

A token need not be text: byte-level vocabularies split characters. The chat format has a `bytes` list for that; the
older completions format has only strings, in which such a token is spelt `bytes:\\xe6\\x97`, as OpenAI does.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any, Final

from engine.request import TokenLogprobs
from workers.text.tokenizer import TokenIds, Tokenizer

LOWEST: Final = -9999.0
"""Represents minus infinity, which JSON can't express (OpenAI's value for it)."""


class TokenTexts:
    """Bytes and spellings of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes in running text, or the spelling of a special one; empty for an unused id."""
        if self.is_special(token_id):
            return self._tokenizer.added_tokens[token_id].encode()
        return self._tokenizer.token_bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether decoding leaves the token out."""
        return token_id in self._tokenizer.special_ids

    def spelling_of(self, token_id: int) -> str:
        """The token as text, or `bytes:\\x..` when it isn't UTF-8. Several tokens can share a spelling: a letter and
        its byte (`A` and `<0x41>`), and all unused ids."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(texts: TokenTexts, ids: TokenIds, logprobs: TokenLogprobs, top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion: one entry for each of `ids` (int32 [tokens])."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = texts.bytes_of(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    content = []
    for index, token_id in enumerate(ids.tolist()):
        tops = zip(logprobs.top_ids[index, :top].tolist(), logprobs.top[index, :top].tolist(), strict=True)
        content.append(
            {
                **entry(token_id, float(logprobs.chosen[index])),
                "top_logprobs": [entry(other, value) for other, value in tops],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    texts: TokenTexts, runs: Sequence[tuple[TokenIds, TokenLogprobs]], top: int
) -> dict[str, list[Any]]:
    """`choices[].logprobs` of a text completion, over several runs of tokens (prompt, answer).

    `token_logprobs` and `top_logprobs` of a prompt's first token are null: it has no predecessor. Offsets are in
    characters; special tokens have none, because the text leaves them out.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    characters = 0
    for ids, logprobs in runs:
        for index, token_id in enumerate(ids.tolist()):
            value = float(logprobs.chosen[index])
            first = math.isnan(value)
            spelling = texts.spelling_of(token_id)
            tokens.append(spelling)
            chosen.append(None if first else _finite(value))
            offsets.append(characters)
            characters += 0 if texts.is_special(token_id) else len(decoder.decode(texts.bytes_of(token_id)))
            tops.append(None if first else _tops(texts, logprobs, index, top, spelling, value))
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(
    texts: TokenTexts, ids: TokenIds, logprobs: TokenLogprobs, top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """A prompt's log-probabilities in vLLM's format: null for the first token, then for each of `ids` (int32 [tokens])
    the likeliest tokens and the token itself, by id. `rank` counts from 1, and is null beyond the likeliest."""
    found: list[dict[str, dict[str, Any]] | None] = [None]
    for index, token_id in enumerate(ids.tolist()[1:], start=1):
        values = zip(logprobs.top_ids[index, :top].tolist(), logprobs.top[index, :top].tolist(), strict=True)
        entries: dict[int, tuple[float, int | None]] = {
            other: (value, rank) for rank, (other, value) in enumerate(values, start=1)
        }
        entries.setdefault(token_id, (float(logprobs.chosen[index]), None))
        found.append(
            {
                str(other): {"logprob": _finite(value), "rank": rank, "decoded_token": texts.spelling_of(other)}
                for other, (value, rank) in entries.items()
            }
        )
    return found


def _tops(
    texts: TokenTexts, logprobs: TokenLogprobs, index: int, top: int, spelling: str, value: float
) -> dict[str, float]:
    """The likeliest tokens at one position, always with the chosen token, as with OpenAI. Of tokens with the same
    spelling the likeliest is returned."""
    ids, values = logprobs.top_ids[index, :top].tolist(), logprobs.top[index, :top].tolist()
    entries: dict[str, float] = {}
    for other, other_value in zip(ids, values, strict=True):
        entries.setdefault(texts.spelling_of(other), _finite(other_value))
    entries.setdefault(spelling, _finite(value))
    return entries


def _finite(value: float) -> float:
    return max(value, LOWEST)
