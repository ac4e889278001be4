"""Adapters in the kernels' form: for each place and product A as a packed weight, and B in panels of columns."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from engine.adapters.adapter import Adapter, LowRank
from engine.adapters.targets import PRODUCTS
from engine.native.library import NativeLibrary
from engine.native.packing import PackedWeight, pack_dense, panel_rows
from engine.native.structs import KIND_OF, LowRankStruct


class NativeAdapters:
    """The places of a decoder's adapters.

    Attributes:
        max_rank: the largest rank of a product.
    """

    def __init__(
        self, library: NativeLibrary, num_layers: int, max_loras: int, max_rank: int, dtype: torch.dtype,
        *, has_gates: bool,
    ) -> None:  # fmt: skip
        self.max_rank = max_rank
        self._library = library
        self._dtype = dtype
        self._has_gates = has_gates
        self._structs = [(LowRankStruct * (max_loras * len(PRODUCTS)))() for _ in range(num_layers)]
        self._stored: list[list[tuple[PackedWeight, Tensor, Tensor]]] = [[] for _ in range(max_loras)]

    def layer(self, index: int) -> int:
        """Return the address of a layer's structs."""
        return ctypes.addressof(self._structs[index])

    def load(self, place: int, adapter: Adapter | None) -> None:
        """Put an adapter into a place; None: empty it."""
        self._clear(place)
        if adapter is None:
            return
        for layer, structs in enumerate(self._structs):
            for number, product in enumerate(PRODUCTS):
                if (change := adapter.read(layer, product)) is not None:
                    gated = product == "gate_up" and self._has_gates
                    self._fill(structs[place * len(PRODUCTS) + number], place, change, gated=gated)

    def _clear(self, place: int) -> None:
        for structs in self._structs:
            for number in range(len(PRODUCTS)):
                structs[place * len(PRODUCTS) + number] = LowRankStruct()
        self._stored[place].clear()

    def _fill(self, struct: Any, place: int, change: LowRank, *, gated: bool) -> None:
        a = pack_dense(self._library, KIND_OF[self._dtype], change.a.to(self._dtype), None, is_lasting=False)
        b, columns = self._panels(change.b, gated=gated)
        struct.a, struct.b, struct.columns = a.struct, b.data_ptr(), columns.data_ptr()
        self._stored[place].append((a, b, columns))

    def _panels(self, b: Tensor, *, gated: bool) -> tuple[Tensor, Tensor]:
        """B [n, rank] in the kernels' form, and int32 [panels, 3], see csrc/api.h."""
        rows = panel_rows(self._library, len(b), gated=gated)
        padded = b.index_select(0, rows.clamp(min=0).long())
        padded[rows < 0] = 0
        panels = padded.view(-1, self._library.panel, b.shape[1]).transpose(1, 2)  # [panels, rank, panel]
        used = panels.ne(0).any(dim=2)
        ranks = torch.arange(b.shape[1])
        last = torch.where(used, ranks + 1, 0).amax(dim=1)
        first = torch.minimum(torch.where(used, ranks, b.shape[1]).amin(dim=1), last)
        counts = last - first
        taken = (ranks >= first[:, None]) & (ranks < last[:, None])
        columns = torch.stack((first, last, counts.cumsum(0) - counts), dim=1).to(torch.int32).contiguous()
        return panels[taken].to(self._dtype).contiguous(), columns
