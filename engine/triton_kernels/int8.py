"""W8A8 on a GPU, in Triton: what stands around torch's int8 product, in a launch before it and one behind it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_COLUMNS = 8192
"""Of a row, that a program holds at once."""

_OUTPUTS = 1024
"""Of a row, that a program scales."""


@triton.jit
def _quantize_rows(  # type: ignore[no-untyped-def]
    x, codes, scales, fixed, x_stride, K: tl.constexpr, COLUMNS: tl.constexpr, FIXED: tl.constexpr
):
    """A program quantizes a row, with one factor: its largest over 127, or the fixed one. A row that is not finite has
    the factor NaN."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        size = tl.abs(tl.load(x + row * x_stride + column, mask=column < K, other=0).to(tl.float32))
        most = tl.maximum(most, tl.where(size < float("inf"), size, float("inf")))  # NaN is broken, too
    largest = tl.max(most, 0)
    scale = fixed if FIXED else largest / 127
    scale = tl.where(largest < float("inf"), scale, float("nan"))
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        each = tl.load(x + row * x_stride + column, mask=column < K, other=0).to(tl.float32)
        code = each / tl.where(scale > 0, scale, 1.0)
        code = tl.where(scale > 0, tl.minimum(tl.maximum(code, -128.0), 127.0), 0.0)
        # To the nearest whole number, ties to even: from 2^23 on float32 has no others.
        code = (code + 12582912.0) - 12582912.0
        tl.store(codes + row * K + column, code.to(tl.int8), mask=column < K)
    tl.store(scales + row, scale)


@triton.jit
def _scale_sums(  # type: ignore[no-untyped-def]
    sums, row_scales, scales, bias, y, N, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """y[T, N] = sums[T, N] times the factors of their rows and columns, plus bias; a program computes a part of a
    row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    each = tl.load(sums + row * N + column, mask=inside, other=0).to(tl.float32) * tl.load(row_scales + row)
    each *= tl.load(scales + column, mask=inside, other=0)
    if HAS_BIAS:
        each += tl.load(bias + column, mask=inside, other=0)
    tl.store(y + row * N + column, each.to(y.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor, scale: float | None, min_rows: int) -> tuple[Tensor, Tensor]:
    """As `engine.quant.int8_linear.quantize_rows`, or `quantize_by` with a scale, in one launch: x [rows, k] -> int8
    [max(rows, min_rows), k], of which further rows are undefined, and float32 [rows, 1]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, k = x.shape
    codes = torch.empty(max(rows, min_rows), k, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    columns = min(triton.next_power_of_2(k), _MOST_COLUMNS)
    _quantize_rows[(rows,)](
        x, codes, scales, scale or 0.0, x.stride(0), K=k, COLUMNS=columns, FIXED=scale is not None,
        num_warps=min(16, max(1, columns // 512)),
    )  # fmt: skip
    return codes, scales


def scale_sums(sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """int32 sums [at least T, n] of an int8 product -> [T, n].

    Args:
        row_scales, scales, bias: float32 [T, 1], [n] and [n].
    """
    rows, n = len(row_scales), sums.shape[1]
    y = torch.empty(rows, n, dtype=dtype, device=sums.device)
    _scale_sums[(rows, triton.cdiv(n, _OUTPUTS))](
        sums, row_scales, scales, scales if bias is None else bias, y, n, COLUMNS=_OUTPUTS, HAS_BIAS=bias is not None
    )
    return y
