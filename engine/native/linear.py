"""A weight packed for the kernels: the fast `Linear`, by itself or as a part of a native decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import EngineError
from engine.native.library import NativeLibrary
from engine.native.structs import KIND_OF, Kind, LinearStruct
from engine.native.workspace import QUANT_GROUP, Workspace

_ROWS_AT_ONCE = 4096
"""Weight rows that are held in float32 while they are packed."""


class NativeLinear:
    """y = x W^T + b with W in panels of `library.panel` columns.

    Attributes:
        struct: for the kernels; points into tensors that live as long as this object.
    """

    __slots__ = ("_keep", "_space", "in_features", "kind", "library", "out_features", "struct")

    def __init__(self, library: NativeLibrary, kind: Kind, weight: Tensor, bias: Tensor | None = None) -> None:
        """Packs weight [out_features, in_features] (any float dtype; drop your reference to it) as `kind`."""
        self.library = library
        self.kind = kind
        n, k = weight.shape
        self.out_features, self.in_features = n, k
        panel = library.panel
        padded = -(-n // panel) * panel
        words = {Kind.F32: k, Kind.I8: -(-k // 4)}.get(kind, -(-k // 2))
        packed_words = padded * words // (2 if kind == Kind.W8 else 1)
        packed = torch.empty(packed_words + 16, dtype=torch.int32)
        quantized = kind in (Kind.I8, Kind.W8)
        scale = torch.empty(padded, dtype=torch.float32) if quantized else None
        offset = torch.empty(-(-k // QUANT_GROUP), padded, dtype=torch.int32) if kind == Kind.I8 else None
        rows = _ROWS_AT_ONCE // panel * panel
        for at in range(0, n, rows):
            part = weight[at : at + rows].to(torch.float32).contiguous()
            first = at * words // (2 if kind == Kind.W8 else 1)
            scales, offsets = (None if t is None else t[..., at:] for t in (scale, offset))
            library.pack(kind, part, packed[first:], scales, offsets)
        padded_bias = None
        if bias is not None:
            padded_bias = torch.zeros(padded, dtype=torch.float32)
            padded_bias[:n] = bias
        self._keep = (packed, scale, offset, padded_bias)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in self._keep]
        self.struct = LinearStruct(kind, n, k, words, *pointers)
        self._space: Workspace | None = None

    @property
    def num_bytes(self) -> int:
        """Of the packed weight with its scales."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._keep if tensor is not None)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self._workspace(x.shape[0])).to(x.dtype)

    def product(self, x: Tensor, space: Workspace) -> Tensor:
        """float32 [rows, out_features] for x [rows, in_features]."""
        x = self._operand(x)
        y = torch.empty(x.shape[0], self.out_features, dtype=torch.float32)
        if x.shape[0]:
            self.library.linear(KIND_OF[x.dtype], self.struct, x, y, space.struct)
        return y

    def argmax(self, x: Tensor, space: Workspace) -> tuple[Tensor, Tensor]:
        """For each row of x the column of the largest product (int64 [rows], the first of equals), and whether there
        is one and no product is NaN or +inf (bool [rows]). The products themselves are never stored."""
        x = self._operand(x)
        best = torch.empty(x.shape[0], dtype=torch.int64)
        finite = torch.empty(x.shape[0], dtype=torch.bool)
        if x.shape[0]:
            self.library.argmax(KIND_OF[x.dtype], self.struct, x, best, finite, space.struct)
        return best, finite

    def _operand(self, x: Tensor) -> Tensor:
        """Rows as the kernels read them: side by side, in whole words of the kind that the weight multiplies.

        Raises:
            EngineError: the weight multiplies another dtype.
        """
        kind = KIND_OF.get(x.dtype)
        if kind is None or (self.kind in (Kind.F32, Kind.BF16) and kind != self.kind):
            raise EngineError(f"a weight packed as {self.kind.name} can't be multiplied with {x.dtype}")
        if kind == Kind.BF16 and x.shape[1] % 2:
            return F.pad(x, (0, 1))
        return x.contiguous()

    def _workspace(self, rows: int) -> Workspace:
        if self._space is None or self._space.max_tokens < rows:
            self._space = Workspace.for_linear(self.library, self.in_features, max(rows, 16))
        return self._space
