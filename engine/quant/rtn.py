"""Round-to-nearest: quantizes a dense weight to a `QWeight` without calibration data.

Ranges, zeros and rounding are compressed-tensors' (`calculate_qparams`, `quantize`), in float32: a symmetric range of
b bits is cut into 2^b - 1 steps, so its scale is the largest over 2^(b-1) - 1/2, and zero is always a code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quant.formats.base import affine, halves
from engine.quant.fp8_linear import multiplies_fp8
from engine.quant.weight import Activations, Form, QWeight, stack

_ELEMENTS_AT_ONCE = 1 << 22
_FP8_MOST = 448.0
_LOW_ERROR = 2**-9
"""Of a group's range, that its lowest value may be off by as it is stored."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a weight is rounded.

    Attributes:
        form: of the codes.  group: columns that share a factor; None: a row has one.
        symmetric: codes lie evenly about zero; fp8 always does.
        whole_zero: of int4 that is not symmetric: zero is a code, as formats store it; otherwise the lowest code is the
            lowest value, as near as `scale_dtype` has it.
        scale_dtype: of the scales, which the codes are chosen for as they are stored; float32 where it lacks the range.
        activations: how the inputs are to be quantized.
    """

    form: Form
    group: int | None = None
    symmetric: bool = True
    whole_zero: bool = True
    scale_dtype: torch.dtype = torch.float32
    activations: Activations | None = None


AT_LOAD = {
    "int4": Rounding("int4", group=32, symmetric=False, whole_zero=False, scale_dtype=torch.float16),
    "fp8": Rounding("fp8"),
}
"""Rounding of weights at load, by values of `quantize`."""


def at_load(quantize: str, device: torch.device) -> Rounding:
    """How a weight on this device is rounded for a value of `AT_LOAD`: where fp8 is multiplied with fp8, the inputs are
    quantized too, row by row."""
    rounding = AT_LOAD[quantize]
    if rounding.form == "fp8" and multiplies_fp8(device):
        return replace(rounding, activations=Activations("fp8"))
    return rounding


def round_to_nearest(weight: Tensor, rounding: Rounding) -> QWeight:
    """The weight [n, k] of any float dtype, rounded; some rows at a time are held in float32."""
    n, k = weight.shape
    step = max(1, _ELEMENTS_AT_ONCE // max(1, k))
    parts = [_rounded(weight[first : first + step].float(), rounding) for first in range(0, n, step)]
    whole = stack(parts)
    assert whole is not None
    return whole


def _rounded(weight: Tensor, rounding: Rounding) -> QWeight:
    n, k = weight.shape
    group = min(rounding.group or k, k)
    columns = F.pad(weight, (0, -k % group)).view(n, -1, group)  # zeros don't widen a range
    if rounding.form == "fp8":
        scale = _usable(columns.abs().amax(2) / _FP8_MOST, rounding)
        codes = (columns / scale.float()[:, :, None]).clamp_(-_FP8_MOST, _FP8_MOST)
        return QWeight(
            "fp8", _flat(codes, k).to(torch.float8_e4m3fn), n, k, group, scale, activations=rounding.activations
        )
    if rounding.form == "int4" and not (rounding.whole_zero or rounding.symmetric):
        return _between(columns, k, rounding)
    scale, zero = integer_grid(columns, rounding)
    codes = on_grid(columns, scale[:, :, None], None if zero is None else zero[:, :, None], rounding)
    return from_grid(_flat(codes, k), scale, zero, group, rounding)


def integer_grid(columns: Tensor, rounding: Rounding, share: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """Scale as it is stored, and zero (float32; None: 0), [n, groups] each, for float32 [n, groups, columns].

    Args:
        share: of each group's range that the grid covers; what lies beyond is cut off.
    """
    low_code, high_code = _codes(rounding)
    low, high = columns.amin(2).clamp_(max=0) * share, columns.amax(2).clamp_(min=0) * share
    if rounding.symmetric:
        return _usable(torch.maximum(-low, high) / ((high_code - low_code) / 2), rounding), None
    scale = _usable((high - low) / (high_code - low_code), rounding)
    return scale, (low_code - low / scale.float()).clamp_(low_code, high_code).round_().nan_to_num_(nan=0)


def on_grid(values: Tensor, scale: Tensor, zero: Tensor | None, rounding: Rounding) -> Tensor:
    """Return the nearest codes, float32 from -2^(bits - 1); a value is about scale * (code - zero)."""
    codes = values / scale.float()
    if zero is not None:
        codes += zero
    return codes.clamp_(*_codes(rounding)).round_().nan_to_num_(nan=0)


def from_grid(codes: Tensor, scale: Tensor, zero: Tensor | None, group: int, rounding: Rounding) -> QWeight:
    """The weight with codes [n, k] on a grid."""
    low_code, _ = _codes(rounding)
    whole = (codes - low_code).to(torch.uint8)
    zero = None if zero is None else (zero - low_code).to(torch.int32)
    bits = 4 if rounding.form == "int4" else 8
    return affine(whole, bits, scale, zero, group, activations=rounding.activations)


def _codes(rounding: Rounding) -> tuple[int, int]:
    """Return the smallest and the largest code of an integer form."""
    half = 8 if rounding.form == "int4" else 128
    return -half, half - 1


def _between(columns: Tensor, k: int, rounding: Rounding) -> QWeight:
    """Sixteen codes from the lowest value to the highest, as llama.cpp's Q4_1 has them."""
    n, _, group = columns.shape
    lowest, highest = columns.amin(2), columns.amax(2)
    low = lowest.to(rounding.scale_dtype)
    if bool(((low.float() - lowest).abs() > (highest - lowest) * _LOW_ERROR).any()):
        low = lowest
    scale = _usable((highest - low.float()) / 15, rounding)
    codes = (columns - low.float()[:, :, None]) / scale.float()[:, :, None]
    whole = codes.round_().clamp_(0, 15).nan_to_num_(nan=0).to(torch.uint8)
    return QWeight("int4", halves(_flat(whole, k)), n, k, group, scale, low, activations=rounding.activations)


def _usable(scale: Tensor, rounding: Rounding) -> Tensor:
    """Return the scale as stored, never zero: a group of zeros is exact with any scale. In float32, where the dtype
    lacks the range (float16)."""
    dtype = rounding.scale_dtype
    stored, eps = scale.to(dtype), torch.finfo(dtype).eps
    if bool(((stored.float() - scale).abs() > scale * eps).any() | (stored.isinf() & scale.isfinite()).any()):
        stored, eps = scale, torch.finfo(torch.float32).eps
    return torch.where(stored == 0, eps, stored)


def _flat(codes: Tensor, k: int) -> Tensor:
    return codes.reshape(len(codes), -1)[:, :k].contiguous()
