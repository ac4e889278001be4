"""fp8 weights times fp8 inputs on the device's matrix units: through torch's scaled product where a row of the weight
has one factor, through our own kernel where its groups of columns have theirs (blocks of 128 x 128, too).

Each row of the input gets its own factor as it comes (each group of a row, if the weight has groups), unless the
checkpoint was calibrated with one for all. A row's result depends on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from engine.quant.weight import QWeight

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max

_ALIGNMENT = 16
"""Rows and columns of a weight come in multiples of it, or the product refuses them."""

_LEAST_GROUP = 32
"""Columns of a group, and what they must be a multiple of: a product of the matrix units takes so many."""

FP8_SINCE = (8, 9)
"""Compute capability from which there are matrix units for fp8 (Ada)."""


def quantize_rows_fp8(x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [rows, k] and float32 scales [rows, 1] for x [rows, k], so that x is about their product.

    Args:
        scale: one that was calibrated; what lies beyond it is cut off. None: each row's own.

    A row that holds NaN or infinity gets a scale that is not finite, and neither are its products.
    """
    x = x.float()
    peaks = x.abs().amax(dim=1, keepdim=True)
    scales = peaks / LARGEST if scale is None else torch.full_like(peaks, scale)
    scales = scales.masked_fill(~peaks.isfinite(), torch.nan)
    whole = x.div(scales).clamp_(-LARGEST, LARGEST).nan_to_num_(nan=0)  # also of rows of zeros
    return whole.masked_fill_(scales == 0, 0).to(FP8), scales


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device has matrix units for fp8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_SINCE


class Fp8Kernel:
    """W8A8 in fp8: rows of the weight have one factor, inputs are quantized as they come or by a calibrated scale."""

    name = "fp8"
    repacks = False

    def runs(self, weight: QWeight) -> bool:
        """On Ada and later."""
        return multiplies_rowwise(weight) and multiplies_fp8(weight.codes.device)

    def prepare(self, weight: QWeight, bias: Tensor | None) -> Fp8Product:
        return Fp8Product(weight, bias)


def multiplies_rowwise(weight: QWeight) -> bool:
    """Whether the scaled product supports the weight and its checkpoint's quantization of inputs."""
    if weight.form != "fp8" or weight.activations is None or weight.activations.form != "fp8":
        return False
    plain = weight.groups == 1 and weight.low is None and weight.order is None
    return plain and weight.n % _ALIGNMENT == 0 and weight.k % _ALIGNMENT == 0


class GroupedFp8Kernel:
    """W8A8 in fp8, where groups of the weight's columns have factors (`engine.triton_kernels.fp8`)."""

    name = "fp8 groups"
    repacks = False

    def runs(self, weight: QWeight) -> bool:
        """On Ada and later."""
        there = multiplies_fp8(weight.codes.device) and find_spec("triton") is not None
        return there and multiplies_groups(weight)

    def prepare(self, weight: QWeight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        from engine.triton_kernels.fp8 import GroupedFp8Product  # noqa: PLC0415 - comes with CUDA's torch

        return GroupedFp8Product(weight, bias)


def multiplies_groups(weight: QWeight) -> bool:
    """Whether the kernel for groups supports the weight and its checkpoint's quantization of inputs."""
    if weight.form != "fp8" or weight.activations is None or weight.activations.form != "fp8":
        return False
    plain = isinstance(weight.scale, Tensor) and weight.low is None and weight.order is None
    return plain and weight.groups > 1 and weight.group % _LEAST_GROUP == 0


class Fp8Product:
    """x W^T + b with an fp8 weight [n, k]; bias [n] of any float dtype."""

    def __init__(self, weight: QWeight, bias: Tensor | None) -> None:
        assert weight.activations is not None
        self._weight = weight.codes.t()  # the product's second operand is column-major
        self._scale = weight.scale.float().reshape(1, -1).contiguous()
        self._input_scale = weight.activations.scale
        self._quantize = quantizer(weight.codes.device)
        self._bias = None if bias is None else bias.to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, k] -> [T, n], in x's dtype; sums are kept in float32 and rounded to bfloat16."""
        rows, scales = self._quantize(x, self._input_scale)
        y: Tensor = torch._scaled_mm(
            rows, self._weight, scale_a=scales, scale_b=self._scale, bias=self._bias, out_dtype=torch.bfloat16
        )
        return y.to(x.dtype)


def quantizer(device: torch.device) -> Callable[[Tensor, float | None], tuple[Tensor, Tensor]]:
    """Return the function that quantizes rows on a device: one launch on a GPU with Triton, else torch's operators."""
    if device.type != "cuda" or find_spec("triton") is None:
        return quantize_rows_fp8
    from engine.triton_kernels.fp8 import quantize_rows  # noqa: PLC0415 - comes with CUDA's torch

    return quantize_rows
