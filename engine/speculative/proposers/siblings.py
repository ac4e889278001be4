"""Answers that have ended, kept to be copied from: requests of one job often want alike answers.

Of the newest answers as many are kept as fit into a fixed number of tokens. The salt of a request keeps owners apart:
it enters the n-grams' hashes, and is compared where a place was found.
"""

from __future__ import annotations

from bisect import bisect_right
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from engine.speculative.proposers.ngram_index import NgramIndex, agreement

Ints = NDArray[np.int32]

SIZES = (5, 3)

CAPACITY = 1 << 16
"""Tokens kept, at most. When they are reached the older half goes."""

SHARE = 8
"""Of one answer the last tokens are kept, at most one part in so many."""


class Siblings:
    """The store; `capacity` in tokens."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._text = np.zeros(capacity, dtype=np.int32)
        self._begin()

    def _begin(self) -> None:
        self._starts: list[int] = []
        self._salts: list[bytes] = []
        self._length = 0
        self._index = NgramIndex(SIZES, len(self._text))

    def __len__(self) -> int:
        """Tokens kept."""
        return self._length

    def add(self, token_ids: Ints, salt: bytes) -> None:
        """Keep an answer; int32 [tokens]."""
        token_ids = token_ids[-(len(self._text) // SHARE) :]
        if len(token_ids) < SIZES[-1]:
            return
        if self._length + len(token_ids) > len(self._text):
            self._drop_older_half()
        start, self._length = self._length, self._length + len(token_ids)
        self._text[start : self._length] = token_ids
        self._starts.append(start)
        self._salts.append(salt)
        self._index.read(self._text, start, self._length, start, _number(salt))

    def _drop_older_half(self) -> None:
        half = bisect_right(self._starts, self._length // 2)
        ends = [*self._starts[1:], self._length]
        kept = [
            (self._text[start:end].copy(), salt)
            for start, end, salt in zip(self._starts[half:], ends[half:], self._salts[half:], strict=True)
        ]
        self._begin()
        for token_ids, salt in kept:
            self.add(token_ids, salt)

    def find(self, known: Ints, salt: bytes) -> tuple[int, Ints, int, int] | None:
        """Where an answer of this owner went on behind what `known` (int32) ends with: how many tokens before agree,
        the text, the place in it, and the answer's end. None: nowhere."""
        best: tuple[int, Ints, int, int] | None = None
        if not self._length:
            return None
        for place in self._index.places(known, _number(salt)):
            answer = bisect_right(self._starts, place - 1) - 1
            start = self._starts[answer]
            end = self._starts[answer + 1] if answer + 1 < len(self._starts) else self._length
            if self._salts[answer] != salt or place >= end:
                continue
            agreed = agreement(self._text[start:], place - start, known)
            if agreed >= SIZES[-1] and (best is None or agreed > best[0]):
                best = (agreed, self._text, place, end)
        return best


def _number(salt: bytes) -> int:
    return int.from_bytes(blake2b(salt, digest_size=6).digest(), "little") if salt else 0
