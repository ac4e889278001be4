"""Weights of four or eight bits times float inputs on a GPU, in Triton: W4A16 and W8A16.

A weight is read in the layout of `QWeight`: a tile of codes is unpacked and dequantized in registers and passed
directly to the matrix units, so memory traffic is that of the small form for small and large batches. Each weight is
rounded once to the inputs' dtype, as `QWeight.dequantize` does, and sums are kept in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.quant.weight import Factors, QWeight, TwoLevel

_COLUMNS = 64
"""Of the weight, that a turn of the loop multiplies; more where groups are larger, up to the double."""


@triton.jit
def _factor(codes, step, rows, groups, row_stride, step_stride, mask, PER: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 factors of `groups` of `rows`, which have one shape; PER 0: they are plain floats."""
    each = tl.load(codes + rows * row_stride + groups, mask=mask, other=0).to(tl.float32)
    if PER > 0:
        each *= tl.load(step + rows * step_stride + groups // PER, mask=mask, other=0).to(tl.float32)
    return each


@triton.jit(do_not_specialize=("T",))  # of a step: it would be compiled for 1, for multiples of 16, for others
def _small_weight_product(  # type: ignore[no-untyped-def]
    x, codes, scale, scale_step, low, low_step, bias, y,
    T, N, x_stride, code_stride, scale_stride, scale_step_stride, low_stride, low_step_stride,
    K: tl.constexpr, GROUP: tl.constexpr, SCALE_PER: tl.constexpr, LOW_PER: tl.constexpr,
    PACKED: tl.constexpr, HAS_LOW: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """y[T, N] = x[T, K] W^T + bias; a program computes ROWS x OUTS of it, COLUMNS of K a turn.

    K is a constant of the kernel: the interpreter of Triton 3.6 takes no other as a loop's bound.

    Packed codes hold the even column in the lower half of a byte: a turn multiplies the even columns, then the odd.
    """
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    rows, outs = t < T, n < N
    x_rows = x + t.to(tl.int64)[:, None] * x_stride
    n64 = n.to(tl.int64)[:, None]
    sums = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    BYTES: tl.constexpr = COLUMNS // 2 if PACKED else COLUMNS
    for first in range(0, K, COLUMNS):
        if PACKED:
            column = first + 2 * tl.arange(0, BYTES)
            place = first // 2 + tl.arange(0, BYTES)
        else:
            column = first + tl.arange(0, BYTES)
            place = column
        inside = column < K
        mask = outs[:, None] & inside[None, :]
        code = tl.load(codes + n64 * code_stride + place[None, :], mask=mask, other=0)
        if GROUP % COLUMNS == 0:
            group = tl.full((OUTS, 1), 0, tl.int32) + first // GROUP
            known = outs[:, None]
        else:
            group = tl.zeros((OUTS, 1), tl.int32) + (column // GROUP)[None, :]
            known = mask
        s = _factor(scale, scale_step, n64, group, scale_stride, scale_step_stride, known, SCALE_PER)
        if HAS_LOW:
            lowest = _factor(low, low_step, n64, group, low_stride, low_step_stride, known, LOW_PER)
        if PACKED:
            even = (code & 15).to(tl.float32) * s
            odd = (code >> 4).to(tl.float32) * s
            if HAS_LOW:
                even += lowest
                odd += lowest
            odd_inside = column + 1 < K
            left = tl.load(x_rows + column[None, :], mask=rows[:, None] & inside[None, :], other=0)
            right = tl.load(x_rows + column[None, :] + 1, mask=rows[:, None] & odd_inside[None, :], other=0)
            even, odd = even.to(left.dtype), odd.to(right.dtype)
            if UPCAST:
                left, right = left.to(tl.float32), right.to(tl.float32)
                even, odd = even.to(tl.float32), odd.to(tl.float32)
            sums = tl.dot(left, tl.trans(even), sums, input_precision="ieee")
            sums = tl.dot(right, tl.trans(odd), sums, input_precision="ieee")
        else:
            weight = code.to(tl.float32) * s
            if HAS_LOW:
                weight += lowest
            part = tl.load(x_rows + column[None, :], mask=rows[:, None] & inside[None, :], other=0)
            weight = weight.to(part.dtype)
            if UPCAST:
                part, weight = part.to(tl.float32), weight.to(tl.float32)
            sums = tl.dot(part, tl.trans(weight), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=outs, other=0).to(tl.float32)[None, :]
    places = y + t.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(places, sums.to(y.dtype.element_ty), mask=rows[:, None] & outs[None, :])


class SmallWeightProduct:
    """x W^T + b with codes of four or eight bits, in float16, bfloat16 or float32; bias [n] of any float dtype.

    Args:
        upcast: multiply in float32 whatever the inputs' dtype is. Triton's interpreter needs it for bfloat16, whose
            products it gets wrong (seen in 3.6 and 3.9).
    """

    def __init__(self, weight: QWeight, bias: Tensor | None, upcast: bool = False) -> None:
        self._weight = weight
        self._scale, self._scale_step, self._scale_per = _parts(weight.scale)
        low = weight.scale if weight.low is None else weight.low
        self._low, self._low_step, self._low_per = _parts(low)
        self._bias = None if bias is None else bias.contiguous()
        columns = _COLUMNS * 2 if weight.group % (_COLUMNS * 2) == 0 or weight.groups == 1 else _COLUMNS
        self._columns = columns
        self._group = columns << 20 if weight.groups == 1 else weight.group
        self._upcast = upcast

    def __call__(self, x: Tensor) -> Tensor:
        """[T, k] -> [T, n], in x's dtype."""
        weight = self._weight
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        elif x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(len(x), weight.n, dtype=x.dtype, device=x.device)
        if not len(x):
            return y
        rows, outs = _tile(len(x))
        grid = (triton.cdiv(weight.n, outs), triton.cdiv(len(x), rows))
        _small_weight_product[grid](
            x, weight.codes, self._scale, self._scale_step, self._low, self._low_step,
            y if self._bias is None else self._bias, y,
            len(x), weight.n, x.stride(0), weight.codes.stride(0), self._scale.stride(0),
            self._scale_step.stride(0), self._low.stride(0), self._low_step.stride(0),
            K=weight.k, GROUP=self._group, SCALE_PER=self._scale_per, LOW_PER=self._low_per,
            PACKED=weight.form == "int4", HAS_LOW=weight.low is not None, HAS_BIAS=self._bias is not None,
            ROWS=rows, OUTS=outs, COLUMNS=self._columns, UPCAST=self._upcast,
        )  # fmt: skip
        return y


def _tile(rows: int) -> tuple[int, int]:
    """Rows of x and of the weight that a program multiplies: thin batches are split over more programs."""
    if rows <= 16:
        return 16, 32
    if rows <= 32:
        return 32, 64
    return (64, 64) if rows <= 64 else (128, 128)


def _parts(factors: Factors) -> tuple[Tensor, Tensor, int]:
    """Numbers a group, their steps (the numbers again where there are none) and groups that share a step, or 0."""
    if isinstance(factors, TwoLevel):
        return factors.codes, factors.step, factors.per
    return factors, factors, 0
