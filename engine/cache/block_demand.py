"""Forecast of the blocks that sequences will need over time, for admission.

A full-attention group needs a block for every `block_size` positions. A window group never needs more than the blocks
of a window and one chunk, however long the sequence grows, and a group of layers with states the slots of one chunk.

Sequences don't reach their ends at the same time: the short ones have released their blocks when the long ones need the
most. So the pool must cover the maximum over time of the sum, not the sum of the maxima (the idea of Gong et al. 2025,
Past-Future Scheduler, section 3). With answers of mixed lengths half as many rows again run in the same pool.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cache.tables import CacheTables
from engine.plan import NO_BLOCK, CacheGroup

Ints = NDArray[np.int64]


class BlockDemand:
    """Block counts per cache group, for rows and for sequences without one.

    Args:
        tables: groups and rows that are counted.
        max_chunk: maximum tokens of a row in one step.
        max_model_len: maximum tokens of a sequence.

    Attributes:
        tables: the same.
        max_chunk: the same, lowered where a window group's pool could not hold the window and such a chunk.
        max_positions: maximum positions that one sequence alone can have in the pools.
    """

    def __init__(self, tables: CacheTables, max_chunk: int, max_model_len: int) -> None:
        self.tables = tables
        size = tables.block_size
        self.max_chunk = max_chunk
        self.max_positions = max_model_len
        for group in tables.groups:
            usable = group.num_blocks - 1
            if usable * size >= max_model_len:
                continue
            # `span_of` inverted: the longest run of positions that never touches more than `usable` blocks
            room = 0 if group.window is None else (usable - 1) * size + 1 - (group.window - 1)
            if group.snapshot_blocks is not None:
                room = (usable - 3) * group.snapshot_blocks * size
            if room > 0:
                self.max_chunk = min(self.max_chunk, room)
            else:
                self.max_positions = min(self.max_positions, usable * size)

    def span_of(self, group: CacheGroup, pending: NDArray[np.integer]) -> Ints:
        """Return the maximum blocks of a window group that rows with so many `pending` tokens [rows] hold: those of a
        window and a chunk at any alignment; of states the last two, the one before the chunk, and snapshots inside.
        int64 [rows]."""
        assert group.window is not None
        chunk = np.clip(pending.astype(np.int64), 1, self.max_chunk)
        if group.snapshot_blocks is not None:
            every = group.snapshot_blocks * self.tables.block_size
            return np.where(chunk == 1, 2, 3 + -(-chunk // every))
        run = group.window - 1 + chunk
        span: Ints = (run + self.tables.block_size - 2) // self.tables.block_size + 1
        return span

    def reclaimable(self, rows: NDArray[np.int32], block_tables: list[NDArray[np.int32]]) -> list[int]:
        """Count the blocks, per group, that become free when all of `rows` release theirs."""
        counts = []
        for pool, table in zip(self.tables.pools, block_tables, strict=True):
            held = table[rows]
            taken = np.bincount(held[held != NO_BLOCK], minlength=pool.num_blocks)
            counts.append(int(((taken == pool.refs) & (taken > 0)).sum()))
        return counts


class _Rows(NamedTuple):
    """Rows of one group, int64 [rows] each: known tokens, steps to the end, blocks held, blocks released at the end,
    and the maximum that is ever held (in a window group)."""

    known: Ints
    steps: Ints
    held: Ints
    own: Ints
    max_held: Ints | None


class BlockDemandForecast:
    """The block demand of running sequences in one step, while more sequences are admitted.

    Args:
        rows: int32 [rows], running rows.
        known, positions: int32 [rows], their known tokens, and the expected final positions.
        pending: int32 [rows], known tokens not yet computed.
    """

    def __init__(
        self,
        demand: BlockDemand,
        rows: NDArray[np.int32],
        block_tables: list[NDArray[np.int32]],
        known: NDArray[np.int32],
        positions: NDArray[np.int32],
        pending: NDArray[np.int32],
    ) -> None:
        self._tables = demand.tables
        self._demand = demand
        steps = np.maximum(positions - known, 0).astype(np.int64)
        self._groups: list[_Rows] = []
        length = self._tables.length[rows].astype(np.int64)
        width = int(length.max(initial=0))
        for index, (group, pool) in enumerate(zip(self._tables.groups, self._tables.pools, strict=True)):
            held = length - self._tables.first[index][rows]
            table = block_tables[index][rows, :width]
            own = ((pool.refs[table] == 1) & (table != NO_BLOCK)).sum(axis=1)
            if group.snapshot_blocks is not None:
                held = np.count_nonzero(table != NO_BLOCK, axis=1).astype(np.int64)
            max_held = None if group.window is None else demand.span_of(group, pending)
            self._groups.append(_Rows(known.astype(np.int64), steps, held, own, max_held))

    def add(self, known: int, steps: int, pending: int, row: int, hits: int) -> None:
        """Add an admitted sequence; its first `hits` blocks are shared with others."""
        for index, group in enumerate(self._groups):
            held = self._tables.num_held(index, row)
            self._groups[index] = self._with(index, group, known, steps, held, max(0, held - hits), pending)

    def fits(self, known: int, steps: int, pending: int, held: list[int], free: list[int]) -> bool:
        """Whether all rows and one more sequence have enough blocks at any time.

        Args:
            known, steps, pending: of the additional sequence.  held: the blocks it hits, per group.
            free: free blocks, per group, without those that it hits.
        """
        for index, group in enumerate(self._groups):
            rows = self._with(index, group, known, steps, held[index], 0, pending)
            if self._needed(rows, rows.steps).sum() <= free[index]:
                continue  # enough even if all reached their ends at the same time
            times = np.unique(rows.steps)[:, None]
            runs = rows.steps >= times
            if np.where(runs, self._needed(rows, times), -rows.own).sum(axis=1).max() > free[index]:
                return False
        return True

    def _needed(self, rows: _Rows, times: Ints) -> Ints:
        """Return the blocks that the rows need beyond those they hold, after so many more steps."""
        whole = -(-(rows.known + times) // self._tables.block_size)
        if rows.max_held is not None:
            whole = np.minimum(whole, rows.max_held)
        wanted: Ints = np.maximum(whole - rows.held, 0)
        return wanted

    def _with(self, index: int, rows: _Rows, known: int, steps: int, held: int, own: int, pending: int) -> _Rows:
        max_held = rows.max_held
        if max_held is not None:
            max_held = np.append(max_held, self._demand.span_of(self._tables.groups[index], np.array([pending])))
        return _Rows(
            np.append(rows.known, known),
            np.append(rows.steps, steps),
            np.append(rows.held, held),
            np.append(rows.own, own),
            max_held,
        )
