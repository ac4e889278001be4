"""How many blocks sequences will want: the arithmetic behind admission.

A full-attention group wants a block for every `block_size` positions. A window group never wants more than what a
window and one chunk touch, however long the sequence grows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.cache.tables import CacheTables
from engine.plan import NO_BLOCK


class BlockDemand:
    """Block counts per cache group, for rows and for sequences without one.

    Args:
        tables: whose groups and rows are counted.
        max_chunk: most tokens of a row in one step.
        max_model_len: most tokens of a sequence.

    Attributes:
        max_chunk: the same, lowered where a window group's pool could not hold the window and such a chunk.
        max_positions: most positions that one sequence alone can have in the pools.
    """

    def __init__(self, tables: CacheTables, max_chunk: int, max_model_len: int) -> None:
        self._tables = tables
        size = tables.block_size
        self.max_chunk = max_chunk
        self.max_positions = max_model_len
        for group in tables.groups:
            usable = group.num_blocks - 1
            if usable * size >= max_model_len:
                continue
            # `_span` inverted: the longest run of positions that never touches more than `usable` blocks
            room = 0 if group.window is None else (usable - 1) * size + 1 - (group.window - 1)
            if room > 0:
                self.max_chunk = min(self.max_chunk, room)
            else:
                self.max_positions = min(self.max_positions, usable * size)

    def _span(self, positions: int) -> int:
        """Most blocks that a run of so many positions touches, wherever it starts."""
        return (positions + self._tables.block_size - 2) // self._tables.block_size + 1

    def of_sequence(self, positions: int, pending: int) -> list[int]:
        """Most blocks held at once, per group, by a sequence that grows to `positions` and has `pending` known tokens
        still to compute."""
        whole = self._tables.blocks_for(positions)
        chunk = min(max(pending, 1), self.max_chunk)
        return [
            whole if group.window is None else min(whole, self._span(group.window - 1 + chunk))
            for group in self._tables.groups
        ]

    def of_rows(self, rows: NDArray[np.int32], positions: NDArray[np.int32], pending: NDArray[np.int32]) -> list[int]:
        """Blocks still to come, per group, for all of `rows` together.

        Args:
            positions: int32 [len(rows)], to which each is expected to grow.
            pending: int32 [len(rows)], known tokens not yet computed.
        """
        size = self._tables.block_size
        whole, length = -(-positions // size), self._tables.length[rows]
        more = []
        for index, group in enumerate(self._tables.groups):
            if group.window is None:
                more.append(int(np.maximum(whole - length, 0).sum()))
            else:
                run = group.window - 1 + np.clip(pending, 1, self.max_chunk)
                most = np.minimum(whole, (run + size - 2) // size + 1)
                held = length - self._tables.first[index][rows]
                more.append(int(np.maximum(most - held, 0).sum()))
        return more

    def reclaimable(self, rows: NDArray[np.int32], block_tables: list[NDArray[np.int32]]) -> list[int]:
        """Blocks, per group, that become free when all of `rows` give theirs back."""
        counts = []
        for pool, table in zip(self._tables.pools, block_tables, strict=True):
            held = table[rows]
            taken = np.bincount(held[held != NO_BLOCK], minlength=pool.num_blocks)
            counts.append(int(((taken == pool.refs) & (taken > 0)).sum()))
        return counts
