"""How many blocks sequences will want, and when: the arithmetic behind admission.

A full-attention group wants a block for every `block_size` positions. A window group never wants more than what a
window and one chunk touch, however long the sequence grows.

Sequences don't grow to their ends together: the short ones have given their blocks back when the long ones want the
most. So what must be there is the highest sum over time, not the sum of the highest (the idea of Gong et al. 2025,
Past-Future Scheduler, section 3). With answers of mixed lengths half as many rows again run in the same pool.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cache.tables import CacheTables
from engine.plan import NO_BLOCK

Ints = NDArray[np.int64]


class BlockDemand:
    """Block counts per cache group, for rows and for sequences without one.

    Args:
        tables: whose groups and rows are counted.
        max_chunk: most tokens of a row in one step.
        max_model_len: most tokens of a sequence.

    Attributes:
        tables: the same.
        max_chunk: the same, lowered where a window group's pool could not hold the window and such a chunk.
        max_positions: most positions that one sequence alone can have in the pools.
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
            if room > 0:
                self.max_chunk = min(self.max_chunk, room)
            else:
                self.max_positions = min(self.max_positions, usable * size)

    def span_of(self, window: int, pending: NDArray[np.integer]) -> Ints:
        """Most blocks that rows with so many `pending` tokens [rows] hold of a window group: what a window and a chunk
        touch, wherever they start. int64 [rows]."""
        run = window - 1 + np.clip(pending.astype(np.int64), 1, self.max_chunk)
        span: Ints = (run + self.tables.block_size - 2) // self.tables.block_size + 1
        return span

    def reclaimable(self, rows: NDArray[np.int32], block_tables: list[NDArray[np.int32]]) -> list[int]:
        """Blocks, per group, that become free when all of `rows` give theirs back."""
        counts = []
        for pool, table in zip(self.tables.pools, block_tables, strict=True):
            held = table[rows]
            taken = np.bincount(held[held != NO_BLOCK], minlength=pool.num_blocks)
            counts.append(int(((taken == pool.refs) & (taken > 0)).sum()))
        return counts


class _Rows(NamedTuple):
    """Rows of one group, int64 [rows] each: known tokens, steps to the end, blocks held, blocks given back at the end,
    and the most that are ever held (in a window group)."""

    known: Ints
    steps: Ints
    held: Ints
    own: Ints
    most: Ints | None


class BlockDemandForecast:
    """What running sequences will want, as it stands in one step, while others are admitted to them.

    Args:
        rows: int32 [rows], those that run.
        known, positions: int32 [rows], tokens they have, and positions to which they are expected to grow.
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
            most = None if group.window is None else demand.span_of(group.window, pending)
            self._groups.append(_Rows(known.astype(np.int64), steps, held, own, most))

    def add(self, known: int, steps: int, pending: int, row: int, hits: int) -> None:
        """A sequence has got a row; its first `hits` blocks are others' as well."""
        for index, group in enumerate(self._groups):
            held = int(self._tables.length[row] - self._tables.first[index][row])
            self._groups[index] = self._with(index, group, known, steps, held, max(0, held - hits), pending)

    def fits(self, known: int, steps: int, pending: int, held: list[int], free: list[int]) -> bool:
        """Whether all rows and one more find the blocks they want, at any time.

        Args:
            known, steps, pending: of the one more.  held: the blocks it hits, per group.
            free: blocks that there are for all of them, per group, what is hit not counted.
        """
        for index, group in enumerate(self._groups):
            rows = self._with(index, group, known, steps, held[index], 0, pending)
            if self._want(rows, rows.steps).sum() <= free[index]:
                continue  # even if all came to their ends together
            times = np.unique(rows.steps)[:, None]
            runs = rows.steps >= times
            if np.where(runs, self._want(rows, times), -rows.own).sum(axis=1).max() > free[index]:
                return False
        return True

    def _want(self, rows: _Rows, times: Ints) -> Ints:
        """Blocks that the rows want beyond those they hold, when they have gone on for so many steps."""
        whole = -(-(rows.known + times) // self._tables.block_size)
        if rows.most is not None:
            whole = np.minimum(whole, rows.most)
        wanted: Ints = np.maximum(whole - rows.held, 0)
        return wanted

    def _with(self, index: int, rows: _Rows, known: int, steps: int, held: int, own: int, pending: int) -> _Rows:
        most = rows.most
        if most is not None:
            window = self._tables.groups[index].window
            assert window is not None
            most = np.append(most, self._demand.span_of(window, np.array([pending])))
        return _Rows(
            np.append(rows.known, known),
            np.append(rows.steps, steps),
            np.append(rows.held, held),
            np.append(rows.own, own),
            most,
        )
