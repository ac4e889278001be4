"""States beside keys and values: layers that carry a state of constant size from token to token.

Linear attention, state-space layers and short convolutions remember a sequence in a few tensors (`StateShape`) instead
of keys and values for each token. The states of such layers are the blocks of a cache group of their own: the block
that holds position p of a row has one slot, the state behind the row's last computed token in that block. A step reads
the slot of the token before its first one, and writes the slot of its last one; within a block that is the same slot.
The slots of full blocks are snapshots: the prefix cache shares them as it shares keys, and only the last one of a
prefix is needed to continue behind it.

    block           0        |        1        |        2
    tokens   . . . . . . . . | . . . . . . . . | . . . .
    slot                   s0|               s1|      s2   the next token reads s2 and overwrites it

Not every full block has a slot (`CacheGroup.snapshot_blocks`): a state is as large as the keys of many tokens.

A state can't be rolled back. So a step computes drafts behind the state of the known tokens without storing theirs,
keeps what each layer computed it from, and computes the accepted ones again when they are known (`StateStep.accept`).
That takes the layers' operators, not the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import NO_BLOCK, CacheGroup, RowState, StepPlan
from engine.zeros import zeros

Ints = NDArray[np.int64]

NO_SLOT = NO_BLOCK
"""Slot 0 is never written: it holds the zeros that every sequence begins with."""


class StateShape(NamedTuple):
    """One tensor of a layer's state: the shape of one slot, and the dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def empty_states(shapes: Sequence[StateShape], slots: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return zeros for so many slots, `NO_SLOT` included: [slots, *shape] for each shape."""
    return tuple(zeros((slots, *shape), dtype, device) for shape, dtype in shapes)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Runs of consecutive tokens of one sequence each, from one stored state to the next, in the order in which they
    must be computed: a segment may read what an earlier one wrote. (S segments)

    Attributes:
        first, count: int64 [S], the step's tokens first ... first + count - 1. A token may be in none.
            (The operator's result for it is not read.)
        read, write: int64 [S], slots of the state before and behind them. read `NO_SLOT`: zeros, a sequence begins.
            write `NO_SLOT`: the state is not stored.
        num_single: the first so many segments have one token each, and none of them reads what another segment writes:
            they can be computed at once.
    """

    first: Ints
    count: Ints
    read: Ints
    write: Ints
    num_single: int


class StateOperator(Protocol):
    """What a layer computes from its state. It depends on its arguments and on weights only."""

    def __call__(self, states: tuple[Tensor, ...], segments: Segments, *inputs: Tensor) -> Tensor:
        """Compute the segments' tokens, and store the state behind each.

        Args:
            states: the layer's tensors, [slots, *shape] each.
            inputs: [T, ...] each, of the step's tokens.

        Returns:
            [T, ...].
        """
        ...


class StateStorage:
    """The states of all layers that have some.

    Attributes:
        group: index of their cache group.
        states: layer -> its tensors, [slots, *shape] each.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], shapes: Sequence[tuple[StateShape, ...]], device: torch.device
    ) -> None:
        """`shapes`: per layer."""
        (self.group,) = (index for index, group in enumerate(groups) if group.snapshot_blocks is not None)
        slots = groups[self.group].num_blocks
        self._device = device
        self.states = {layer: empty_states(shapes[layer], slots, device) for layer in groups[self.group].layers}

    def block_tensors(self) -> list[Tensor]:
        """Return the tensors of all layers, [slots, *shape] each, as `AttentionBackend.block_tensors` does."""
        return [tensor for tensors in self.states.values() for tensor in tensors]

    def step(self, plan: StepPlan, rows: RowState) -> StateStep:
        """Prepare a step."""
        table, size = rows.block_tables[self.group], rows.block_size
        counts = plan.counts.astype(np.int64)
        first = np.cumsum(counts) - counts
        drafts = draft_tokens = None
        if plan.drafts is not None:
            drafts = plan.drafts.astype(np.int64)
            draft_tokens = torch.from_numpy(_last(plan.counts, plan.drafts)).to(self._device)
        segments = state_segments(table[plan.rows], size, plan.starts.astype(np.int64), counts, first, drafts)
        return StateStep(self, plan, table, size, segments, draft_tokens)


class _Drafted(NamedTuple):
    """What a layer's part of a step was computed from: the operator, and its inputs of the drafts' tokens."""

    layer: int
    operator: StateOperator
    inputs: tuple[Tensor, ...]


@dataclass(slots=True)
class StateStep:
    """A step over the storage: models call `scan` layer by layer.

    Attributes:
        table: int32 [R, blocks], the state group's block tables.
        segments: of the step's tokens.
        draft_tokens: int64, which of the step's tokens are drafts; None: none are.
    """

    storage: StateStorage
    plan: StepPlan
    table: NDArray[np.int32]
    block_size: int
    segments: Segments
    draft_tokens: Tensor | None
    _drafted: list[_Drafted] = field(default_factory=list)

    def scan(self, layer: int, operator: StateOperator, *inputs: Tensor) -> Tensor:
        """Compute a layer; see `StateOperator`."""
        if (drafts := self.draft_tokens) is not None:
            self._drafted.append(_Drafted(layer, operator, tuple(part.index_select(0, drafts) for part in inputs)))
        return operator(self.storage.states[layer], self.segments, *inputs)

    def accept(self, accepted: NDArray[np.int32]) -> None:
        """Store the states behind accepted drafts, int32 [B] of the plan's rows."""
        plan = self.plan
        assert plan.drafts is not None
        taken = np.flatnonzero(accepted)
        if taken.size:
            starts = (plan.starts + plan.counts - plan.drafts)[taken].astype(np.int64)
            first = (np.cumsum(plan.drafts) - plan.drafts)[taken].astype(np.int64)
            counts = accepted[taken].astype(np.int64)
            segments = state_segments(self.table[plan.rows[taken]], self.block_size, starts, counts, first)
            for layer, operator, inputs in self._drafted:
                operator(self.storage.states[layer], segments, *inputs)
        self._drafted.clear()


def _last(counts: NDArray[np.int32], drafts: NDArray[np.int32]) -> Ints:
    """Return the indices of the last `drafts` of each row's `counts` tokens."""
    ends, total = np.cumsum(counts), np.cumsum(drafts)
    return (np.arange(total[-1]) + np.repeat(ends - total, drafts)).astype(np.int64)


class _Segment(NamedTuple):
    first: int
    tokens: int
    read: int
    write: int


def state_segments(
    table: NDArray[np.int32], block_size: int, starts: Ints, counts: Ints, first: Ints, drafts: Ints | None = None
) -> Segments:
    """Cut the tokens of B rows at the ends of blocks that have a slot.

    Args:
        table: int32 [B, blocks], the state group's block tables.
        starts, counts: int64 [B], positions of the rows' first tokens, and how many they are.
        first: int64 [B], the first token's index in the step.
        drafts: int64 [B], how many of the last tokens are drafts, whose states are not stored; None: none are.
    """
    rows = np.arange(len(starts))
    ends = starts + counts
    known = ends if drafts is None else ends - drafts
    read = np.where(starts > 0, table[rows, np.maximum(starts - 1, 0) // block_size], NO_SLOT)
    write = np.where(known > starts, table[rows, np.maximum(known - 1, 0) // block_size], NO_SLOT)
    single = (counts == 1) & (known > starts)
    parts = {
        row: _cut(
            table[row], block_size, int(starts[row]), int(known[row]), int(ends[row]), int(first[row]), int(read[row])
        )
        for row in np.flatnonzero(~single).tolist()
    }
    inside = [part.write for own in parts.values() for part in own]
    written = np.concatenate([write[single], np.array(inside, dtype=write.dtype)])
    # Only a row that begins with a block that another row fills in this very step reads what that row writes.
    reads = (read != write) & (read != NO_SLOT) & np.isin(read, written)
    if reads.any():
        single &= ~reads & ~np.isin(write, read[reads])
    singles = np.flatnonzero(single)
    rest = [
        parts[row] if row in parts else [_Segment(int(first[row]), 1, int(read[row]), int(write[row]))]
        for row in np.flatnonzero(~single).tolist()
    ]
    behind = np.array([part for own in (_ordered(rest) if reads.any() else rest) for part in own], dtype=np.int64)
    columns = np.stack((first[singles], np.ones_like(singles), read[singles], write[singles])).astype(np.int64)
    at, count, before, after = np.concatenate((columns, behind.reshape(-1, 4).T), axis=1)
    return Segments(at, count, before, after, len(singles))


def _cut(
    table: NDArray[np.int32], size: int, start: int, known: int, end: int, first: int, read: int
) -> list[_Segment]:
    """Return the segments of one row's positions start ... end - 1; those from `known` on are drafts."""
    parts = []
    borders = [block * size for block in range(start // size + 1, -(-known // size)) if table[block - 1] != NO_SLOT]
    for border in (*borders, *([known] if known > start else ())):
        slot = int(table[(border - 1) // size])
        assert slot != NO_SLOT, "the block of a row's last token has a slot"
        parts.append(_Segment(first, border - start, read, slot))
        first, start, read = first + border - start, border, slot
    if end > known:
        parts.append(_Segment(first, end - known, read, NO_SLOT))
    return parts


def _ordered(rows: list[list[_Segment]]) -> list[list[_Segment]]:
    """Return the rows' segments in an order in which each reads what was written before."""
    writer = {part.write: index for index, parts in enumerate(rows) for part in parts if part.write != NO_SLOT}
    done: dict[int, list[_Segment]] = {}  # in its order
    for index in range(len(rows)):
        chain = [index]
        while (source := writer.get(rows[chain[-1]][0].read)) is not None and source not in (*chain, *done):
            chain.append(source)
        for one in reversed(chain):
            done.setdefault(one, rows[one])
    return list(done.values())
