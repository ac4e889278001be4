"""Adapters in the kernels' form: for each layer and product A as a packed weight, and B in panels of columns."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.adapters.adapter import Adapter, LowRank
from engine.adapters.targets import PRODUCTS
from engine.native.library import NativeLibrary
from engine.native.packing import pack_dense, panel_rows
from engine.native.structs import KIND_OF, LowRankStruct


@dataclass(frozen=True, slots=True, eq=False)
class NativeAdapter:
    """An adapter that places can take.

    Attributes:
        structs: (layer, number of the product) -> what it adds; they point into `tensors`.
        tensors: all that is stored.
    """

    structs: Mapping[tuple[int, int], LowRankStruct]
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Of all its matrices."""
        return sum(tensor.nbytes for tensor in self.tensors)


class NativeAdapters:
    """The places of a decoder's adapters.

    Attributes:
        max_loras: places.  max_rank: the largest rank of a product.
    """

    def __init__(
        self, library: NativeLibrary, num_layers: int, max_loras: int, max_rank: int, dtype: torch.dtype,
        *, has_gates: bool,
    ) -> None:  # fmt: skip
        self.max_loras, self.max_rank = max_loras, max_rank
        self._library = library
        self._dtype = dtype
        self._has_gates = has_gates
        self._structs = [(LowRankStruct * (max_loras * len(PRODUCTS)))() for _ in range(num_layers)]
        self._placed: list[NativeAdapter | None] = [None] * max_loras

    def layer(self, index: int) -> int:
        """Return the address of a layer's structs."""
        return ctypes.addressof(self._structs[index])

    def pack(self, adapter: Adapter) -> NativeAdapter:
        """Read an adapter in the kernels' form."""
        structs: dict[tuple[int, int], LowRankStruct] = {}
        tensors: list[Tensor] = []
        for layer in range(len(self._structs)):
            for number, product in enumerate(PRODUCTS):
                if (change := adapter.read(layer, product)) is not None:
                    gated = product == "gate_up" and self._has_gates
                    struct, stored = self._pack(change, gated=gated)
                    structs[layer, number] = struct
                    tensors += stored
        return NativeAdapter(structs, tuple(tensors))

    def place(self, place: int, adapter: NativeAdapter | None) -> None:
        """Put an adapter into a place; None: empty it."""
        for layer, structs in enumerate(self._structs):
            for number in range(len(PRODUCTS)):
                found = None if adapter is None else adapter.structs.get((layer, number))
                structs[place * len(PRODUCTS) + number] = found or LowRankStruct()
        self._placed[place] = adapter

    def _pack(self, change: LowRank, *, gated: bool) -> tuple[LowRankStruct, tuple[Tensor, ...]]:
        a = pack_dense(self._library, KIND_OF[self._dtype], change.a.to(self._dtype), None, is_lasting=False)
        b, ranks = self._panels(change.b, gated=gated)
        struct = LowRankStruct(a.struct, b.data_ptr(), ranks.data_ptr())
        return struct, (*a.tensors, b, ranks)

    def _panels(self, b: Tensor, *, gated: bool) -> tuple[Tensor, Tensor]:
        """B [n, rank] in the kernels' form, and its ranks by panel, see `NativeLibrary.pack_low_rank`."""
        rows = panel_rows(self._library, len(b), gated=gated)
        panels, panel = rows.numel() // self._library.panel, self._library.panel
        ranks = torch.empty(panels, 4, dtype=torch.int32)
        packed = torch.empty(panels * b.shape[1], panel, dtype=self._dtype)
        stored = self._library.pack_low_rank(KIND_OF[self._dtype], b.contiguous(), rows, ranks, packed)
        return packed[:stored].clone(), ranks
