"""Quantized weights as `Linear`s, with torch's operators: the kernels of each form, best first.

In addition to the kernels of a device there is one that supports every weight: it dequantizes a block of rows at a
time, at each product. It needs no memory and much time, so a builder uses it only by name; by default a weight is
dequantized once, when it is loaded, and that is logged.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quant.base import Fp8Input, Fp8Rows, Linear
from engine.quant.fp8_linear import BlockFp8Kernel, Fp8Kernel, Fp8Product, GroupedFp8Kernel, multiplies_fp8
from engine.quant.humming import HummingKernel
from engine.quant.int8_linear import Int8Linear, Int8WeightLinear, multiplies_int8, quantize_rows
from engine.quant.small_weights import SmallWeightKernel
from engine.quant.weight import QWeight

Product = Callable[[Tensor], Tensor]
"""[T, k] -> [T, n], in the same dtype."""

_ROWS_AT_ONCE = 4096
"""Of a weight that is dequantized for a product."""


class LinearKernel(Protocol):
    """Multiplies with weights of some forms on some devices."""

    @property
    def name(self) -> str: ...

    @property
    def repacks(self) -> bool:
        """Whether its products keep a copy of the weight that they read instead."""
        ...

    def runs(self, weight: QWeight) -> bool:
        """Whether it multiplies with this weight, where the weight lies."""
        ...

    def prepare(self, weight: QWeight, bias: Tensor | None) -> Product:
        """The product with a weight that it runs; bias [n] of any float dtype."""
        ...


class QuantizedLinear:
    """A `Linear` whose weight stays quantized.

    Attributes:
        weight: as it was read; on the device "meta", without data, where the kernel has laid it out anew.
        kernel: what multiplies with it.
    """

    __slots__ = ("_product", "in_features", "kernel", "out_features", "weight")

    def __init__(self, weight: QWeight, kernel: LinearKernel, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.n, weight.k
        self.kernel = kernel
        self._product = kernel.prepare(weight, bias)
        self.weight = weight.to(torch.device("meta")) if kernel.repacks else weight

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    @property
    def fp8_input(self) -> Fp8Input | None:
        """See `Fp8Linear`: where rows of the weight have one factor."""
        return self._product.input if isinstance(self._product, Fp8Product) else None

    def multiply(self, rows: Fp8Rows) -> Tensor:
        """See `Fp8Linear`."""
        assert isinstance(self._product, Fp8Product)
        return self._product.multiply(rows)

    @property
    def num_bytes(self) -> int:
        """Of the weight with its scales."""
        return self.weight.nbytes


class DequantizingKernel:
    """Any form on any device: some rows at a time become the input's dtype for as long as a product lasts."""

    name = "dequantize"
    repacks = False

    def runs(self, weight: QWeight) -> bool:
        return True

    def prepare(self, weight: QWeight, bias: Tensor | None) -> Product:
        def product(x: Tensor) -> Tensor:
            y = torch.empty(x.shape[0], weight.n, dtype=x.dtype, device=x.device)
            for first in range(0, weight.n, _ROWS_AT_ONCE):
                end = min(weight.n, first + _ROWS_AT_ONCE)
                part = None if bias is None else bias[first:end].to(x.dtype)
                y[:, first:end] = F.linear(x, weight.rows(first, end).dequantize(x.dtype), part)
            return y

        return product


class Int8Kernel:
    """W8A8 as a checkpoint asks for it: int8 rows times inputs that are quantized as they come, or by a fixed scale."""

    name = "int8"
    repacks = False

    def runs(self, weight: QWeight) -> bool:
        if weight.form != "int8" or weight.activations is None or weight.activations.form != "int8":
            return False
        plain = weight.groups == 1 and weight.low is None and weight.order is None
        return plain and (weight.codes.device.type == "cpu" or multiplies_int8(weight.n, weight.k, weight.codes.device))

    def prepare(self, weight: QWeight, bias: Tensor | None) -> Product:
        assert weight.activations is not None
        scale = weight.scale.float()[:, 0]
        return Int8Linear.of(weight.codes, scale, bias, input_scale=weight.activations.scale)


def quantized_linear(weight: QWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> QuantizedLinear:
    """With the fastest kernel that multiplies with a weight; there is always one. `dtype`: of the inputs, if known."""
    return QuantizedLinear(weight, fast_kernel(weight, dtype) or DequantizingKernel(), bias)


def int8_weight_only(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A dense weight [n, k] in int8 with a factor a row, for inputs that stay as they are."""
    codes, scale = quantize_rows(weight)
    n, k = weight.shape
    small = QWeight("int8", codes, n, k, k, scale)
    if SmallWeightKernel().runs(small):
        return QuantizedLinear(small, SmallWeightKernel(), bias)
    return Int8WeightLinear.of(codes, scale[:, 0], bias)


def fast_kernel(weight: QWeight, dtype: torch.dtype | None = None) -> LinearKernel | None:
    """What multiplies with a weight as it is, on the device where it lies; None: nothing that is fast."""
    return next((kernel for kernel in _kernels(dtype) if kernel.runs(weight)), None)


def _kernels(dtype: torch.dtype | None) -> tuple[LinearKernel, ...]:
    """The fast ones, best first."""
    library = (HummingKernel(dtype),) if dtype in (torch.float16, torch.bfloat16) else ()
    return Fp8Kernel(), BlockFp8Kernel(), GroupedFp8Kernel(), Int8Kernel(), *library, SmallWeightKernel()


def fast_at_load(quantize: str, device: torch.device) -> bool:
    """Whether a kernel multiplies on this device with what `quantize` makes of weights when they are loaded."""
    if quantize == "fp8":
        return multiplies_fp8(device)
    return device.type == "cuda" and find_spec("triton") is not None
