"""Tokens that a row may never sample: those outside of `allowed_token_ids`, and the last one of a bad word whose other
tokens are the row's latest.

A list of allowed tokens and bad words of one token hold at each position, so they are one mask, made once. Longer bad
words depend on the tokens before the position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.request import SamplingParams


def static_mask(params: SamplingParams, vocab_size: int) -> NDArray[np.int32] | None:
    """The tokens that are allowed at each position: int32 [ceil(vocab / 32)], bit i of word w = token 32 w + i; None:
    all are."""
    banned = [word[0] for word in params.bad_words if len(word) == 1]
    if params.allowed_token_ids is None and not banned:
        return None
    allowed = np.full(-(-vocab_size // 32) * 32, params.allowed_token_ids is None)
    if params.allowed_token_ids is not None:
        allowed[list(params.allowed_token_ids)] = True
    allowed[banned] = False
    return np.packbits(allowed, bitorder="little").view(np.int32)


class BadWordPrefixes:
    """A row's bad words of several tokens, and its latest tokens. Only output counts: a word that begins in the prompt
    is not found.

    Args:
        words: token ids of each word, at least two.
    """

    __slots__ = ("_last_tokens", "_lengths", "_recent")

    def __init__(self, words: tuple[tuple[int, ...], ...], output: NDArray[np.int32]) -> None:
        """`output` int32 [tokens], sampled so far."""
        self._last_tokens: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            self._last_tokens.setdefault(word[:-1], []).append(word[-1])
        self._lengths = sorted({len(prefix) for prefix in self._last_tokens})
        self._recent: list[int] = output[-self._lengths[-1] :].tolist()

    def push(self, token_id: int) -> None:
        """Add the next sampled token."""
        self._recent.append(token_id)
        del self._recent[: -self._lengths[-1]]

    def banned(self) -> list[int]:
        """The tokens that would complete a bad word now."""
        found: list[int] = []
        for length in self._lengths:
            if length <= len(self._recent):
                found += self._last_tokens.get(tuple(self._recent[-length:]), ())
        return found


def bad_word_prefixes(params: SamplingParams, output: NDArray[np.int32]) -> BadWordPrefixes | None:
    """The row's bad words of several tokens behind its `output` (int32 [tokens]); None: it has none."""
    words = tuple(word for word in params.bad_words if len(word) > 1)
    return BadWordPrefixes(words, output) if words else None
