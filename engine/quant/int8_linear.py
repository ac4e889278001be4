"""int8 weights with torch's operators, where the native kernels are not used. It needs only the model's weights.

One scale an output column, symmetric, to nearest. W8A8 quantizes each row of the input likewise, as it comes; its
products are whole numbers, so a row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, k] and float32 scales [rows, 1] for x [rows, k], so that x is about their product.

    A row that holds NaN or infinity gets a scale of NaN or infinity, and its products are not finite either.
    """
    x = x.float()
    scale = x.abs().amax(dim=1, keepdim=True) / 127 if x.shape[1] else x.new_zeros(x.shape[0], 1)
    whole = x.div(scale).round_().nan_to_num_(nan=0, posinf=0, neginf=0)  # also of rows of zeros, or all but
    return whole.to(torch.int8), scale


def quantize_by(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `quantize_rows`, by one scale that was calibrated before; what lies beyond it is cut off."""
    x = x.float()
    broken = ~x.isfinite().all(dim=1, keepdim=True)
    whole = x.div(scale).round_().clamp_(-128, 127).nan_to_num_(nan=0)
    return whole.to(torch.int8), torch.full_like(broken, scale, dtype=torch.float32).masked_fill_(broken, torch.nan)


def multiplies_exactly() -> bool:
    """Whether torch's int8 product is right here: on processors without VNNI it adds pairs in 16 bits, where large ones
    are cut off."""
    largest = torch.full((16, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t()) == 64 * 127 * 127).all())


_ROWS_ON_CUDA = 17
"""Minimum rows of a product on a CUDA device."""

_ALIGNMENT_ON_CUDA = 8
"""Columns and outputs of a product on a CUDA device are multiples of it."""

_HAS_TRITON = find_spec("triton") is not None

_INT8_SINCE = (7, 5)
"""Compute capability from which there are matrix units for int8 (Turing)."""


def multiplies_int8(n: int, k: int, device: torch.device) -> bool:
    """Whether torch's int8 product takes a weight [n, k] on this CUDA device."""
    if device.type != "cuda" or n % _ALIGNMENT_ON_CUDA or k % _ALIGNMENT_ON_CUDA:
        return False
    return torch.cuda.get_device_capability(device) >= _INT8_SINCE


def int8_product(rows: Tensor, weight: Tensor, min_rows: int = 1) -> Tensor:
    """rows W^T in whole numbers, int32 [T, n], for int8 rows [T, k] and weight [n, k].

    Args:
        min_rows: rows that the library's product takes; where there are fewer, rows of zeros are added.
    """
    count = len(rows)
    if count < min_rows:
        rows = F.pad(rows, (0, 0, 0, min_rows - count))
    return torch._int_mm(rows, weight.t())[:count]


class Int8Linear:
    """W8A8: int8 weights times inputs that are quantized row by row."""

    __slots__ = ("_exact", "_input_scale", "_min_rows", "_scale", "_weight", "bias", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, exact: bool | None = None) -> None:
        """Quantizes weight [out_features, in_features]; drop your reference to it.

        Args:
            exact: multiply in int8; False: the same whole numbers in float32, slower. None: whichever is right here.
        """
        codes, scale = quantize_rows(weight)
        self._take(codes, scale[:, 0], bias, None, exact)

    @classmethod
    def of(
        cls, codes: Tensor, scale: Tensor, bias: Tensor | None = None, *, input_scale: float | None = None
    ) -> Int8Linear:
        """From a weight that is quantized: int8 codes [out_features, in_features] and a float32 scale for each row.

        Args:
            input_scale: of all inputs; None: each row's own.
        """
        made = cls.__new__(cls)
        made._take(codes, scale, bias, input_scale, None)
        return made

    def _take(
        self, codes: Tensor, scale: Tensor, bias: Tensor | None, input_scale: float | None, exact: bool | None
    ) -> None:
        self.out_features, self.in_features = codes.shape
        self._weight, self._scale, self._input_scale = codes, scale, input_scale
        on_cuda = codes.device.type == "cuda"
        self._min_rows = _ROWS_ON_CUDA if on_cuda else 1
        if exact is None:
            exact = (
                multiplies_int8(self.out_features, self.in_features, codes.device) if on_cuda else multiplies_exactly()
            )
        self._exact = exact
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        if self._exact and x.device.type == "cuda" and len(x) and _HAS_TRITON:
            return self._fused(x)
        rows, scale = quantize_rows(x) if self._input_scale is None else quantize_by(x, self._input_scale)
        if self._exact:
            y = int8_product(rows, self._weight, self._min_rows).float()
        else:
            y = F.linear(rows.float(), self._weight.float())
        y = y.mul_(scale).mul_(self._scale)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

    def _fused(self, x: Tensor) -> Tensor:
        """The same with one launch before torch's product and one behind it."""
        from engine.triton_kernels.int8 import quantize_rows, scale_sums  # noqa: PLC0415 - comes with CUDA's torch

        rows, scales = quantize_rows(x, self._input_scale, self._min_rows)
        return scale_sums(torch._int_mm(rows, self._weight.t()), scales, self._scale, self.bias, x.dtype)

    @property
    def num_bytes(self) -> int:
        """Of the weight with its scales."""
        return self._weight.nbytes + self._scale.nbytes


class Int8WeightLinear:
    """W8A16: int8 weights that become the input's dtype for as long as a product lasts. Smaller, and slower."""

    __slots__ = ("_scale", "_weight", "bias", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Quantizes weight [out_features, in_features]; drop your reference to it."""
        codes, scale = quantize_rows(weight)
        self._take(codes, scale[:, 0], bias)

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Int8WeightLinear:
        """From a weight that is quantized: int8 codes [out_features, in_features] and a float32 scale for each row."""
        made = cls.__new__(cls)
        made._take(codes, scale, bias)
        return made

    def _take(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = codes.shape
        self._weight, self._scale = codes, scale
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        # Whole numbers up to 127 are exact in bfloat16 and float16; scaled weights would be rounded once more.
        y = F.linear(x, self._weight.to(x.dtype)).float().mul_(self._scale)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

    @property
    def num_bytes(self) -> int:
        """Of the weight with its scales."""
        return self._weight.nbytes + self._scale.nbytes
