"""Which tokens of a step have which adapter, as kernels read it: tiles of tokens with one adapter each.

The tokens of an adapter need not lie next to each other: a step's order lists them adapter by adapter, and a tile is a
part of that list (the gathered form of Chen et al. 2023, Punica, section 4.1). A graph's buffers have room for as many
tiles as a step of its size can need.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device_transfer import Transfer, make_transfer

_FEW_TOKENS = 512
"""Of a step whose tiles are small: more of them share an adapter's matrices in the cache than are computed for
nothing."""

SMALL, LARGE = 16, 64
"""Tokens of a tile: as few as the matrix units take, and as many as a long prompt fills."""


def tile_rows(tokens: int) -> int:
    """Return the maximum tokens of a tile in a step of this size."""
    return SMALL if tokens <= _FEW_TOKENS else LARGE


def cut_tiles(slots: NDArray[np.int32], rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Cut a step's tokens into tiles of at most `rows` tokens with one adapter.

    Args:
        slots: int32 [T], of each token's adapter; -1: it has none, and is in no tile.

    Returns:
        Tiles int32 [tiles, 3]: slot, the first of its tokens in the order, their number; and the order int32 [adapted
        tokens].
    """
    order = np.argsort(slots, kind="stable").astype(np.int32)
    order = order[np.searchsorted(slots[order], 0) :]
    found, begins, counts = np.unique(slots[order], return_index=True, return_counts=True)
    parts = -(-counts // rows)
    of = np.repeat(np.arange(len(found)), parts)
    turn = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
    tiles = np.stack([found[of], begins[of] + turn * rows, np.minimum(rows, counts[of] - turn * rows)], 1)
    return tiles.astype(np.int32), order


class TokenTiles:
    """The tiles of a step, on its device.

    Args:
        tiles: int32 [tiles, 3], as of `cut_tiles`; of 0 tokens: there is none.
        order: int32 [T], or as many as have adapters.
        rows: maximum tokens of a tile.
        transfer: to its device.
    """

    __slots__ = ("_buffer", "_transfer", "order", "rows", "tiles")

    def __init__(self, tiles: Tensor, order: Tensor, rows: int, transfer: Transfer) -> None:
        self.tiles, self.order, self.rows = tiles, order, rows
        self._buffer: Tensor | None = None
        self._transfer = transfer

    @classmethod
    def of(cls, slots: NDArray[np.int32], transfer: Transfer) -> TokenTiles:
        """Make the tiles of one step; slots as of `cut_tiles`."""
        rows = tile_rows(len(slots))
        tiles, order = transfer.up(*cut_tiles(slots, rows))
        return cls(tiles, order, rows, transfer)

    @classmethod
    def reserve(cls, tokens: int, max_loras: int, device: torch.device) -> TokenTiles:
        """Allocate persistent buffers for steps of up to `tokens` tokens, which `refill` fills, for a graph."""
        rows = tile_rows(tokens)
        # Each adapter leaves at most one tile that is not full.
        tiles = min(tokens, tokens // rows + min(max_loras, tokens))
        buffer = torch.zeros(3 * tiles + tokens, dtype=torch.int32, device=device)
        reserved = cls(buffer[: 3 * tiles].view(tiles, 3), buffer[3 * tiles :], rows, make_transfer(device))
        reserved._buffer = buffer
        return reserved

    def refill(self, slots: NDArray[np.int32] | None) -> None:
        """Fill the buffers of `reserve` with a step; None: no token has an adapter."""
        assert self._buffer is not None, "only reserved tiles are filled again"
        whole = np.zeros(len(self._buffer), dtype=np.int32)
        if slots is not None:
            tiles, order = cut_tiles(slots, self.rows)
            whole[: tiles.size] = tiles.reshape(-1)
            whole[self.tiles.numel() :][: len(order)] = order
        self._buffer.copy_(self._transfer.up(whole)[0])
