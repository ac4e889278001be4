"""Low-rank products of many adapters beside each other on a GPU, in Triton: y += B (A x), by each token's own A and B.

A first kernel multiplies by A, a second by B and adds (Chen et al. 2023, Punica, section 4; Sheng et al. 2023, S-LoRA,
section 5). Their grids depend on a step's size alone, and which adapter a program computes it reads on the device, so a
graph can record them. All slots have room for the largest rank; the rank of an adapter, and which of it the rows of B
read, are numbers on the device that a program's loads follow. Sums have a fixed order, and are kept in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.adapters.adapter import LowRank
from engine.adapters.tiles import SMALL, TokenTiles

_COLUMNS = 128
"""Columns of A that a program multiplies in a turn of its loop."""

_OUTS = 64
"""Rows of B that a program multiplies."""

_MAX_RANKS = 64
"""Of a program."""

_MAX_SPLITS = 8
"""Programs that share the columns of A, where tiles are small and few."""


_OF_A_STEP = ("order", "tiles")
"""These lie anywhere in a buffer: kernels would be compiled for aligned ones and for others."""


@triton.jit(do_not_specialize=_OF_A_STEP)
def _multiply_a(  # type: ignore[no-untyped-def]
    x, a, ranks, order, tiles, parts, x_stride,
    K: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """parts[token of the order, split] = A x over SPAN columns; a program computes a tile, a split and RANKS of it.

    Args:
        x: [T, K].  a: [slots, MAX_RANK, K].  ranks: int32 [slots], of the slots' adapters.
        order, tiles: see `TokenTiles`.  parts: float32 [len(order), SPLITS, MAX_RANK].
    """
    tile, split, first_rank = tl.program_id(0), tl.program_id(1), tl.program_id(2) * RANKS
    slot = tl.load(tiles + tile * 3)
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    rank = tl.load(ranks + slot)
    if (count > 0) & (first_rank < rank):
        row = tl.arange(0, ROWS)
        inside = row < count
        token = tl.load(order + first + row, mask=inside, other=0).to(tl.int64)
        r = first_rank + tl.arange(0, RANKS)
        there = r < rank
        x_rows = x + token[:, None] * x_stride
        a_rows = a + (slot.to(tl.int64) * MAX_RANK + r)[:, None] * K
        sums = tl.zeros((ROWS, RANKS), dtype=tl.float32)
        for turn in range(0, SPAN, COLUMNS):
            column = split * SPAN + turn + tl.arange(0, COLUMNS)
            of_x, of_a = inside[:, None], there[:, None]
            if SPAN * SPLITS != K or SPAN % COLUMNS != 0:
                of_x, of_a = of_x & (column < K)[None, :], of_a & (column < K)[None, :]
            left = tl.load(x_rows + column[None, :], mask=of_x, other=0.0)
            right = tl.load(a_rows + column[None, :], mask=of_a, other=0.0)
            if UPCAST:
                left, right = left.to(tl.float32), right.to(tl.float32)
            sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
        places = parts + (((first + row).to(tl.int64) * SPLITS + split) * MAX_RANK)[:, None] + r[None, :]
        tl.store(places, sums, mask=inside[:, None] & there[None, :])


@triton.jit(do_not_specialize=_OF_A_STEP)
def _add_b(  # type: ignore[no-untyped-def]
    parts, b, bands, order, tiles, y, y_stride,
    N: tl.constexpr, SPLITS: tl.constexpr, MAX_RANK: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    OUTS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """y[token] += B parts[token], rounded to y's dtype where torch rounds; a program computes a tile and OUTS of y.

    Args:
        parts, order, tiles: as of `_multiply_a`.  b: [slots, MAX_RANK, N].  y: [T, N].
        bands: int32 [slots, blocks of OUTS, 2], the ranks that a block's rows read: first, end.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + tile * 3)
    first, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    band = bands + (slot * tl.num_programs(1) + block) * 2
    low, end = tl.load(band), tl.load(band + 1)
    if (count > 0) & (low < end):
        row = tl.arange(0, ROWS)
        inside = row < count
        token = tl.load(order + first + row, mask=inside, other=0).to(tl.int64)
        n = block * OUTS + tl.arange(0, OUTS)
        outs = n < N
        dtype = y.dtype.element_ty
        part_rows = parts + (first + row).to(tl.int64)[:, None] * (SPLITS * MAX_RANK)
        sums = tl.zeros((ROWS, OUTS), dtype=tl.float32)
        for first_rank in range(0, MAX_RANK, RANKS):
            if (first_rank < end) & (first_rank + RANKS > low):
                r = first_rank + tl.arange(0, RANKS)
                there = (r >= low) & (r < end)
                left = tl.zeros((ROWS, RANKS), dtype=tl.float32)
                for split in range(SPLITS):
                    of_parts = part_rows + split * MAX_RANK + r[None, :]
                    left += tl.load(of_parts, mask=inside[:, None] & there[None, :], other=0.0)
                of_b = b + (slot.to(tl.int64) * MAX_RANK + r)[:, None] * N + n[None, :]
                right = tl.load(of_b, mask=there[:, None] & outs[None, :], other=0.0)
                left = left.to(dtype)
                if UPCAST:
                    left, right = left.to(tl.float32), right.to(tl.float32)
                sums = tl.dot(left, right, sums, input_precision="ieee")
        places = y + token[:, None] * y_stride + n[None, :]
        mask = inside[:, None] & outs[None, :]
        before = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        tl.store(places, (before + sums.to(dtype).to(tl.float32)).to(dtype), mask=mask)


class StackedLowRank:
    """What the adapters in slots add to one product, in float16, bfloat16 or float32.

    Args:
        max_rank: of an adapter's change of the product.
        upcast: multiply in float32 whatever the dtype is, see `SmallWeightProduct`.
    """

    def __init__(
        self, max_loras: int, max_rank: int, in_features: int, out_features: int, dtype: torch.dtype,
        device: torch.device, *, upcast: bool = False,
    ) -> None:  # fmt: skip
        self._a = torch.zeros(max_loras, max_rank, in_features, dtype=dtype, device=device)
        self._b = torch.zeros(max_loras, max_rank, out_features, dtype=dtype, device=device)
        self._ranks = torch.zeros(max_loras, dtype=torch.int32, device=device)
        self._blocks = triton.cdiv(out_features, _OUTS)
        self._bands = torch.zeros(max_loras, self._blocks, 2, dtype=torch.int32, device=device)
        self._upcast = upcast
        turns = triton.cdiv(in_features, _COLUMNS)
        self._splits = next(splits for splits in range(min(_MAX_SPLITS, turns), 0, -1) if turns % splits == 0)

    def place(self, slot: int, change: LowRank | None) -> None:
        """Put a change into a slot; None: empty it. The device's earlier work is not disturbed."""
        if change is None:
            self._ranks[slot].zero_()
            self._bands[slot].zero_()
            return
        rank = len(change.a)
        self._a[slot, :rank].copy_(change.a)
        self._b[slot, :rank].copy_(change.b.T)
        self._ranks[slot].fill_(rank)
        reads = torch.nn.functional.pad(self._b[slot, :rank] != 0, (0, self._blocks * _OUTS - self._b.shape[2]))
        reads = reads.view(rank, self._blocks, _OUTS).any(2).T.int()  # [blocks, rank]
        self._bands[slot, :, 0] = reads.argmax(1)
        self._bands[slot, :, 1] = torch.where(reads.any(1), rank - reads.flip(1).argmax(1), 0)

    def add(self, x: Tensor, y: Tensor, tiles: TokenTiles) -> None:
        """Add to y [T, out_features] what the step's adapters make of x [T, in_features]."""
        if x.stride(1) != 1:
            x = x.contiguous()
        assert y.stride(1) == 1
        count, max_rank, rows = len(tiles.tiles), self._a.shape[1], tiles.rows
        if not count:
            return
        k, n = self._a.shape[2], self._b.shape[2]
        splits = self._splits if rows == SMALL else 1
        parts = torch.empty(len(tiles.order), splits, max_rank, dtype=torch.float32, device=x.device)
        ranks = min(_MAX_RANKS, max(16, triton.next_power_of_2(max_rank)))
        _multiply_a[(count, splits, triton.cdiv(max_rank, ranks))](
            x, self._a, self._ranks, tiles.order, tiles.tiles, parts, x.stride(0),
            K=k, SPAN=triton.cdiv(triton.cdiv(k, splits), _COLUMNS) * _COLUMNS, SPLITS=splits, MAX_RANK=max_rank,
            ROWS=rows, RANKS=ranks, COLUMNS=_COLUMNS, UPCAST=self._upcast,
        )  # fmt: skip
        _add_b[(count, self._blocks)](
            parts, self._b, self._bands, tiles.order, tiles.tiles, y, y.stride(0),
            N=n, SPLITS=splits, MAX_RANK=max_rank, ROWS=rows, RANKS=ranks, OUTS=_OUTS, UPCAST=self._upcast,
        )  # fmt: skip
