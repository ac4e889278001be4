"""A weight packed for the kernels: the fast `Linear`, by itself or as a part of a native decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import EngineError
from engine.native.library import NativeLibrary
from engine.native.packing import PackedWeight, pack_dense
from engine.native.structs import KIND_OF, ElementKind, LinearStruct
from engine.native.workspace import KernelWorkspace


class NativeLinear:
    """y = x W^T + b with W in panels of `library.panel` columns."""

    __slots__ = ("_packed", "_space", "in_features", "kind", "library", "out_features")

    def __init__(self, library: NativeLibrary, packed: PackedWeight) -> None:
        """Of a weight that was packed for this library."""
        self.library = library
        self.kind = packed.kind
        self.out_features, self.in_features = packed.n, packed.k
        self._packed = packed
        self._space: KernelWorkspace | None = None

    @classmethod
    def dense(
        cls, library: NativeLibrary, kind: ElementKind, weight: Tensor, bias: Tensor | None = None
    ) -> NativeLinear:
        """Packs weight [out_features, in_features] (any float dtype; drop your reference to it) as `kind`."""
        return cls(library, pack_dense(library, kind, weight, bias))

    @property
    def struct(self) -> LinearStruct:
        """For the kernels; points into tensors that live as long as this object."""
        return self._packed.struct

    @property
    def form(self) -> str:
        """What the weight's elements are: "float32", "bfloat16", "int8", "int4" or "fp8"."""
        return self._packed.form

    @property
    def looked_up(self) -> bool:
        """Whether its rows are the embeddings, too."""
        return self._packed.looked_up

    @property
    def reorders(self) -> bool:
        """Whether its columns are in an order of their own, so that inputs are gathered first."""
        return bool(self._packed.struct.order)

    @property
    def num_bytes(self) -> int:
        """Of the packed weight with its factors and bias."""
        return self._packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self._workspace(x.shape[0])).to(x.dtype)

    def product(self, x: Tensor, space: KernelWorkspace) -> Tensor:
        """float32 [rows, out_features] for x [rows, in_features]."""
        x = self._operand(x)
        y = torch.empty(x.shape[0], self.out_features, dtype=torch.float32)
        if x.shape[0]:
            self.library.linear(KIND_OF[x.dtype], self.struct, x, y, space.struct)
        return y

    def argmax(self, x: Tensor, space: KernelWorkspace) -> tuple[Tensor, Tensor]:
        """For each row of x the column of the largest product (int64 [rows], the first of equals), and whether there
        is one and no product is NaN or +inf (bool [rows]). The products themselves are never stored."""
        x = self._operand(x)
        best = torch.empty(x.shape[0], dtype=torch.int64)
        finite = torch.empty(x.shape[0], dtype=torch.bool)
        if x.shape[0]:
            self.library.argmax(KIND_OF[x.dtype], self.struct, x, best, finite, space.struct)
        return best, finite

    def _operand(self, x: Tensor) -> Tensor:
        """Return rows in the kernels' layout: contiguous, in whole words of the kind that the weight multiplies.

        Raises:
            EngineError: the weight multiplies another dtype.
        """
        kind = KIND_OF.get(x.dtype)
        if kind is None or (self.kind in (ElementKind.F32, ElementKind.BF16) and kind != self.kind):
            raise EngineError(f"a weight packed as {self.kind.name} can't be multiplied with {x.dtype}")
        if kind == ElementKind.BF16 and x.shape[1] % 2:
            return F.pad(x, (0, 1))
        return x.contiguous()

    def _workspace(self, rows: int) -> KernelWorkspace:
        if self._space is None or self._space.max_tokens < rows:
            self._space = KernelWorkspace.for_linear(
                self.library, self.in_features, max(rows, 16), reorders=self.reorders
            )
        return self._space
