"""The running batch: the sequence of each row, and all state that is indexed by row.

Only this module assigns a row (`seat`) and frees it (`vacate`), so rows, block tables, stop rules and owners stay
consistent.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.adapters.places import AdapterPlaces
from engine.cache.prefix import HashChain, PrefixNode
from engine.cache.tables import CacheTables
from engine.plan import RowState
from engine.scheduler.sequence import CLASSES, Sequence, SequenceState, class_of
from engine.scheduler.stop_tokens import StopTable

NOT_SCORED: Final = np.iinfo(np.int32).max


class RunningBatch:
    """Rows and their owners.

    Attributes (R rows):
        rows: state that the runner reads too.
        owners: per row its sequence, or None.
        epoch: int64 [R], number of the row's owner; separates late results of a former owner from the present one's.
        priority, serial: int64 [R], of the owner.
        expected: int32 [R], known tokens the owner is expected to end with.
        confirmed: int32 [R], positions before this one led to finite outputs.
        promised: int32 [R], 1 where a step in flight will sample a token that the row's next step starts from; else 0.
            The planner counts it as known, though the host does not have its value yet.
        promises: whether steps are planned ahead, so that there may be such rows.
        awaited: bool [R], the host needs the row's results before the next step can be planned (`Request.awaited`).
        scored_from: int32 [R], the first position of the prompt whose logits are needed; `NOT_SCORED`: none is.
        watched: bool [R], the owner has a `TokenWatcher`.
        last_token_at: float64 [R], time of the owner's latest token (seconds); NaN: it has none yet.
        latency_class: int64 [R], the owner's class in latency statistics (`class_of`).
        by_class: occupied rows, by that class.
        adapter: int32 [R], the place of the owner's adapter; -1: it has none.
        places: of adapters.
        only_class: the class of all occupied rows; None: they have several, or there are none.
    """

    def __init__(
        self, rows: RowState, cache: CacheTables, stops: StopTable, places: AdapterPlaces | None = None
    ) -> None:
        num_rows = len(rows.num_known)
        self.rows = rows
        self.cache = cache
        self.stops = stops
        self.owners: list[Sequence | None] = [None] * num_rows
        self.epoch = np.zeros(num_rows, dtype=np.int64)
        self.priority = np.zeros(num_rows, dtype=np.int64)
        self.serial = np.zeros(num_rows, dtype=np.int64)
        self.expected = np.zeros(num_rows, dtype=np.int32)
        self.confirmed = np.zeros(num_rows, dtype=np.int32)
        self.promised = np.zeros(num_rows, dtype=np.int32)
        self.promises = False
        self.awaited = np.zeros(num_rows, dtype=np.bool_)
        self.scored_from = np.full(num_rows, NOT_SCORED, dtype=np.int32)
        self.watched = np.zeros(num_rows, dtype=np.bool_)
        self.last_token_at = np.full(num_rows, np.nan)
        self.latency_class = np.zeros(num_rows, dtype=np.int64)
        self.by_class = [0] * CLASSES
        self.only_class: int | None = None
        self.places = places or AdapterPlaces()
        self.adapter = np.full(num_rows, -1, dtype=np.int32)
        self._occupied = np.zeros(num_rows, dtype=np.bool_)
        self._free = list(range(num_rows - 1, -1, -1))
        self._order: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.owners) - len(self._free)

    @property
    def has_free_row(self) -> bool:
        return bool(self._free)

    def owner(self, row: int) -> Sequence:
        sequence = self.owners[row]
        assert sequence is not None, f"row {row} has no owner"
        return sequence

    def known(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return int32 [len(rows)], tokens that each row can compute: its known ones, and a promised one."""
        known = self.rows.num_known[rows]
        return np.asarray(known + self.promised[rows]) if self.promises else known

    def order(self) -> NDArray[np.int32]:
        """Return occupied rows, int32: highest class first, within a class by arrival."""
        if self._order is None:
            rows = np.flatnonzero(self._occupied)
            self._order = rows[np.lexsort((self.serial[rows], self.priority[rows]))].astype(np.int32)
        return self._order

    def seat(self, sequence: Sequence, chain: HashChain, hits: list[PrefixNode], expected: int) -> int:
        """Assign a free row to the sequence, with its known tokens and the blocks it hits; returns the row."""
        row = self._free.pop()
        rows, params, tokens = self.rows, sequence.request.params, sequence.token_ids
        rows.token_ids[row, : len(tokens)] = tokens
        rows.num_known[row] = len(tokens)
        rows.prompt_len[row] = sequence.prompt_len
        self.cache.open(row, chain, sequence.request)
        if hits:
            self.cache.take(row, hits)
        rows.num_computed[row] = len(hits) * rows.block_size
        self.stops.load(row, params, sequence.prompt_len)
        self.places.take(sequence.request.adapter)
        self.adapter[row] = self.places.place(sequence.request.adapter)
        self.owners[row] = sequence
        self.epoch[row] += 1
        self.priority[row] = sequence.request.priority
        self.serial[row] = sequence.serial
        self.expected[row] = expected
        self.confirmed[row] = rows.num_computed[row]
        self.promised[row] = 0
        self.awaited[row] = sequence.request.awaited
        scored_from = params.scored_from
        self.scored_from[row] = NOT_SCORED if scored_from is None else max(0, scored_from - 1)
        self.watched[row] = sequence.request.watcher is not None
        self.last_token_at[row] = sequence.last_token_at
        self.latency_class[row] = number = class_of(sequence.request.priority)
        self._count(number, 1)
        self._occupied[row] = True
        self._order = None
        sequence.row = row
        sequence.state = SequenceState.RUNNING
        return row

    def vacate(self, sequence: Sequence, state: SequenceState, *, poisoned: bool = False) -> None:
        """Free the sequence's row: its known tokens are copied to the sequence, its blocks are released.

        Args:
            poisoned: it had non-finite values; its prefix is withdrawn from the cache, its blocks will be zeroed.
        """
        row, rows = sequence.row, self.rows
        sequence.token_ids = rows.token_ids[row, : rows.num_known[row]].copy()
        sequence.high_water = max(sequence.high_water, int(min(rows.num_computed[row], rows.num_known[row])))
        sequence.prompt_computed |= bool(self.confirmed[row] >= sequence.prompt_len)
        sequence.row, sequence.state = -1, state
        sequence.last_token_at = float(self.last_token_at[row])
        self._count(int(self.latency_class[row]), -1)
        if poisoned:
            self.cache.withdraw(row)
        self.cache.release(row, 0 if poisoned else int(self.confirmed[row]))
        rows.num_known[row] = rows.num_computed[row] = rows.num_drafts[row] = rows.prompt_len[row] = 0
        self.promised[row] = 0
        self.owners[row] = None
        self.places.release(sequence.request.adapter)
        self.adapter[row] = -1
        self.epoch[row] += 1
        self._occupied[row] = False
        self._order = None
        self._free.append(row)

    def _count(self, number: int, change: int) -> None:
        self.by_class[number] += change
        taken = [one for one, rows in enumerate(self.by_class) if rows]
        self.only_class = taken[0] if len(taken) == 1 else None

    def expected_positions(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return int32 [len(rows)], the expected final position of each row. A row beyond its estimate is expected to
        generate a quarter of its answer so far again, or a block."""
        known = self.known(rows)
        more = np.maximum((known - self.rows.prompt_len[rows]) // 4, self.rows.block_size)
        expected = np.where(self.expected[rows] > known, self.expected[rows], known + more)
        positions: NDArray[np.int32] = np.maximum(np.minimum(expected, self.stops.max_known[rows]) - 1, known)
        return positions

    def check_integrity(self) -> None:
        """Compare rows, owners and tables; raises AssertionError with the arithmetic."""
        seated = [row for row, owner in enumerate(self.owners) if owner is not None]
        if sorted(seated + self._free) != list(range(len(self.owners))):
            raise AssertionError(f"rows: {len(seated)} seated + {len(self._free)} free != {len(self.owners)}")
        taken = [
            sum(class_of(self.owner(row).request.priority) == number for row in seated) for number in range(CLASSES)
        ]
        if taken != self.by_class:
            raise AssertionError(f"classes: {taken} rows are taken, but {self.by_class} are counted")
        rows = self.rows
        self.places.check_rows(Counter(name for row in seated if (name := self.owner(row).request.adapter) is not None))
        for row in seated:
            owner = self.owner(row)
            if self.adapter[row] != self.places.place(owner.request.adapter):
                raise AssertionError(
                    f"row {row}: its adapter {owner.request.adapter} is not in place {self.adapter[row]}"
                )
            computed = int(rows.num_computed[row])
            known = int(rows.num_known[row] + rows.num_drafts[row] + self.promised[row])
            held = int(self.cache.length[row]) * rows.block_size
            if owner.row != row or owner.state is not SequenceState.RUNNING:
                raise AssertionError(f"row {row}: its owner is {owner.state} on row {owner.row}")
            if not computed <= known <= self.stops.max_known[row] or not computed <= held < computed + rows.block_size:
                raise AssertionError(f"row {row}: computed {computed}, known {known}, tables reach to {held}")
        for row in self._free:
            if self.cache.length[row] or rows.num_known[row]:
                raise AssertionError(f"row {row} is free with {self.cache.length[row]} blocks")
        self.cache.check_integrity()
