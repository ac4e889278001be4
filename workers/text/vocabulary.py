"""A model's tokens as bytes, for the grammar library.

A token's bytes are those that decoding it in running text gives. Special tokens (those that decoding leaves out, the
model's end tokens, and those that mark a thought) are marked, so that no grammar matches them as text. If two tokens
have the same bytes, one is included: the tokenizer itself never produces the other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from workers.text.logprobs import TokenTexts
from workers.text.token_bytes import BYTE_TOKEN
from workers.text.tokenizer import Tokenizer

SPECIAL_MARK: Final = b"\xff"
"""First byte of a special token (llguidance's convention): no text contains this byte."""


def token_bytes(tokenizer: Tokenizer, size: int, ends: Collection[int]) -> list[bytes]:
    """The bytes of each token id below `size`; empty: the token never occurs in a text."""
    texts = TokenTexts(tokenizer)
    found = [b""] * size
    owner: dict[bytes, int] = {}
    special = {*tokenizer.special_ids, *ends, *tokenizer.reasoning_ids}
    for token_id in range(min(size, tokenizer.size)):
        if token_id in special:
            found[token_id] = SPECIAL_MARK + (tokenizer.id_to_token(token_id) or f"token {token_id}").encode()
            continue
        raw = texts.bytes_of(token_id)
        if not raw or raw.startswith(SPECIAL_MARK):
            continue
        if (other := owner.get(raw)) is not None:
            if not _is_byte(tokenizer, other):
                continue
            found[other] = b""
        found[token_id], owner[raw] = raw, token_id
    for token_id in ends:
        found[token_id] = found[token_id] or SPECIAL_MARK + f"token {token_id}".encode()
    return found


def _is_byte(tokenizer: Tokenizer, token_id: int) -> bool:
    return not tokenizer.byte_level and BYTE_TOKEN.fullmatch(tokenizer.id_to_token(token_id) or "") is not None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer interface of `llguidance.LLTokenizer` (its `TokenizerWrapper`), by duck typing.

    Attributes:
        tokens: the bytes of each id.  eos_token_id: marks the end of an answer.
        special_token_ids: tokens that no text contains.
    """

    tokenizer: Tokenizer
    tokens: list[bytes]
    eos_token_id: int
    special_token_ids: list[int]
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, ends: Collection[int]) -> Vocabulary:
        """The vocabulary of a model with `size` token ids, of which `ends` (at least one) end an answer."""
        eos = tokenizer.eos_token_id
        if eos is None or eos not in ends:
            eos = min(ends)
        tokens = token_bytes(tokenizer, size, ends)
        special = [token_id for token_id, raw in enumerate(tokens) if raw.startswith(SPECIAL_MARK)]
        return cls(tokenizer, tokens, eos, special)

    def __call__(self, text: Any) -> list[int]:
        """Encode a text with the tokenizer, or greedily by the longest match where the tokenizer would prepend a
        blank."""
        if self.tokenizer.byte_level:
            (ids,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
            return list(map(int, ids))
        raw, at, found = text.encode(), 0, list[int]()
        ids_of = {token: token_id for token_id, token in enumerate(self.tokens) if token}
        longest = max(map(len, ids_of))
        while at < len(raw):
            ends = range(min(len(raw), at + longest), at, -1)
            end = next((end for end in ends if raw[at:end] in ids_of), None)
            if end is None:  # no token has this byte: the rest isn't forced
                break
            found.append(ids_of[raw[at:end]])
            at = end
        return found


def spelt_specials(tokenizer: Tokenizer, text: str) -> dict[int, str]:
    """The special tokens that `text` spells."""
    return {i: tokenizer.added_tokens[i] for i in tokenizer.special_ids if tokenizer.added_tokens[i] in text}
