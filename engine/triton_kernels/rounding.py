"""Rounding to float8_e4m3fn, also by hand, for Triton's interpreter, which omits the carry (1.95 becomes 1)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_e4m3(x, BY_HAND: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 from -448 to 448 to the nearest float8_e4m3fn, ties to even."""
    if BY_HAND:
        bits = x.to(tl.int32, bitcast=True)
        # Three bits of the mantissa stay; the carry runs into the exponent.
        carried = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        # Below 2^-6 values are 2^-9 apart, as float32 has them from 2^14 on.
        fixed = (x + 24576.0) - 24576.0
        x = tl.where(tl.abs(x) < 0.015625, fixed, carried)
    return x.to(tl.float8e4nv)


@triton.jit
def row_scale(largest, fixed, FIXED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row's factor, of its largest size: that over 448, or the fixed one; NaN where the row is not finite."""
    if FIXED:
        scale = tl.where(largest < float("inf"), fixed, float("nan"))
    else:  # a GPU's own division is an estimate
        scale = tl.where(largest < float("inf"), tl.div_rn(largest, 448.0), float("nan"))
    return scale


@triton.jit
def row_codes(each, scale, BY_HAND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of float32 values; zeros where the scale is 0 or NaN. On a GPU the quotients are estimates of two units
    in the last place: a value in the middle between two codes may take the other one."""
    code = each / tl.where(scale > 0, scale, 1.0)
    code = tl.where(scale > 0, tl.minimum(tl.maximum(code, -448.0), 448.0), 0.0)
    return to_e4m3(code, BY_HAND)
