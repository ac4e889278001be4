"""The products of adapters by Triton's kernels: those of torch, one adapter after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.adapters.adapter import LowRank
from engine.adapters.tiles import LARGE, SMALL, TokenTiles, cut_tiles, tile_rows
from engine.device_transfer import make_transfer
from tests.engine.runner.host_sync import ForbidHostSync

pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")

from engine.triton_kernels.low_rank import StackedLowRank

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def change(rank: int, k: int, n: int, seed: int, rows: slice | None = None) -> LowRank:
    """B reads its second half of ranks only in `rows`, its first half only in the others."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, k, generator=generator) / k**0.5, torch.randn(n, rank, generator=generator)
    if rows is not None:
        b[rows, : rank // 2] = 0
        b[: rows.start, rank // 2 :] = 0
    return LowRank(a, b)


@pytest.mark.parametrize("seed", range(20))
def test_tiles_hold_each_adapted_token_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.integers(-1, rng.integers(0, 5), rng.integers(1, 90)).astype(np.int32)
    rows = int(rng.choice([SMALL, LARGE]))
    tiles, order = cut_tiles(slots, rows)
    found: NDArray[np.int32] = np.full(len(slots), -1, np.int32)
    for slot, first, count in tiles:
        assert 0 < count <= rows
        assert (found[order[first : first + count]] == -1).all()
        found[order[first : first + count]] = slot
    assert found.tolist() == slots.tolist()
    # A graph of this size has room for them, and for as many adapters as it has places.
    reserved = TokenTiles.reserve(len(slots), 5, torch.device("cpu"))
    reserved.refill(slots)
    again, order = cut_tiles(slots, tile_rows(len(slots)))
    assert reserved.tiles[: len(again)].tolist() == again.tolist()
    assert not reserved.tiles[len(again) :].any()
    assert reserved.order[: len(order)].tolist() == order.tolist()
    reserved.refill(None)
    assert not reserved.tiles.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("k", "n", "tokens"), [(40, 70, 9), (256, 64, 40), (1032, 130, 3)])
def test_products_are_those_of_torch(
    k: int, n: int, tokens: int, dtype: torch.dtype, device: torch.device, upcast: bool
) -> None:
    # Given slots with ranks from 1 to the largest, one of which was another adapter's, and an empty one:
    stacked = StackedLowRank(5, 84, k, n, dtype, device, upcast=upcast)
    changes = [change(16, k, n, 0), change(84, k, n, 1, slice(n // 2, n)), change(1, k, n, 2), change(33, k, n, 3)]
    changes = [LowRank(one.a.to(dtype), one.b.to(dtype)) for one in changes]
    stacked.place(2, LowRank(*(one.to(device) for one in changes[1])))
    for slot, one in enumerate(changes):
        stacked.place(slot, LowRank(*(matrix.to(device) for matrix in one)))
    stacked.place(4, changes[0])
    stacked.place(4, None)
    rng = np.random.default_rng(tokens)
    slots = rng.integers(-1, 5, tokens).astype(np.int32)
    x, before = (torch.randn(tokens, of, generator=torch.Generator().manual_seed(7)).to(dtype) for of in (k, n))
    x[slots == -1] = float("nan")  # is read by nobody

    # when the tokens, in any order, are multiplied,
    y = before.clone().to(device)
    with ForbidHostSync():
        stacked.add(x.to(device), y, TokenTiles.of(slots, make_transfer(device)))

    # then each has what its adapter adds, and the others are as before.
    for token, slot in enumerate(slots.tolist()):
        want = before[token]
        if 0 <= slot < 4:
            want = want + (x[token] @ changes[slot].a.T) @ changes[slot].b.T
        torch.testing.assert_close(y[token].cpu(), want, atol=TOLERANCE[dtype] * 8, rtol=TOLERANCE[dtype])


def test_a_band_of_ranks_is_all_that_rows_read(device: torch.device) -> None:
    stacked = StackedLowRank(2, 20, 32, 200, torch.float32, device)
    b = torch.zeros(200, 20)
    b[3, 4] = b[63, 6] = b[199, 19] = 1.0
    stacked.place(1, LowRank(torch.ones(20, 32).to(device), b.to(device)))
    assert stacked._bands.tolist() == [[[0, 0]] * 4, [[4, 7], [0, 0], [0, 0], [19, 20]]]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_large_step_is_cut_into_large_tiles(seed: int, device: torch.device) -> None:
    tokens = 530
    stacked = StackedLowRank(3, 8, 24, 20, torch.float32, device)
    changes = [change(8, 24, 20, slot) for slot in range(3)]
    for slot, one in enumerate(changes):
        stacked.place(slot, LowRank(*(matrix.to(device) for matrix in one)))
    slots = np.sort(np.random.default_rng(seed).integers(-1, 3, tokens)).astype(np.int32)
    x = torch.randn(tokens, 24, generator=torch.Generator().manual_seed(seed))
    y = torch.zeros(tokens, 20, device=device)
    tiles = TokenTiles.of(slots, make_transfer(device))
    assert tiles.rows == LARGE
    stacked.add(x.to(device), y, tiles)
    want = torch.stack(
        [
            torch.zeros(20) if slot < 0 else changes[slot].b @ (changes[slot].a @ x[token])
            for token, slot in enumerate(slots.tolist())
        ]
    )
    torch.testing.assert_close(y.cpu(), want, atol=1e-5, rtol=1e-5)
