"""An index of the last end position of each n-gram of a growing text, in a hash table of plain integers.

The table holds positions, not n-grams: the caller compares the tokens there, so n-grams that share an entry cost a
draft at most. That takes 16 bytes a token, and filling it with a whole prompt takes a few array operations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

AGREEMENT = 24
"""Maximum number of tokens before a position that are compared."""

_MIN_ENTRIES = 1024
_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_FEW = 16


class NgramIndex:
    """The index of one text; the caller owns the text.

    Args:
        sizes: n, descending.
        salt: 64 bits that enter each hash.
    """

    __slots__ = ("_bits", "_table", "length", "sizes")

    def __init__(self, sizes: tuple[int, ...], capacity: int = 0) -> None:
        """`capacity`: initial capacity in tokens."""
        self.sizes = sizes
        self.length = 0  # tokens read
        self._make(max(_MIN_ENTRIES, 4 * capacity))

    def _make(self, entries: int) -> None:
        self._bits = (entries - 1).bit_length()
        self._table = np.zeros(1 << self._bits, dtype=np.int32)  # 0: nothing; no n-gram ends there

    def extend(self, text: Ints, end: int) -> None:
        """Index the text up to `end`: int32 [end or more], of which `length` tokens have been read before."""
        if 4 * end > len(self._table):
            self._make(8 * end)
            self.length = 0
        self.read(text, self.length, end, 0)
        self.length = end

    def read(self, text: Ints, done: int, end: int, begin: int, salt: int = 0) -> None:
        """Insert the n-grams of text[begin:end] that end behind `done`."""
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
                positions = np.arange(first + size, end + 1, dtype=np.int32)
                self._table[self._entries(text[first:end], size, salt)] = positions

    def positions(self, known: Ints, salt: int = 0) -> list[int]:
        """Return the positions behind earlier occurrences of the last n-grams of `known` (int32), longest n-gram
        first."""
        tail = known[-self.sizes[0] :].tolist()
        found: list[int] = []
        for size in self.sizes:
            if len(tail) >= size:
                position = int(self._table[self._entry(tail[len(tail) - size :], salt)])
                if position and position not in found:
                    found.append(position)
        return found

    def _entry(self, tokens: list[int], salt: int) -> int:
        """Return the table entry of one n-gram."""
        key = salt + len(tokens)
        for token in tokens:
            key = ((key ^ token) * _MIX) & _WORD
            key ^= key >> 29
        return key >> (64 - self._bits)

    def _entries(self, tokens: Ints, size: int, salt: int) -> NDArray[np.uint64]:
        """Return `_entry` of all n-grams of this size, in order."""
        words = tokens.astype(np.uint64)
        count = len(tokens) - size + 1
        keys = np.full(count, (salt + size) & _WORD, dtype=np.uint64)
        for offset in range(size):
            keys = (keys ^ words[offset : offset + count]) * np.uint64(_MIX)
            keys ^= keys >> np.uint64(29)
        return keys >> np.uint64(64 - self._bits)


def agreement(text: Ints, position: int, known: Ints) -> int:
    """Count the tokens before `position` in `text` that equal those at the end of `known`; `AGREEMENT` at most."""
    reach = min(AGREEMENT, position, len(known))
    before = text[position - reach : position].tolist()
    last = known[len(known) - reach :].tolist()
    for count in range(reach):
        if before[-1 - count] != last[-1 - count]:
            return count
    return reach
