"""Steps of attention to try: single tokens and chunks over a paged cache, with random numbers in random blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionBatch, KVLayout
from engine.plan import CacheGroup


@dataclass(frozen=True, slots=True)
class Case:
    """A step: single tokens behind `contexts` cached ones, then chunks (cached tokens, tokens of the chunk). The first
    `shared` tokens, whole blocks, are the same memory for all contexts."""

    name: str
    contexts: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...] = ()
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 32
    shared: int = 0

    @property
    def starts(self) -> list[int]:
        return [*self.contexts, *(cached for cached, _ in self.chunks)]

    @property
    def counts(self) -> list[int]:
        return [*(1 for _ in self.contexts), *(count for _, count in self.chunks)]

    @property
    def kv_tokens(self) -> int:
        """Keys that are read, each once."""
        return sum(self.starts) + sum(self.counts) - self.shared * (len(self.contexts) - 1 if self.shared else 0)

    @property
    def pairs(self) -> int:
        """(query, key) pairs."""
        return sum(n * s + n * (n + 1) // 2 for s, n in zip(self.starts, self.counts, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A case in memory.

    Attributes:
        batch: the step, and before it the one that fills the cache (None: nothing is cached).
        q: [T, heads, head_dim].
        k, v: of all tokens, sequence by sequence, [keys, kv_heads, head_dim].
        new: bool [keys], those of the step itself.  slots: int64 [keys].
    """

    case: Case
    batch: AttentionBatch
    filling: AttentionBatch | None
    layout: KVLayout
    q: Tensor
    k: Tensor
    v: Tensor
    new: Tensor
    slots: Tensor

    def paged(self) -> tuple[Tensor, Tensor]:
        """Keys and values as libraries want them: [blocks, block_size, kv_heads, head_dim], zeros where none is."""
        blocks = self.layout.groups[0].num_blocks
        found = []
        for each in (self.k, self.v):
            store = each.new_zeros(blocks * self.case.block_size, *each.shape[1:])
            store[self.slots] = each
            found.append(store.view(blocks, self.case.block_size, *each.shape[1:]))
        return found[0], found[1]


def make(case: Case, dtype: torch.dtype, device: torch.device) -> Made:
    """Random numbers in random blocks."""
    rng = np.random.default_rng(7)
    made = torch.Generator(device).manual_seed(7)
    starts, counts = np.array(case.starts, np.int32), np.array(case.counts, np.int32)
    ends = starts + counts
    held = -(-ends // case.block_size)
    blocks = int(held.sum()) + 3  # block 0 is no sequence's, and two more stay free
    tables = np.zeros((len(starts), int(held.max())), np.int32)
    order = rng.permutation(np.arange(1, blocks))
    for row, (first, count) in enumerate(zip(np.cumsum(held) - held, held, strict=True)):
        tables[row, :count] = order[first : first + count]
    tables[: len(case.contexts), : case.shared // case.block_size] = tables[0, : case.shared // case.block_size]
    rows = np.repeat(np.arange(len(starts)), ends)
    at = np.arange(len(rows)) - np.repeat(np.cumsum(ends) - ends, ends)
    slots = tables[rows, at // case.block_size].astype(np.int64) * case.block_size + at % case.block_size
    new = at >= starts[rows]
    source = np.where((at < case.shared) & (rows < len(case.contexts)), at, np.arange(len(rows)))
    of = torch.from_numpy(source).to(device)

    def numbers(count: int, heads: int) -> Tensor:
        shape = (count, heads, case.head_dim)
        return torch.randn(shape, generator=made, device=device, dtype=torch.float32).to(dtype)

    behind = np.flatnonzero(starts)
    filling = AttentionBatch(
        np.zeros(len(behind), np.int32), starts[behind], 0, (tables[behind],), (slots[~new],)
    ) if len(behind) else None  # fmt: skip
    return Made(
        case=case,
        batch=AttentionBatch(starts, counts, len(case.contexts), (tables,), (slots[new],)),
        filling=filling,
        layout=KVLayout((CacheGroup((0,), None, blocks),), case.block_size, case.kv_heads, case.head_dim, case.heads),
        q=numbers(int(counts.sum()), case.heads),
        k=numbers(len(slots), case.kv_heads)[of],
        v=numbers(len(slots), case.kv_heads)[of],
        new=torch.from_numpy(new).to(device),
        slots=torch.from_numpy(slots).to(device),
    )
