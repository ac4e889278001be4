"""Weights of four or eight bits times float inputs on a GPU, in Triton: W4A16 and W8A16.

A weight is read in the layout of `QWeight`. Each element is rounded once to the inputs' dtype, as `QWeight.dequantize`
does, and sums are kept in float32. Up to `MAX_ROWS` rows, a tile of codes is dequantized in registers and passed
directly to the matrix units, so memory traffic is that of the small form; where the weight's rows are too few to occupy
a GPU, several programs share their columns, and a second kernel joins the sums. With more rows a tile would be
dequantized by several programs: the weight is dequantized into memory instead, once, and multiplied by torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from engine.quant.weight import Factors, QWeight, TwoLevel

MAX_ROWS = 128
"""Of a product that is computed from the small form."""

_OUTS, _COLUMNS = 64, 64
"""Rows of the weight that a program multiplies, and its columns in a turn of the loop. With more of these the compiler
spills registers."""

_STAGES = {16: 6, 32: 5, 64: 4, MAX_ROWS: 3}
"""Rows of x that a program multiplies -> turns on their way (Triton's stages): thin batches wait for memory."""

_JOINED = 1024
"""Outputs of a row that a program joins."""

_SCRATCH_BYTES = 256 << 20
"""Of a dequantized weight, or of a part of it, that is multiplied at once."""

_SPLIT_TURNS = 8
"""Minimum turns of a program's loop that are worth a second kernel."""

_PROGRAMS = 4
"""Of a multiprocessor, that splitting aims at."""


@triton.jit
def _factor(codes, step, rows, groups, row_stride, step_stride, mask, PER: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 factors of `groups` of `rows`, which have one shape; PER 0: they are plain floats."""
    each = tl.load(codes + rows * row_stride + groups, mask=mask, other=0).to(tl.float32)
    if PER > 0:
        each *= tl.load(step + rows * step_stride + groups // PER, mask=mask, other=0).to(tl.float32)
    return each


@triton.jit
def _factors(  # type: ignore[no-untyped-def]
    codes, step, n, outs, first, row_stride, step_stride,
    K: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr,
    BYTES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """float32 factors of rows n for BYTES elements of codes, which hold COLUMNS columns from `first` on: [OUTS, BYTES],
    or [OUTS, 1] where the columns share a group."""
    if GROUP % COLUMNS == 0:
        group = tl.full((OUTS, 1), 0, tl.int32) + first // GROUP
        each = _factor(codes, step, n[:, None], group, row_stride, step_stride, outs[:, None], PER)
    elif WHOLE and COLUMNS % GROUP == 0:  # a load for each group, not one for each element
        GROUPS: tl.constexpr = COLUMNS // GROUP
        group = tl.zeros((OUTS, 1), tl.int32) + (first // GROUP + tl.arange(0, GROUPS))[None, :]
        each = _factor(codes, step, n[:, None], group, row_stride, step_stride, outs[:, None], PER)
        each = tl.reshape(tl.broadcast_to(each[:, :, None], (OUTS, GROUPS, BYTES // GROUPS)), (OUTS, BYTES))
    else:
        column = first + COLUMNS // BYTES * tl.arange(0, BYTES)
        group = tl.zeros((OUTS, 1), tl.int32) + (column // GROUP)[None, :]
        mask = outs[:, None] & (column < K)[None, :]
        each = _factor(codes, step, n[:, None], group, row_stride, step_stride, mask, PER)
    return each


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    codes, scale, scale_step, low, low_step, n, outs, first,
    code_stride, scale_stride, scale_step_stride, low_stride, low_step_stride,
    K: tl.constexpr, GROUP: tl.constexpr, SCALE_PER: tl.constexpr, LOW_PER: tl.constexpr,
    PACKED: tl.constexpr, HAS_LOW: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """float32 weights of COLUMNS columns from `first` on, of rows n: where codes are PACKED, of the even columns and of
    the odd ones, [OUTS, COLUMNS / 2] each; else [OUTS, COLUMNS], twice."""
    BYTES: tl.constexpr = COLUMNS // 2 if PACKED else COLUMNS
    place = (first // 2 if PACKED else first) + tl.arange(0, BYTES)
    # A mask over columns would make the compiler read byte by byte.
    mask = outs[:, None]
    if not WHOLE:
        mask = mask & (place * (COLUMNS // BYTES) < K)[None, :]
    code = tl.load(codes + n[:, None] * code_stride + place[None, :], mask=mask, other=0)
    s = _factors(
        scale, scale_step, n, outs, first, scale_stride, scale_step_stride,
        K, GROUP, SCALE_PER, OUTS, COLUMNS, BYTES, WHOLE,
    )  # fmt: skip
    if PACKED:
        even, odd = (code & 15).to(tl.float32) * s, (code >> 4).to(tl.float32) * s
    else:
        even = code.to(tl.float32) * s
        odd = even
    if HAS_LOW:
        lowest = _factors(
            low, low_step, n, outs, first, low_stride, low_step_stride,
            K, GROUP, LOW_PER, OUTS, COLUMNS, BYTES, WHOLE,
        )  # fmt: skip
        even += lowest
        odd += lowest
    return even, odd


@triton.jit(do_not_specialize=("T",))  # of a step: it would be compiled for 1, for multiples of 16, for others
def _small_weight_product(  # type: ignore[no-untyped-def]
    x, codes, scale, scale_step, low, low_step, bias, y,
    T, N, x_stride, code_stride, scale_stride, scale_step_stride, low_stride, low_step_stride,
    K: tl.constexpr, GROUP: tl.constexpr, SCALE_PER: tl.constexpr, LOW_PER: tl.constexpr,
    PACKED: tl.constexpr, HAS_LOW: tl.constexpr, HAS_BIAS: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """y[T, N] = x[T, K] W^T + bias; a program computes OUTS columns of it, of at most ROWS rows, COLUMNS of K a turn.

    With SPLITS each program of the grid's second axis takes SPAN columns of K, and y is float32 [SPLITS, T, N] without
    bias. K is a constant of the kernel: the interpreter of Triton 3.6 takes no other as a loop's bound.

    Packed codes hold the even column in the lower half of a byte: a turn multiplies the even columns, then the odd.
    """
    WHOLE: tl.constexpr = SPAN * SPLITS == K and SPAN % COLUMNS == 0
    t = tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    rows, outs = t < T, n < N
    x_rows = x + t.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    begin = tl.program_id(1) * SPAN
    for turn in range(0, SPAN, COLUMNS):
        first = begin + turn
        even, odd = _weights(
            codes, scale, scale_step, low, low_step, n.to(tl.int64), outs, first,
            code_stride, scale_stride, scale_step_stride, low_stride, low_step_stride,
            K, GROUP, SCALE_PER, LOW_PER, PACKED, HAS_LOW, OUTS, COLUMNS, WHOLE,
        )  # fmt: skip
        column = first + tl.arange(0, COLUMNS)
        mask = rows[:, None] if WHOLE else rows[:, None] & (column < K)[None, :]
        part = tl.load(x_rows + column[None, :], mask=mask, other=0)
        even, odd = even.to(part.dtype), odd.to(part.dtype)
        if UPCAST:
            part, even, odd = part.to(tl.float32), even.to(tl.float32), odd.to(tl.float32)
        if PACKED:
            left, right = tl.split(tl.reshape(part, (ROWS, COLUMNS // 2, 2)))
            sums = tl.dot(left, tl.trans(even), sums, input_precision="ieee")
            sums = tl.dot(right, tl.trans(odd), sums, input_precision="ieee")
        else:
            sums = tl.dot(part, tl.trans(even), sums, input_precision="ieee")
    if HAS_BIAS and SPLITS == 1:
        sums += tl.load(bias + n, mask=outs, other=0).to(tl.float32)[None, :]
    row = tl.program_id(1).to(tl.int64) * T + t
    places = y + row[:, None] * N + n[None, :]
    tl.store(places, sums.to(y.dtype.element_ty), mask=rows[:, None] & outs[None, :])


@triton.jit(do_not_specialize=("T",))
def _join_sums(  # type: ignore[no-untyped-def]
    parts, bias, y, T, N, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, OUTS: tl.constexpr
):
    """y[T, N] = the sum of parts float32 [SPLITS, T, N], in their order, plus bias; a program joins OUTS of a row."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    sums = tl.load(parts + row * N + n, mask=n < N, other=0)
    for split in range(1, SPLITS):
        sums += tl.load(parts + (row + split * T.to(tl.int64)) * N + n, mask=n < N, other=0)
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    tl.store(y + row * N + n, sums.to(y.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=("first_row",))
def _dequantize(  # type: ignore[no-untyped-def]
    codes, scale, scale_step, low, low_step, dense, first_row, N,
    code_stride, scale_stride, scale_step_stride, low_stride, low_step_stride,
    K: tl.constexpr, GROUP: tl.constexpr, SCALE_PER: tl.constexpr, LOW_PER: tl.constexpr,
    PACKED: tl.constexpr, HAS_LOW: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dense[n - first_row, K] = the weight's rows n from `first_row` on; a program writes OUTS x COLUMNS of it."""
    row = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    n = first_row + row
    outs = n < N
    first = tl.program_id(1) * COLUMNS
    even, odd = _weights(
        codes, scale, scale_step, low, low_step, n.to(tl.int64), outs, first,
        code_stride, scale_stride, scale_step_stride, low_stride, low_step_stride,
        K, GROUP, SCALE_PER, LOW_PER, PACKED, HAS_LOW, OUTS, COLUMNS, WHOLE,
    )  # fmt: skip
    # Rounded before they are put together: half of the bytes change their threads.
    even, odd = even.to(dense.dtype.element_ty), odd.to(dense.dtype.element_ty)
    weights = tl.interleave(even, odd) if PACKED else even
    column = first + tl.arange(0, COLUMNS)
    mask = outs[:, None] if WHOLE else outs[:, None] & (column < K)[None, :]
    tl.store(dense + row.to(tl.int64)[:, None] * K + column[None, :], weights, mask=mask)


class SmallWeightProduct:
    """x W^T + b with codes of four or eight bits, in float16, bfloat16 or float32; bias [n] of any float dtype.

    Args:
        upcast: multiply in float32 whatever the inputs' dtype is. Triton's interpreter needs it for bfloat16, whose
            products it gets wrong (seen in 3.6 and 3.9).
        processors: of the device, which thin batches are spread over; None: queried.
    """

    def __init__(
        self, weight: QWeight, bias: Tensor | None, upcast: bool = False, processors: int | None = None
    ) -> None:
        self._weight = weight
        self._scale, self._scale_step, scale_per = _parts(weight.scale)
        self._low, self._low_step, low_per = _parts(weight.scale if weight.low is None else weight.low)
        self._bias = None if bias is None else bias.contiguous()
        self._form = {
            "K": weight.k, "GROUP": _COLUMNS << 20 if weight.groups == 1 else weight.group,
            "SCALE_PER": scale_per, "LOW_PER": low_per, "PACKED": weight.form == "int4",
            "HAS_LOW": weight.low is not None, "OUTS": _OUTS, "COLUMNS": _COLUMNS,
        }  # fmt: skip
        parts = weight.codes, self._scale, self._scale_step, self._low, self._low_step
        self._strides = tuple(part.stride(0) for part in parts)
        self._upcast = upcast
        device = weight.codes.device
        if processors is None:
            on_cuda = device.type == "cuda"
            processors = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 1
        self._processors = processors

    def __call__(self, x: Tensor) -> Tensor:
        """[T, k] -> [T, n], in x's dtype."""
        weight = self._weight
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        elif x.stride(1) != 1:
            x = x.contiguous()
        return self._multiply_dense(x) if len(x) > MAX_ROWS else self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        weight, rows = self._weight, len(x)
        y = torch.empty(rows, weight.n, dtype=x.dtype, device=x.device)
        if not rows:
            return y
        tile = next(tile for tile in _STAGES if rows <= tile)
        splits = self._splits()
        parts = y if splits == 1 else torch.empty(splits, rows, weight.n, dtype=torch.float32, device=x.device)
        bias, has_bias = (y, False) if self._bias is None else (self._bias, True)
        _small_weight_product[(triton.cdiv(weight.n, _OUTS), splits)](
            x, weight.codes, self._scale, self._scale_step, self._low, self._low_step, bias, parts,
            rows, weight.n, x.stride(0), *self._strides, HAS_BIAS=has_bias, SPLITS=splits,
            SPAN=triton.cdiv(triton.cdiv(weight.k, splits), _COLUMNS) * _COLUMNS,
            ROWS=tile, UPCAST=self._upcast, num_stages=_STAGES[tile], **self._form,
        )  # fmt: skip
        if splits > 1:
            _join_sums[(triton.cdiv(weight.n, _JOINED), rows)](
                parts, bias, y, rows, weight.n, SPLITS=splits, HAS_BIAS=has_bias, OUTS=_JOINED
            )
        return y

    def _splits(self) -> int:
        """Return the programs that share the columns of rows of the weight, each with as many turns."""
        turns = triton.cdiv(self._weight.k, _COLUMNS)
        programs = _PROGRAMS * self._processors // triton.cdiv(self._weight.n, _OUTS)
        most = min(programs, turns // _SPLIT_TURNS)
        return max(splits for splits in range(1, max(1, most) + 1) if turns % splits == 0)

    def _multiply_dense(self, x: Tensor) -> Tensor:
        """Dequantize the weight into memory, as many of its rows at a time as `_SCRATCH_BYTES` hold, and multiply."""
        weight = self._weight
        step = min(weight.n, max(1, _SCRATCH_BYTES // (weight.k * x.itemsize)))
        dense = torch.empty(step, weight.k, dtype=x.dtype, device=x.device)
        bias = None if self._bias is None else self._bias.to(x.dtype)
        parts = []
        for first in range(0, weight.n, step):
            end = min(weight.n, first + step)
            _dequantize[(triton.cdiv(end - first, _OUTS), triton.cdiv(weight.k, _COLUMNS))](
                weight.codes, self._scale, self._scale_step, self._low, self._low_step, dense, first, end,
                *self._strides, WHOLE=weight.k % _COLUMNS == 0, **self._form,
            )  # fmt: skip
            parts.append(F.linear(x, dense[: end - first], None if bias is None else bias[first:end]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _parts(factors: Factors) -> tuple[Tensor, Tensor, int]:
    """Numbers a group, their steps (the numbers again where there are none) and groups that share a step, or 0."""
    if isinstance(factors, TwoLevel):
        return factors.codes, factors.step, factors.per
    return factors, factors, 0
