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
    """Bad words of several tokens, as the automaton of Aho and Corasick (1975): a token costs the same however many and
    however long the words are.

    A state is the longest end of the output that begins a word, without its last token. State 0: none.
    """

    __slots__ = ("_last_tokens", "_next", "_shorter", "_suffixes", "max_length")

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        """`words`: token ids of each word, at least two."""
        self._next: dict[tuple[int, int], int] = {}  # by state and token
        self._last_tokens: dict[int, list[int]] = {}  # of the words that only lack it
        self.max_length = max(map(len, words)) - 1
        states = [(0, 0, 0)]  # length, the state before its last token, this token
        for *others, last in words:
            state = 0
            for length, token_id in enumerate(others, 1):
                if (state, token_id) not in self._next:
                    self._next[state, token_id] = len(states)
                    states.append((length, state, token_id))
                state = self._next[state, token_id]
            self._last_tokens.setdefault(state, []).append(last)
        self._suffixes = [0] * len(states)  # the next shorter state that ends as this one
        self._shorter = [0] * len(states)  # the next shorter one behind which a word's last token may come
        for state in sorted(range(1, len(states)), key=lambda state: states[state][0]):
            _, before, token_id = states[state]
            suffix = self.follow(self._suffixes[before], token_id) if before else 0
            self._suffixes[state] = suffix
            self._shorter[state] = suffix if suffix in self._last_tokens else self._shorter[suffix]

    def follow(self, state: int, token_id: int) -> int:
        """The state behind this one and a token."""
        while (found := self._next.get((state, token_id))) is None and state:
            state = self._suffixes[state]
        return found or 0

    def last_tokens(self, state: int) -> list[int]:
        """The tokens that would complete a word."""
        found: list[int] = []
        while state:
            found += self._last_tokens.get(state, ())
            state = self._shorter[state]
        return found


class BadWordPrefixes:
    """Bad words of several tokens, and how far a row has come in them. Only output counts: a word that begins in the
    prompt is not found."""

    __slots__ = ("_state", "words")

    def __init__(self, words: LongWords, output: NDArray[np.int32]) -> None:
        """`output` int32 [tokens], sampled so far."""
        self.words = words
        self._state = 0
        for token_id in output[-words.max_length :].tolist():
            self.push(token_id)

    def push(self, token_id: int) -> None:
        """Add the next sampled token."""
        self._state = self.words.follow(self._state, token_id)

    def banned(self) -> list[int]:
        """The tokens that would complete a bad word now."""
        return self.words.last_tokens(self._state)
