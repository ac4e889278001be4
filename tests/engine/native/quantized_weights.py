"""Random quantized weights of every form and kind of factors, for tests of what computes with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quant.weight import Activations, Factors, Form, QWeight, TwoLevel


@dataclass(frozen=True, slots=True)
class WeightKind:
    """A form of codes with its kinds of factors.

    Attributes:
        form: of the codes.
        scale, low: dtype of the factors, "signed" or "unsigned" for integers of two levels; None: there are none.
    """

    form: Form
    scale: torch.dtype | str
    low: torch.dtype | str | None = None


WEIGHT_KINDS = {
    "int4, scale": WeightKind("int4", torch.float16),
    "int4, scale and low (Q4_1)": WeightKind("int4", torch.float16, torch.float16),
    "int4, two levels (Q4_K)": WeightKind("int4", "unsigned", "signed"),
    "int4, bfloat16": WeightKind("int4", torch.bfloat16, torch.float16),
    "int4, float32": WeightKind("int4", torch.float32, torch.float32),
    "int8, scale (Q8_0)": WeightKind("int8", torch.float16),
    "int8, two levels (Q6_K)": WeightKind("int8", "signed"),
    "int8, two levels and low (Q5_K)": WeightKind("int8", "unsigned", "unsigned"),
    "int8, scale and low (Q5_1)": WeightKind("int8", torch.float16, torch.float16),
    "int8, float32": WeightKind("int8", torch.float32, torch.bfloat16),
    "fp8": WeightKind("fp8", torch.float32),
    "fp8, scale and low": WeightKind("fp8", torch.bfloat16, torch.float32),
}
"""Name -> every kind that the kernels distinguish."""


def random_weight(kind: WeightKind, n: int, k: int, group: int, *, seed: int = 0, ordered: bool = False) -> QWeight:
    """W [n, k] with every code, also the largest and smallest."""
    random = torch.Generator().manual_seed(1000 * n + k + seed)
    if kind.form == "int4":
        codes = torch.randint(0, 256, (n, -(-k // 2)), generator=random, dtype=torch.uint8)
    elif kind.form == "int8":
        codes = torch.randint(-128, 128, (n, k), generator=random, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (n, k), generator=random, dtype=torch.uint8)
        codes = torch.where(codes & 127 == 127, codes - 1, codes).view(torch.float8_e4m3fn)  # 127 would be NaN
    groups = -(-k // group)
    order = torch.randperm(k, generator=random) if ordered else None
    scale = _factors(kind.scale, n, groups, random)
    low = None if kind.low is None else _factors(kind.low, n, groups, random)
    return QWeight(kind.form, codes, n, k, group, scale, low, order=order)


def int8_rows(n: int, k: int, *, activations: Activations | None = None, seed: int = 0) -> QWeight:
    """int8 with a scale a row, and as many codes of -128 and 127 as come."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (n, k), generator=random, dtype=torch.int8)
    scale = torch.rand(n, 1, generator=random) * 1e-2 + 1e-4
    return QWeight("int8", codes, n, k, k, scale, activations=activations)


def _factors(kind: torch.dtype | str, n: int, groups: int, random: torch.Generator) -> Factors:
    if isinstance(kind, torch.dtype):
        return _numbers(n, groups, random).to(kind)
    steps = _numbers(n, -(-groups // 3), random).half()
    least, most, dtype = (0, 256, torch.uint8) if kind == "unsigned" else (-128, 128, torch.int8)
    return TwoLevel(torch.randint(least, most, (n, groups), generator=random, dtype=dtype), steps, 3)


def _numbers(n: int, count: int, random: torch.Generator) -> Tensor:
    return torch.randn(n, count, generator=random) * 0.01
