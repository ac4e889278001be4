"""The interface of matrix products with weights: models call a `Linear`, whatever the storage of its weight.

On CPUs with bfloat16 instructions a plain row-major weight costs a reorder inside every small product, so dense
weights are laid out for the kernel once, when they are loaded (about 2x at 1 to 16 tokens, 1.1x at 64, equal above).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """y = x W^T + b, for any storage of W."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> a new contiguous [T, out_features], in x's dtype."""
        ...


class Fp8Rows(NamedTuple):
    """Rows whose fp8 codes were made by the operation before a product.

    Attributes:
        codes: float8_e4m3fn [T, k].  scales: float32 [T, 1]; the values are about codes * scales.
        dtype: of the values, and of products with them.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype


Rows = Tensor | Fp8Rows
"""A product's input [T, k]."""


class Fp8Input(NamedTuple):
    """How a product quantizes its input: each row by `scale`, which was calibrated, or by the row's own (None)."""

    scale: float | None


class Fp8Linear(Linear, Protocol):
    """A `Linear` that may take the codes of its input."""

    @property
    def fp8_input(self) -> Fp8Input | None:
        """None: it takes none."""
        ...

    def multiply(self, rows: Fp8Rows) -> Tensor:
        """As a call with the rows' values; only with an `fp8_input`."""
        ...


def fp8_input(linear: Linear | None) -> Fp8Input | None:
    """How a product quantizes its input; None: it takes no codes."""
    found: Fp8Input | None = getattr(linear, "fp8_input", None)
    return found


def product(linear: Linear, x: Rows) -> Tensor:
    """Multiply rows, or their codes if `fp8_input` says that they are taken."""
    return linear(x) if isinstance(x, Tensor) else cast("Fp8Linear", linear).multiply(x)


class DenseLinear:
    """A plain weight [out_features, in_features] and an optional bias [out_features]."""

    __slots__ = ("bias", "in_features", "out_features", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A dense weight in oneDNN's blocked layout; it takes the weight's place, and is the same size but for padding."""

    __slots__ = ("_packed", "bias", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing weights of this dtype pays on this device."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch._C._has_mkldnn:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def dense(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest dense `Linear` for weight [out_features, in_features] where it lies; drop your reference to it."""
    if packs(weight.dtype, weight.device):
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)
