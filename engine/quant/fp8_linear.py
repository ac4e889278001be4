"""fp8 weights times fp8 inputs on the device's matrix units: through torch's scaled product where a row of the weight
has one factor, and on Hopper where blocks of 128 x 128 or groups of 128 columns have theirs; through our own kernel
where other groups do, and on other devices.

Each row of the input gets its own factor as it comes (each group of a row, if the weight has groups), unless the
checkpoint was calibrated with one for all. A row's result depends on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from engine.quant.base import Fp8Input, Fp8Rows
from engine.quant.weight import QWeight

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max

_ALIGNMENT = 16
"""Rows and columns of a weight come in multiples of it, or the product refuses them."""

_LEAST_GROUP = 32
"""Columns of a group, and what they must be a multiple of: a product of the matrix units takes so many."""

_BLOCK = 128
"""Rows and columns of a block, and columns of a group, in torch's product."""

_BLOCK_ROWS = 4
"""Rows of its input come in multiples of it."""

_BLOCKS_ON, _BLOCKS_SINCE = 9, (12, 9)
"""Major compute capability of the devices that have it, and the version of CUDA."""

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
    # By a tensor: torch multiplies by a number's reciprocal on CUDA, which rounds otherwise.
    scales = peaks / torch.full_like(peaks, LARGEST) if scale is None else torch.full_like(peaks, scale)
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


class BlockFp8Kernel:
    """W8A8 in fp8, where groups of 128 columns have factors: torch's product, by cuBLASLt."""

    name = "fp8 blocks"
    repacks = False

    def runs(self, weight: QWeight) -> bool:
        """On Hopper, the only device whose cuBLASLt does (12.9)."""
        device = weight.codes.device
        if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _BLOCKS_ON:
            return False
        there = torch.version.cuda is not None and tuple(map(int, torch.version.cuda.split("."))) >= _BLOCKS_SINCE
        return there and find_spec("triton") is not None and multiplies_blocks(weight)

    def prepare(self, weight: QWeight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        from engine.triton_kernels.fp8 import quantize_groups  # noqa: PLC0415 - comes with CUDA's torch

        return BlockFp8Product(weight, bias, quantize_groups)


def multiplies_blocks(weight: QWeight) -> bool:
    """Whether torch's product of blocks supports the weight and its checkpoint's quantization of inputs."""
    if weight.activations is None or weight.activations.scale is not None or not multiplies_groups(weight):
        return False
    return weight.group == _BLOCK and weight.n % _ALIGNMENT == 0 and weight.k % _ALIGNMENT == 0


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
    """x W^T + b with an fp8 weight [n, k]; bias [n] of any float dtype.

    Attributes:
        input: how x is quantized.
    """

    def __init__(self, weight: QWeight, bias: Tensor | None) -> None:
        assert weight.activations is not None
        self._weight = weight.codes.t()  # the product's second operand is column-major
        self._scale = weight.scale.float().reshape(1, -1).contiguous()
        self.input = Fp8Input(weight.activations.scale)
        self._quantize = quantizer(weight.codes.device)
        self._bias = None if bias is None else bias.to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, k] -> [T, n], in x's dtype; sums are kept in float32, on Hopper in the fewer bits of its matrix units
        ("fast accumulation"), and rounded to bfloat16."""
        return self.multiply(Fp8Rows(*self._quantize(x, self.input.scale), x.dtype))

    def multiply(self, rows: Fp8Rows) -> Tensor:
        """Likewise of rows that are quantized already."""
        y: Tensor = torch._scaled_mm(
            rows.codes, self._weight, scale_a=rows.scales, scale_b=self._scale, bias=self._bias,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip
        return y.to(rows.dtype)


class BlockFp8Product:
    """x W^T + b with an fp8 weight [n, k] in blocks of 128 x 128 or groups of 128 columns; bias [n] of any float
    dtype.

    Args:
        quantize: `engine.triton_kernels.fp8.quantize_groups`.
    """

    def __init__(self, weight: QWeight, bias: Tensor | None, quantize: Callable[..., tuple[Tensor, Tensor]]) -> None:
        assert isinstance(weight.scale, Tensor)
        self._weight = weight.codes.t()  # the product's second operand is column-major
        scale, self._recipe = weight.scale.float(), ScalingType.BlockWise1x128
        blocks = scale[::_BLOCK]
        if torch.equal(blocks.repeat_interleave(_BLOCK, 0)[: weight.n], scale):
            # A column of blocks has room for a multiple of four factors (cuBLAS, "Scaling factors layouts").
            scale, self._recipe = F.pad(blocks, (0, -blocks.shape[1] % 4)), ScalingType.BlockWise128x128
            self._scale = scale.contiguous().t()
        else:
            self._scale = scale.t().contiguous().t()
        self._quantize = quantize
        self._bias = None if bias is None else bias.to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, k] -> [T, n], in x's dtype; sums are kept in float32 and rounded to bfloat16."""
        rows, scales = self._quantize(x, _BLOCK, multiple=_BLOCK_ROWS)
        y = F.scaled_mm(
            rows, self._weight, scales, ScalingType.BlockWise1x128, self._scale, self._recipe, bias=self._bias,
            output_dtype=torch.bfloat16,
        )  # fmt: skip
        return y[: len(x)].to(x.dtype)


def quantizer(device: torch.device) -> Callable[[Tensor, float | None], tuple[Tensor, Tensor]]:
    """Return the function that quantizes rows on a device: one launch on a GPU with Triton, else torch's operators."""
    if device.type != "cuda" or find_spec("triton") is None:
        return quantize_rows_fp8
    from engine.triton_kernels.fp8 import quantize_rows  # noqa: PLC0415 - comes with CUDA's torch

    return quantize_rows
