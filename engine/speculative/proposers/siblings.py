"""Ended answers as a source of drafts: requests of one job often have similar answers.

The newest answers are retained up to a fixed number of tokens. The salt of a request separates owners: it enters the
n-grams' hashes, and is compared at each position found.
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
"""Maximum tokens retained. At the limit the older half is dropped."""

SHARE = 8
"""The last tokens of an answer are retained, at most this fraction (1 / SHARE) of the capacity."""


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
        """Tokens retained."""
        return self._length

    def add(self, token_ids: Ints, salt: bytes) -> None:
        """Add an answer; int32 [tokens]."""
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
        retained = [
            (self._text[start:end].copy(), salt)
            for start, end, salt in zip(self._starts[half:], ends[half:], self._salts[half:], strict=True)
        ]
        self._begin()
        for token_ids, salt in retained:
            self.add(token_ids, salt)

    def find(self, known: Ints, salt: bytes) -> tuple[int, Ints, int, int] | None:
        """Find the best continuation of `known` (int32) in an answer of this owner: the number of agreeing tokens, the
        text, the position in it, and the answer's end. None: there is none."""
        best: tuple[int, Ints, int, int] | None = None
        if not self._length:
            return None
        for position in self._index.positions(known, _number(salt)):
            answer = bisect_right(self._starts, position - 1) - 1
            start = self._starts[answer]
            end = self._starts[answer + 1] if answer + 1 < len(self._starts) else self._length
            if self._salts[answer] != salt or position >= end:
                continue
            agreed = agreement(self._text[start:], position - start, known)
            if agreed >= SIZES[-1] and (best is None or agreed > best[0]):
                best = (agreed, self._text, position, end)
        return best


def _number(salt: bytes) -> int:
    return int.from_bytes(blake2b(salt, digest_size=6).digest(), "little") if salt else 0
