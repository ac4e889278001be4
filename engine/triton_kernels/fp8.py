"""Products in fp8 on a GPU, in Triton: inputs quantized in one launch, weights whose groups of columns have factors.

Weights whose rows have one factor go through torch's scaled product, and need only the first. Blocks of 128 x 128
(DeepSeek-AI 2024, DeepSeek-V3, section 3.3.2) appear as groups of 128 columns, whose rows repeat their block's factor:
each group's product is scaled as it is added up in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.quant.weight import QWeight
from engine.triton_kernels.rounding import row_codes, row_scale

FP8 = torch.float8_e4m3fn

_MOST_COLUMNS = 8192
"""Of a row, that a program holds at once."""

_SETS = 16
"""Groups of a row that a program quantizes."""


@triton.jit
def _quantize_rows(  # type: ignore[no-untyped-def]
    x, codes, scales, fixed, x_stride,
    K: tl.constexpr, COLUMNS: tl.constexpr, FIXED: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """A program quantizes a row, with one factor: its largest over 448, or the fixed one."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        size = tl.abs(tl.load(x + row * x_stride + column, mask=column < K, other=0).to(tl.float32))
        most = tl.maximum(most, tl.where(size < float("inf"), size, float("inf")))  # NaN is broken, too
    largest = tl.max(most, 0)
    scale = row_scale(largest, fixed, FIXED)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        each = tl.load(x + row * x_stride + column, mask=column < K, other=0).to(tl.float32)
        tl.store(codes + row * K + column, row_codes(each, scale, BY_HAND), mask=column < K)
    tl.store(scales + row, scale)


@triton.jit
def _quantize_groups(  # type: ignore[no-untyped-def]
    x, codes, scales, x_stride, GROUPS, row_stride, group_stride,
    K: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, SETS: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """A program quantizes SETS groups of a row, each with a factor of its own; WIDTH: GROUP up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * SETS + tl.arange(0, SETS)
    within = tl.arange(0, WIDTH)
    column = group[:, None] * GROUP + within[None, :]
    inside = (within < GROUP)[None, :] & (column < K)
    each = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    size = tl.abs(each)
    largest = tl.max(tl.where(size < float("inf"), size, float("inf")), 1)
    scale = row_scale(largest, 0.0, False)
    tl.store(codes + row * K + column, row_codes(each, scale[:, None], BY_HAND), mask=inside)
    tl.store(scales + row * row_stride + group * group_stride, scale, mask=group < GROUPS)


@triton.jit(do_not_specialize=("T",))  # of a step: it would be compiled for 1, for multiples of 16, for others
def _grouped_product(  # type: ignore[no-untyped-def]
    x, x_scales, codes, scales, bias, y, T, N, code_stride, scale_stride, x_scale_stride,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr,
    X_GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """y[T, N] = x[T, K] W^T + bias, both of them fp8 with factors; a program computes ROWS x OUTS of it.

    X_GROUPS: x has a factor for each group, too; else one for a row.  COLUMNS: of K a turn, a divisor of GROUP.
    """
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    rows, outs = t < T, n < N
    t64, n64 = t.to(tl.int64), n.to(tl.int64)
    sums = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (column < K)[None, :]
        part = tl.load(x + t64[:, None] * K + column[None, :], mask=rows[:, None] & inside, other=0.0)
        weight = tl.load(codes + n64[:, None] * code_stride + column[None, :], mask=outs[:, None] & inside, other=0.0)
        if UPCAST:
            part, weight = part.to(tl.float32), weight.to(tl.float32)
        product = tl.dot(part, tl.trans(weight), input_precision="ieee")
        group = first // GROUP
        factor = tl.load(scales + n64 * scale_stride + group, mask=outs, other=0).to(tl.float32)
        product *= factor[None, :]
        if X_GROUPS:
            product *= tl.load(x_scales + t64 * x_scale_stride + group, mask=rows, other=0)[:, None]
        sums += product
    if not X_GROUPS:
        sums *= tl.load(x_scales + t64 * x_scale_stride, mask=rows, other=0)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=outs, other=0).to(tl.float32)[None, :]
    tl.store(y + t64[:, None] * N + n[None, :], sums.to(y.dtype.element_ty), mask=rows[:, None] & outs[None, :])


def quantize_rows(x: Tensor, scale: float | None = None, interpreted: bool = False) -> tuple[Tensor, Tensor]:
    """As `engine.quant.fp8_linear.quantize_rows_fp8`, in one launch: x [rows, k] -> float8_e4m3fn, float32 [rows, 1].

    Args:
        interpreted: by Triton's interpreter, which rounds to float8 wrongly.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, k = x.shape
    codes = torch.empty(rows, k, dtype=FP8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        columns = min(triton.next_power_of_2(k), _MOST_COLUMNS)
        _quantize_rows[(rows,)](
            x, codes, scales, scale or 0.0, x.stride(0), K=k, COLUMNS=columns, FIXED=scale is not None,
            BY_HAND=interpreted, num_warps=min(16, max(1, columns // 512)),
        )  # fmt: skip
    return codes, scales


def quantize_groups(
    x: Tensor, group: int, interpreted: bool = False, multiple: int | None = None
) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [rows, k] and float32 scales [rows, ceil(k / group)] for x [rows, k]; a group that holds NaN or
    infinity has the scale NaN.

    Args:
        multiple: as torch's scaled product takes blocks: rows up to a multiple of it, of which further ones are
            undefined, and a group's scales lie side by side.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, k = x.shape
    groups = -(-k // group)
    padded = rows if multiple is None else -(-rows // multiple) * multiple
    codes = torch.empty(padded, k, dtype=FP8, device=x.device)
    if multiple is None:
        scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    else:
        scales = torch.empty(groups, padded, dtype=torch.float32, device=x.device).t()
    if rows:
        _quantize_groups[(rows, triton.cdiv(groups, _SETS))](
            x, codes, scales, x.stride(0), groups, *scales.stride(),
            K=k, GROUP=group, WIDTH=triton.next_power_of_2(group), SETS=_SETS, BY_HAND=interpreted,
        )  # fmt: skip
    return codes, scales


class GroupedFp8Product:
    """x W^T + b with an fp8 weight [n, k] in groups of a multiple of 32 columns; bias [n] of any float dtype.

    Args:
        interpreted: by Triton's interpreter: multiply in float32, round by hand.
    """

    def __init__(self, weight: QWeight, bias: Tensor | None, interpreted: bool = False) -> None:
        assert weight.activations is not None
        assert isinstance(weight.scale, Tensor)
        self._weight, self._scale = weight, weight.scale
        self._input_scale = weight.activations.scale
        self._bias = None if bias is None else bias.contiguous()
        self._columns = min(128, weight.group & -weight.group)
        self._interpreted = interpreted

    def __call__(self, x: Tensor) -> Tensor:
        """[T, k] -> [T, n], in x's dtype; sums are kept in float32."""
        weight, fixed = self._weight, self._input_scale
        if fixed is None:
            rows, scales = quantize_groups(x, weight.group, self._interpreted)
        else:
            rows, scales = quantize_rows(x, fixed, self._interpreted)
        y = torch.empty(len(x), weight.n, dtype=x.dtype, device=x.device)
        if len(x):
            tile, outs = (16, 64) if len(x) <= 16 else (64, 128)
            _grouped_product[(triton.cdiv(weight.n, outs), triton.cdiv(len(x), tile))](
                rows, scales, weight.codes, self._scale, y if self._bias is None else self._bias, y,
                len(x), weight.n, weight.codes.stride(0), self._scale.stride(0), scales.stride(0),
                K=weight.k, GROUP=weight.group, ROWS=tile, OUTS=outs, COLUMNS=self._columns, X_GROUPS=fixed is None,
                HAS_BIAS=self._bias is not None, UPCAST=self._interpreted,
            )  # fmt: skip
        return y
