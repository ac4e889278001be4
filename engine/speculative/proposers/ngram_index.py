"""Where each n-gram of a growing text ended last, in a hash table of plain integers.

The table holds places, not n-grams: whoever finds one compares the tokens there, so n-grams that share an entry cost a
draft at most. That keeps it at 16 bytes a token, and filling it with a whole prompt takes a few array operations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

AGREEMENT = 24
"""Tokens before a place that are compared; what agrees further back makes no difference."""

_LEAST = 1024
_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_FEW = 16


class NgramIndex:
    """The index of one text; the text itself is its owner's.

    Args:
        sizes: n, descending.
        salt: 64 bits that enter each hash.
    """

    __slots__ = ("_bits", "_table", "length", "sizes")

    def __init__(self, sizes: tuple[int, ...], capacity: int = 0) -> None:
        """`capacity`: tokens for which there is to be room from the start."""
        self.sizes = sizes
        self.length = 0  # tokens read
        self._make(max(_LEAST, 4 * capacity))

    def _make(self, entries: int) -> None:
        self._bits = (entries - 1).bit_length()
        self._table = np.zeros(1 << self._bits, dtype=np.int32)  # 0: nothing; no n-gram ends there

    def extend(self, text: Ints, end: int) -> None:
        """Read on: text int32 [end or more], of which `length` tokens have been read before."""
        if 4 * end > len(self._table):
            self._make(8 * end)
            self.length = 0
        self.read(text, self.length, end, 0)
        self.length = end

    def read(self, text: Ints, done: int, end: int, begin: int, salt: int = 0) -> None:
        """Note the n-grams of text[begin:end] that end behind `done`."""
        for size in self.sizes:
            first = max(begin, done - size + 1)
            count = end - size + 1 - first
            if count <= 0:
                continue
            if count <= _FEW:
                tokens = text[first:end].tolist()
                for i in range(count):
                    self._table[self._entry(tokens[i : i + size], salt)] = first + i + size
            else:
                places = np.arange(first + size, end + 1, dtype=np.int32)
                self._table[self._entries(text[first:end], size, salt)] = places

    def places(self, known: Ints, salt: int = 0) -> list[int]:
        """Where the text went on behind what `known` (int32) ends with, the longest n-gram's place first."""
        tail = known[-self.sizes[0] :].tolist()
        found: list[int] = []
        for size in self.sizes:
            if len(tail) >= size:
                place = int(self._table[self._entry(tail[len(tail) - size :], salt)])
                if place and place not in found:
                    found.append(place)
        return found

    def _entry(self, tokens: list[int], salt: int) -> int:
        """The table's entry of one n-gram."""
        key = salt + len(tokens)
        for token in tokens:
            key = ((key ^ token) * _MIX) & _WORD
            key ^= key >> 29
        return key >> (64 - self._bits)

    def _entries(self, tokens: Ints, size: int, salt: int) -> NDArray[np.uint64]:
        """`_entry` of all n-grams of this size, in order."""
        words = tokens.astype(np.uint64)
        count = len(tokens) - size + 1
        keys = np.full(count, (salt + size) & _WORD, dtype=np.uint64)
        for offset in range(size):
            keys = (keys ^ words[offset : offset + count]) * np.uint64(_MIX)
            keys ^= keys >> np.uint64(29)
        return keys >> np.uint64(64 - self._bits)


def agreement(text: Ints, place: int, known: Ints) -> int:
    """How many tokens before `place` in `text` are those at the end of `known`; `AGREEMENT` at most."""
    reach = min(AGREEMENT, place, len(known))
    before = text[place - reach : place].tolist()
    last = known[len(known) - reach :].tolist()
    for count in range(reach):
        if before[-1 - count] != last[-1 - count]:
            return count
    return reach
