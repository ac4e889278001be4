"""Quantized weights as `Linear`s, with torch's operators: what multiplies with which form, best first.

Beside the kernels of a device there is one that is always right: it dequantizes a block of rows at a time, at each
product. That takes no memory and much time, so a builder chooses it only by name; the usual thing is to dequantize a
weight once, when it is loaded, and to say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quant.fp8 import Fp8Kernel
from engine.quant.int8 import Int8Linear
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

    def runs(self, weight: QWeight) -> bool:
        """Whether it multiplies with this weight, where the weight lies."""
        ...

    def prepare(self, weight: QWeight, bias: Tensor | None) -> Product:
        """The product with a weight that it runs; bias [n] of any float dtype."""
        ...


class QuantizedLinear:
    """A `Linear` whose weight stays quantized.

    Attributes:
        weight: as it was read.  kernel: what multiplies with it.
    """

    __slots__ = ("_product", "in_features", "kernel", "out_features", "weight")

    def __init__(self, weight: QWeight, kernel: LinearKernel, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.n, weight.k
        self.weight = weight
        self.kernel = kernel
        self._product = kernel.prepare(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    @property
    def num_bytes(self) -> int:
        """Of the weight with its scales."""
        return self.weight.nbytes


class DequantizingKernel:
    """Any form on any device: some rows at a time become the input's dtype for as long as a product lasts."""

    name = "dequantize"

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

    def runs(self, weight: QWeight) -> bool:
        if weight.form != "int8" or weight.activations is None or weight.activations.form != "int8":
            return False
        plain = weight.groups == 1 and weight.low is None and weight.order is None
        return plain and weight.codes.device.type == "cpu"

    def prepare(self, weight: QWeight, bias: Tensor | None) -> Product:
        assert weight.activations is not None
        scale = weight.scale.float()[:, 0]
        return Int8Linear.of(weight.codes, scale, bias, input_scale=weight.activations.scale)


KERNELS: tuple[LinearKernel, ...] = (Fp8Kernel(), Int8Kernel(), SmallWeightKernel())
"""The fast ones, best first."""


def quantized_linear(weight: QWeight, bias: Tensor | None = None) -> QuantizedLinear:
    """With the fastest kernel that multiplies with a weight; there is always one."""
    return QuantizedLinear(weight, fast_kernel(weight) or DequantizingKernel(), bias)


def fast_kernel(weight: QWeight) -> LinearKernel | None:
    """What multiplies with a weight as it is, on the device where it lies; None: nothing that is fast."""
    return next((kernel for kernel in KERNELS if kernel.runs(weight)), None)
