"""fp8 weights times fp8 inputs on the device's matrix units, through torch's scaled product.

The weight has a factor a row, and each row of the input gets its own as it comes, unless the checkpoint was calibrated
with one for all. A row's result depends on nothing else in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quant.weight import QWeight

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max

_ALIGNMENT = 16
"""Rows and columns of a weight come in multiples of it, or the product refuses them."""

_ROWWISE_SINCE = (9, 0)
"""Compute capability from which factors of rows are applied in the product (Hopper)."""


def quantize_rows_fp8(x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [rows, k] and float32 scales [rows, 1] for x [rows, k], so that x is about their product.

    Args:
        scale: one that was calibrated; what lies beyond it is cut off. None: each row's own.

    A row that holds NaN or infinity gets a scale that is not finite, and neither are its products.
    """
    x = x.float()
    most = x.abs().amax(dim=1, keepdim=True)
    scales = most / LARGEST if scale is None else torch.full_like(most, scale)
    scales = scales.masked_fill(~most.isfinite(), torch.nan)
    whole = x.div(scales).clamp_(-LARGEST, LARGEST).nan_to_num_(nan=0)  # also of rows of zeros
    return whole.to(FP8), scales


class Fp8Kernel:
    """W8A8 in fp8: rows of the weight have one factor, inputs are quantized as they come or by a calibrated scale."""

    name = "fp8"

    def runs(self, weight: QWeight) -> bool:
        """On Hopper and later."""
        device = weight.codes.device
        return (
            multiplies_rowwise(weight)
            and device.type == "cuda"
            and torch.cuda.get_device_capability(device) >= _ROWWISE_SINCE
        )

    def prepare(self, weight: QWeight, bias: Tensor | None) -> Fp8Product:
        return Fp8Product(weight, bias)


def multiplies_rowwise(weight: QWeight) -> bool:
    """Whether the weight, and what its checkpoint wants of inputs, is what the scaled product takes."""
    if weight.form != "fp8" or weight.activations is None or weight.activations.form != "fp8":
        return False
    plain = weight.groups == 1 and weight.low is None and weight.order is None
    return plain and weight.n % _ALIGNMENT == 0 and weight.k % _ALIGNMENT == 0


class Fp8Product:
    """x W^T + b with an fp8 weight [n, k]; bias [n] of any float dtype."""

    def __init__(self, weight: QWeight, bias: Tensor | None) -> None:
        assert weight.activations is not None
        self._weight = weight.codes.t()  # the product wants its second operand by columns
        self._scale = weight.scale.float().reshape(1, -1).contiguous()
        self._input_scale = weight.activations.scale
        self._bias = None if bias is None else bias.to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, k] -> [T, n], in x's dtype; sums are kept in float32 and rounded to bfloat16."""
        rows, scales = quantize_rows_fp8(x, self._input_scale)
        y: Tensor = torch._scaled_mm(
            rows, self._weight, scale_a=scales, scale_b=self._scale, bias=self._bias, out_dtype=torch.bfloat16
        )
        return y.to(x.dtype)
