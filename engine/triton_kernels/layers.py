"""What a decoder layer computes between its products, in Triton: a sum and its norm, queries and keys and the write of
the cache, an MLP's activation. They are computed in float32 and rounded where torch's form rounds, but for rotations
and activations, which are rounded once.

A kernel whose result one product reads may make that product's fp8 codes: a program has a whole row in registers, so
the row's scale costs no further pass over memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.models.base import LayerCache
from engine.models.layer_ops.base import Activation, HeadLayout, Update
from engine.models.rope import Rotation
from engine.quant.base import Fp8Input, Fp8Rows, Rows
from engine.triton_kernels.rounding import row_codes, row_scale, to_e4m3

FP8 = torch.float8_e4m3fn

MAX_FP8_COLUMNS = 32_768
"""Of an MLP's values whose codes are made: gate and up of a row fill a program's registers."""

_ACTIVATION_COLUMNS = 1024
"""That a program computes where no codes are made."""

_HEAD_ELEMENTS = 2048
"""Of the query heads of a program."""


@triton.jit
def _store_codes(  # type: ignore[no-untyped-def]
    x, codes, scales, fixed, row, column, inside, SIZE: tl.constexpr, FIXED: tl.constexpr, BY_HAND: tl.constexpr
):
    """Quantizes a whole row, float32, as `engine.triton_kernels.fp8.quantize_rows`."""
    size = tl.abs(x)
    scale = row_scale(tl.max(tl.where(size < float("inf"), size, float("inf")), 0), fixed, FIXED)
    tl.store(codes + row * SIZE + column, row_codes(x, scale, BY_HAND), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _norm_row(  # type: ignore[no-untyped-def]
    x, weight, column, inside, epsilon, SIZE: tl.constexpr, LAYER_NORM: tl.constexpr, BIAS: tl.constexpr
):
    """The norm of a row, float32; zeros outside."""
    if LAYER_NORM:
        x = tl.where(inside, x - tl.sum(x, 0) / SIZE, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon) * tl.load(weight + column, mask=inside, other=0.0)
    if BIAS:
        x += tl.load(weight + SIZE + column, mask=inside, other=0.0)
    return x


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    hidden, made, out, scales, made_norm, norm, epsilon, made_scale, factor, fixed,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, HAS_UPDATE: tl.constexpr, HAS_MADE_NORM: tl.constexpr,
    HAS_NORM: tl.constexpr, LAYER_NORM: tl.constexpr, MADE_BIAS: tl.constexpr, BIAS: tl.constexpr,
    CODES: tl.constexpr, FIXED: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """A program updates a row of the residual, and norms it.

    Args:
        hidden, made, out: [T, SIZE]; hidden = (hidden + made_scale * norm(made)) * factor.
        made_norm, norm: float32 [SIZE], with a bias [2, SIZE].
        scales, fixed: CODES: of `out`, which is float8_e4m3fn; FIXED: by a calibrated factor.
        COLUMNS: SIZE up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < SIZE
    dtype = hidden.dtype.element_ty
    place = row * SIZE + column
    x = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        update = tl.load(made + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_MADE_NORM:
            update = _norm_row(update, made_norm, column, inside, epsilon, SIZE, LAYER_NORM, MADE_BIAS)
            update = update.to(dtype).to(tl.float32)
        x += (update * made_scale).to(dtype).to(tl.float32)
        x = (x.to(dtype).to(tl.float32) * factor).to(dtype)
        tl.store(hidden + place, x, mask=inside)
        x = x.to(tl.float32)
    if HAS_NORM:
        x = _norm_row(x, norm, column, inside, epsilon, SIZE, LAYER_NORM, BIAS).to(dtype)
        if CODES:
            _store_codes(x.to(tl.float32), out, scales, fixed, row, column, inside, SIZE, FIXED, BY_HAND)
        else:
            tl.store(out + place, x, mask=inside)


@triton.jit
def _sum_of_heads(x, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of each head of x [heads, half], or the sum of all of them for each; [heads, 1]."""
    sums = tl.sum(x, 1)
    if WHOLE:
        sums = tl.zeros_like(sums) + tl.sum(sums, 0)
    return sums[:, None]


@triton.jit
def _norm_heads(  # type: ignore[no-untyped-def]
    first, second, weight, place, inside, epsilon,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WHOLE: tl.constexpr, LAYER_NORM: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The norm of heads, in halves [heads, half]; WHOLE: of all HEADS as one vector. Zeros outside."""
    SIZE: tl.constexpr = HEADS * HEAD_DIM if WHOLE else HEAD_DIM
    if LAYER_NORM:
        mean = _sum_of_heads(first + second, WHOLE) / SIZE
        first, second = tl.where(inside, first - mean, 0.0), tl.where(inside, second - mean, 0.0)
    scale = tl.rsqrt(_sum_of_heads(first * first + second * second, WHOLE) / SIZE + epsilon)
    first, second = first * scale, second * scale
    if WEIGHTED:
        first *= tl.load(weight + place, mask=inside, other=0.0)
        second *= tl.load(weight + place + HEAD_DIM // 2, mask=inside, other=0.0)
    return first, second


@triton.jit
def _norm_and_rotate(  # type: ignore[no-untyped-def]
    row, weight, place, inside, cos, sin, epsilon,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NORMED: tl.constexpr, LATE: tl.constexpr, WHOLE: tl.constexpr,
    LAYER_NORM: tl.constexpr,
):  # fmt: skip
    """Halves [heads, half] of queries or keys at `place` of a row, float32."""
    first = tl.load(row + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row + place + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if NORMED and not LATE:
        first, second = _norm_heads(
            first, second, weight, place, inside, epsilon, HEADS, HEAD_DIM, WHOLE, LAYER_NORM, True
        )
    first, second = first * cos - second * sin, second * cos + first * sin
    if NORMED and LATE:
        first, second = _norm_heads(
            first, second, weight, place, inside, epsilon, HEADS, HEAD_DIM, WHOLE, LAYER_NORM, True
        )
    return first, second


@triton.jit
def _store_heads(  # type: ignore[no-untyped-def]
    first, second, stored, scales, slot, head, place, inside,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SCALED: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Puts a token's keys or values, halves in the model's dtype, into its slot; SCALED: as `store_tokens_scaled`."""
    at = stored + slot * (KV_HEADS * HEAD_DIM) + place
    if SCALED:
        first, second = first.to(tl.float32), second.to(tl.float32)
        larger = tl.maximum(_finite_size(first), _finite_size(second))
        largest = tl.max(tl.where(inside, larger, 0.0), 1)
        broken = largest == float("inf")
        scale = largest * (1 / 448)
        scale = tl.where((scale > 0) & (largest < float("inf")), scale, 1.0)
        tl.store(scales + slot * KV_HEADS + head, tl.where(broken, float("nan"), scale), mask=head < KV_HEADS)
        first, second = tl.where(broken[:, None], 0.0, first), tl.where(broken[:, None], 0.0, second)
        first = to_e4m3(tl.minimum(tl.maximum(first / scale[:, None], -448.0), 448.0), BY_HAND)
        second = to_e4m3(tl.minimum(tl.maximum(second / scale[:, None], -448.0), 448.0), BY_HAND)
    tl.store(at, first, mask=inside)
    tl.store(at + HEAD_DIM // 2, second, mask=inside)


@triton.jit
def _finite_size(x):  # type: ignore[no-untyped-def]
    """Absolute values; infinity for NaN, too."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, float("inf"))


@triton.jit(do_not_specialize=("slots",))
def _rotate_and_store(  # type: ignore[no-untyped-def]
    qkv, weight, cos, sin, growth, q, keys, values, key_scales, value_scales, slots, epsilon,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, FIRST_VALUE: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr, KV_TILE: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, LATE: tl.constexpr,
    WHOLE: tl.constexpr, LAYER_NORM: tl.constexpr, VALUE_NORM: tl.constexpr, GROWS: tl.constexpr, SCALED: tl.constexpr,
    BY_HAND: tl.constexpr,
):  # fmt: skip
    """A program takes a token and TILE of its query heads, or all of its keys and values, which go into its slot;
    slot -1: nowhere.

    Args:
        qkv: [T, WIDTH], heads of queries, of keys, from FIRST_VALUE on of values.
        weight: NORMED: float32 [HEADS + KV_HEADS, HEAD_DIM]; LATE: of rotated heads; WHOLE: all heads are one vector.
        cos, sin: [T, HEAD_DIM], see `Rotation`.  growth: GROWS: float32 [T], factors of queries.
        q: [T, HEADS, HEAD_DIM].  keys, values, key_scales, value_scales, slots: see `LayerCache`.
        KV_TILE, HALF: KV_HEADS, and half of HEAD_DIM, up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF)
    in_half = column < HEAD_DIM // 2
    of_cos = token * HEAD_DIM + column
    cos = tl.load(cos + of_cos, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin + of_cos + HEAD_DIM // 2, mask=in_half, other=0.0).to(tl.float32)[None, :]
    row = qkv + token * WIDTH
    dtype = q.dtype.element_ty
    if tl.program_id(1) * TILE < HEADS:
        head = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = (head < HEADS)[:, None] & in_half[None, :]
        place = head[:, None] * HEAD_DIM + column[None, :]
        first, second = _norm_and_rotate(
            row, weight, place, inside, cos, sin, epsilon, HEADS, HEAD_DIM, NORMED, LATE, WHOLE, LAYER_NORM
        )
        if GROWS:
            factor = tl.load(growth + token)
            first, second = first * factor, second * factor
        into = q + token * (HEADS * HEAD_DIM) + place
        tl.store(into, first.to(dtype), mask=inside)
        tl.store(into + HEAD_DIM // 2, second.to(dtype), mask=inside)
    elif KV_HEADS > 0:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            head = tl.arange(0, KV_TILE)
            inside = (head < KV_HEADS)[:, None] & in_half[None, :]
            place = head[:, None] * HEAD_DIM + column[None, :]
            of_keys = place + HEADS * HEAD_DIM
            first, second = _norm_and_rotate(
                row, weight, of_keys, inside, cos, sin, epsilon, KV_HEADS, HEAD_DIM, NORMED, LATE, WHOLE, LAYER_NORM
            )
            _store_heads(
                first.to(dtype), second.to(dtype), keys, key_scales, slot, head, place, inside, KV_HEADS, HEAD_DIM,
                SCALED, BY_HAND,
            )  # fmt: skip
            of_values = place + FIRST_VALUE * HEAD_DIM
            first = tl.load(row + of_values, mask=inside, other=0.0)
            second = tl.load(row + of_values + HEAD_DIM // 2, mask=inside, other=0.0)
            if VALUE_NORM:
                first, second = _norm_heads(
                    first.to(tl.float32), second.to(tl.float32), weight, place, inside, epsilon, KV_HEADS, HEAD_DIM,
                    False, LAYER_NORM, False,
                )  # fmt: skip
            _store_heads(
                first.to(dtype), second.to(dtype), values, value_scales, slot, head, place, inside, KV_HEADS, HEAD_DIM,
                SCALED, BY_HAND,
            )  # fmt: skip


@triton.jit
def _activate(  # type: ignore[no-untyped-def]
    made, out, scales, fixed,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, CODES: tl.constexpr,
    FIXED: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """A program computes COLUMNS of a row: the activation of the gate times up; not GATED: of up.

    Args:
        made: [T, 2 * SIZE], gates, then up; not GATED: [T, SIZE].  out: [T, SIZE].
        scales, fixed: CODES: as of `_add_norm`; COLUMNS is then SIZE up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    start = made + row * (2 * SIZE if GATED else SIZE) + column
    x = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(start + SIZE, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "relu2":
        x = tl.where(x < 0, 0.0, x)  # NaN stays
        x = x * x
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "clamped_swiglu":
        x = tl.where(x > 7.0, 7.0, x)
        x = x * tl.sigmoid(1.702 * x)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    else:
        x = x * tl.sigmoid(x)
    if GATED:
        x *= up
    x = x.to(made.dtype.element_ty)
    if CODES:
        _store_codes(x.to(tl.float32), out, scales, fixed, row, column, inside, SIZE, FIXED, BY_HAND)
    else:
        tl.store(out + row * SIZE + column, x, mask=inside)


def add_norm(
    hidden: Tensor, update: Update | None, norm: Tensor | None, epsilon: float, form: Fp8Input | None = None, *,
    layer_norm: bool = False, interpreted: bool = False,
) -> Rows:  # fmt: skip
    """`LayerOps.add_norm` in one launch.

    Args:
        form: of the codes that are returned; None: a tensor is.
        layer_norm: the norms subtract the mean first.
        interpreted: by Triton's interpreter, which rounds to float8 wrongly.
    """
    count, size = hidden.shape
    columns = triton.next_power_of_2(size)
    made = hidden if update is None else update.made.contiguous()
    made_norm = None if update is None else update.norm
    out, scales, result = (hidden, hidden, hidden) if norm is None else _outputs(hidden, size, form)
    if count:
        _add_norm[(count,)](
            hidden, made, out, scales, hidden if made_norm is None else made_norm, hidden if norm is None else norm,
            epsilon, 1.0 if update is None else update.scale, 1.0 if update is None else update.factor, _fixed(form),
            SIZE=size, COLUMNS=columns, HAS_UPDATE=update is not None, HAS_MADE_NORM=made_norm is not None,
            HAS_NORM=norm is not None, LAYER_NORM=layer_norm, MADE_BIAS=made_norm is not None and made_norm.dim() == 2,
            BIAS=norm is not None and norm.dim() == 2, CODES=norm is not None and form is not None,
            FIXED=form is not None and form.scale is not None, BY_HAND=interpreted, num_warps=_warps(columns),
        )  # fmt: skip
    return result


def rotate_and_store(
    heads: HeadLayout, qkv: Tensor, qk_norm: Tensor | None, rotation: Rotation, growth: Tensor | None,
    cache: LayerCache | None, epsilon: float, *, layer_norm: bool = False, interpreted: bool = False,
) -> Tensor:  # fmt: skip
    """`LayerOps.rotate` in one launch, and the write of keys and values.

    Args:
        cache: where they go; None: the layer makes none.
        layer_norm, interpreted: as of `add_norm`.

    Returns:
        q [T, num_heads, head_dim].
    """
    assert (cache is None) == (heads.num_kv_heads == 0)
    count, dim = len(qkv), heads.head_dim
    q = torch.empty(count, heads.num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    half, whole = triton.next_power_of_2(dim // 2), heads.qk_norm == "projection"
    tile = triton.next_power_of_2(heads.num_heads)
    if not whole:
        tile = min(tile, max(1, _HEAD_ELEMENTS // (2 * half)))
    kv_tile = triton.next_power_of_2(max(1, heads.num_kv_heads))
    keys, values, key_scales, value_scales, slots = (q, q, None, None, q) if cache is None else cache
    if count:
        _rotate_and_store[(count, triton.cdiv(heads.num_heads, tile) + (cache is not None))](
            qkv, q if qk_norm is None else qk_norm, rotation.cos, rotation.sin, q if growth is None else growth, q,
            keys, values, q if key_scales is None else key_scales, q if value_scales is None else value_scales, slots,
            epsilon,
            WIDTH=qkv.stride(0), HEADS=heads.num_heads, KV_HEADS=heads.num_kv_heads, FIRST_VALUE=heads.first_value,
            HEAD_DIM=dim, TILE=tile, KV_TILE=kv_tile, HALF=half, NORMED=qk_norm is not None, LATE=heads.late_qk_norm,
            WHOLE=whole, LAYER_NORM=layer_norm, VALUE_NORM=heads.value_norm, GROWS=growth is not None,
            SCALED=key_scales is not None, BY_HAND=interpreted, num_warps=_warps(2 * half * max(tile, kv_tile)),
        )  # fmt: skip
    return q


def activate(activation: Activation, made: Tensor, form: Fp8Input | None = None, *, interpreted: bool = False) -> Rows:
    """`LayerOps.activate` in one launch; `form`, `interpreted`: as of `add_norm`, rows of up to `MAX_FP8_COLUMNS`."""
    gated = not activation.startswith("plain_")
    count, size = len(made), made.shape[1] // (2 if gated else 1)
    out, scales, result = _outputs(made, size, form)
    columns = _ACTIVATION_COLUMNS if form is None else triton.next_power_of_2(size)
    if count:
        _activate[(count, triton.cdiv(size, columns))](
            made, out, scales, _fixed(form),
            SIZE=size, COLUMNS=columns, ACTIVATION=activation.removeprefix("plain_"), GATED=gated,
            CODES=form is not None, FIXED=form is not None and form.scale is not None, BY_HAND=interpreted,
            num_warps=_warps(columns),
        )  # fmt: skip
    return result


def _outputs(x: Tensor, size: int, form: Fp8Input | None) -> tuple[Tensor, Tensor, Rows]:
    """New memory for rows of `size` like x's, for their scales, and both as a result."""
    if form is None:
        out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
        return out, out, out
    codes = torch.empty(len(x), size, dtype=FP8, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    return codes, scales, Fp8Rows(codes, scales, x.dtype)


def _fixed(form: Fp8Input | None) -> float:
    return 0.0 if form is None or form.scale is None else form.scale


def _warps(elements: int) -> int:
    """Of a program: 16 elements a thread, while there are threads."""
    return min(16, max(1, elements // 512))
