"""Tokens that a row may never sample: those outside of `allowed_token_ids`, and the last one of a bad word whose other
tokens are the row's latest.

A list of allowed tokens and bad words of one token hold at each position, so they are one mask, made once. Longer bad
words depend on the tokens before the position. A list may hold a whole vocabulary, and one request may have thousands
of sequences: what follows from the lists alone is made once, and shared by all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.errors import RequestRefused


class TokenBans:
    """The lists of one request, and what follows from them, each made when it is asked for first.

    Attributes:
        allowed_token_ids, bad_words: see `SamplingParams`.
        long_words: the bad words of several tokens; None: there are none.
    """

    __slots__ = ("_checked_size", "_mask", "_mask_size", "allowed_token_ids", "bad_words", "long_words")

    def __init__(self, allowed_token_ids: tuple[int, ...] | None, bad_words: tuple[tuple[int, ...], ...]) -> None:
        self.allowed_token_ids = allowed_token_ids
        self.bad_words = bad_words
        words = [word for word in bad_words if len(word) > 1]
        self.long_words = LongWords(words) if words else None
        self._checked_size = self._mask_size = 0
        self._mask: NDArray[np.int32] | None = None

    def check(self, vocab_size: int) -> None:
        """Raises `RequestRefused` for a token outside the vocabulary."""
        if self._checked_size == vocab_size:
            return
        for name, tokens in (
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", (token for word in self.bad_words for token in word)),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise RequestRefused(f"{name} names token {token}, but the vocabulary ends at {vocab_size - 1}")
        self._checked_size = vocab_size

    def static_mask(self, vocab_size: int) -> NDArray[np.int32] | None:
        """The tokens that are allowed at each position: int32 [ceil(vocab / 32)], bit i of word w = token 32 w + i;
        None: all are."""
        if self._mask_size != vocab_size:
            self._mask, self._mask_size = self._make_mask(vocab_size), vocab_size
        return self._mask

    def _make_mask(self, vocab_size: int) -> NDArray[np.int32] | None:
        banned = [word[0] for word in self.bad_words if len(word) == 1]
        if self.allowed_token_ids is None and not banned:
            return None
        allowed = np.full(-(-vocab_size // 32) * 32, self.allowed_token_ids is None)
        if self.allowed_token_ids is not None:
            allowed[list(self.allowed_token_ids)] = True
        allowed[banned] = False
        return np.packbits(allowed, bitorder="little").view(np.int32)


class LongWords:
    """Bad words of several tokens, by the tokens before their last one.

    Attributes:
        last_tokens: the other tokens -> each last token behind them.
        lengths: of these others, ascending.
    """

    __slots__ = ("last_tokens", "lengths")

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        """`words`: token ids of each word, at least two."""
        self.last_tokens: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            self.last_tokens.setdefault(word[:-1], []).append(word[-1])
        self.lengths = sorted({len(prefix) for prefix in self.last_tokens})


class BadWordPrefixes:
    """Bad words of several tokens, and a row's latest tokens. Only output counts: a word that begins in the prompt is
    not found."""

    __slots__ = ("_recent", "words")

    def __init__(self, words: LongWords, output: NDArray[np.int32]) -> None:
        """`output` int32 [tokens], sampled so far."""
        self.words = words
        self._recent: list[int] = output[-words.lengths[-1] :].tolist()

    def push(self, token_id: int) -> None:
        """Add the next sampled token."""
        self._recent.append(token_id)
        del self._recent[: -self.words.lengths[-1]]

    def banned(self) -> list[int]:
        """The tokens that would complete a bad word now."""
        found: list[int] = []
        for length in self.words.lengths:
            if length <= len(self._recent):
                found += self.words.last_tokens.get(tuple(self._recent[-length:]), ())
        return found
