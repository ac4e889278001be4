"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): rounds a weight column by column; the remaining columns compensate each
error, according to the inputs' correlations.

As in the paper's algorithm 1 the inverse of H = X^T X enters by its Cholesky factor, and updates are lazy, a block of
columns at a time. The most important columns go first (the authors' "act-order"), but each stays in its group:
grids are chosen before, so the result has no column order. A grid may cover less than a group's whole range where
that costs less, weighted by the inputs.

The decoder runs once over all calibration text. Each product receives its inputs from the quantized products
before it, is quantized with them, and passes on its own quantized output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.decoder_builder import TorchBuilder
from engine.models.head_order import qkv_order
from engine.quant.base import Linear
from engine.quant.rtn import Rounding, from_grid, integer_grid, on_grid
from engine.quant.weight import QWeight

PRODUCTS = 4
"""Of a decoder's layer: of q, k and v, output, gate and up, down."""

DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to it (the paper, section 3.3)."""

_BLOCK = 128
"""Columns whose updates are applied to the rest together."""

_SHARES = tuple(1.0 - step / 20 for step in range(9))
"""Parts of a group's range that a grid may cover."""


def gptq(weight: Tensor, gram: Tensor, rounding: Rounding, damping: float = DAMPING) -> QWeight:
    """The weight [n, k] of any float dtype on an integer grid.

    Args:
        gram: X^T X of the inputs X [tokens, k] that it is multiplied with, float32 or float64 [k, k].
    """
    assert rounding.form != "fp8", "GPTQ rounds to integers"
    n, k = weight.shape
    group = min(rounding.group or k, k)
    gram = gram.double()
    seen = gram.diagonal()
    scale, zero = _grids(weight.float(), seen.float(), group, rounding)
    order = torch.argsort(seen, descending=True, stable=True)
    factor = _inverse_factor(gram[order][:, order], damping)
    left = weight.float()[:, order]
    left[:, seen[order] == 0] = 0.0  # columns whose inputs are always zero
    groups = (order // group).tolist()
    codes = torch.empty(n, k)
    for first in range(0, k, _BLOCK):
        end = min(k, first + _BLOCK)
        wrong = torch.empty(n, end - first)
        for column in range(first, end):
            own = slice(groups[column], groups[column] + 1)
            grid = scale[:, own], None if zero is None else zero[:, own]
            value = left[:, column : column + 1]
            code = on_grid(value, *grid, rounding)
            codes[:, column : column + 1] = code
            error = (value - _value(code, *grid)) / factor[column, column]
            left[:, column:end] -= error * factor[column, column:end]
            wrong[:, column - first : column - first + 1] = error
        left[:, end:] -= wrong @ factor[first:end, end:]
    return from_grid(torch.empty_like(codes).index_copy_(1, order, codes), scale, zero, group, rounding)


def _inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """float32 [k, k], upper: U with U^T U = H^-1, of H with a damped diagonal."""
    damped = gram.clone()
    diagonal = damped.diagonal()
    diagonal += damping * float(diagonal.mean()) or 1.0
    while True:
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
            return upper.float()
        diagonal += 10 * damping * float(diagonal.mean())


def _grids(weight: Tensor, seen: Tensor, group: int, rounding: Rounding) -> tuple[Tensor, Tensor | None]:
    """The grid of each group with the least error, where columns count as much as their inputs are large: [n, groups]
    each, for a weight [n, k] and the sums of squares [k] of inputs."""
    pad = -weight.shape[1] % group
    columns = F.pad(weight, (0, pad)).view(len(weight), -1, group)
    counts = F.pad(seen, (0, pad)).view(1, -1, group)
    best: tuple[Tensor, Tensor, Tensor | None] | None = None
    for share in _SHARES:
        scale, zero = integer_grid(columns, rounding, share)
        grid = scale[:, :, None], None if zero is None else zero[:, :, None]
        error = ((_value(on_grid(columns, *grid, rounding), *grid) - columns).square() * counts).sum(2)
        if best is None:
            best = error, scale, zero
            continue
        better = error < best[0]
        kept = None if zero is None or best[2] is None else torch.where(better, zero, best[2])
        best = torch.where(better, error, best[0]), torch.where(better, scale, best[1]), kept
    assert best is not None
    return best[1], best[2]


def _value(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    return (codes if zero is None else codes - zero) * scale.float()


class _Calibrated:
    """A product that is quantized with its first inputs, which must be all inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, builder: CalibratingBuilder) -> None:
        self.out_features, self.in_features = weight.shape
        self._dense: Tensor | None = weight
        self._bias = bias
        self._builder = builder

    def __call__(self, x: Tensor) -> Tensor:
        """Raises `UnsupportedModel` when it is called again."""
        if self._dense is None:
            raise UnsupportedModel("a product is computed twice in a step: it can't be calibrated in one")
        dense, self._dense = self._dense, None
        builder = self._builder
        fits = builder.rounding.group is None or self.in_features % builder.rounding.group == 0
        if fits:
            quantized = gptq(dense, _gram(x), builder.rounding)
            dense = quantized.dequantize(dense.dtype)
        builder.done.append(quantized if fits else None)
        builder.progress(len(builder.done))
        return F.linear(x, dense, self._bias)


@dataclass(frozen=True, slots=True)
class CalibratingBuilder(TorchBuilder):
    """Builds a decoder whose products quantize themselves as it runs.

    Attributes:
        rounding: to what.
        done: `PRODUCTS` a layer, in order; None: kept dense, because the group does not divide its columns.
        progress: is called with the number of those that are done.
    """

    quantize: Any = "dense"
    rounding: Rounding = field(default_factory=lambda: Rounding("int4", group=64))
    done: list[QWeight | None] = field(default_factory=list)
    progress: Callable[[int], None] = lambda done: None

    def linear(self, weight: Tensor | QWeight, bias: Tensor | None) -> Linear:
        assert isinstance(weight, Tensor)
        return _Calibrated(weight, bias, self)


def _gram(x: Tensor) -> Tensor:
    """X^T X, float64 [k, k], of x [tokens, k]; summed in pieces, so that float32 products lose nothing."""
    total = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for first in range(0, len(x), 1024):
        piece = x[first : first + 1024].float()
        total += (piece.t() @ piece).double()
    return total


def by_module(done: Sequence[QWeight | None], spec: DecoderSpec, prefix: str) -> dict[str, QWeight]:
    """The quantized products of a run by the names of the modules that they are made of, their rows as checkpoints
    order them. `prefix`: of the layers' names ("model.")."""
    found: dict[str, QWeight] = {}
    parts = (
        ("self_attn", spec.qkv_rows),
        ("self_attn", {"o_proj": spec.hidden_size}),
        ("mlp", spec.gate_up_rows(spec.intermediate_size)),
        ("mlp", {"down_proj": spec.hidden_size}),
    )
    assert len(parts) == PRODUCTS
    for number, weight in enumerate(done):
        if weight is None:
            continue
        layer, product = divmod(number, PRODUCTS)
        module, rows = parts[product]
        order = qkv_order(spec, layer) if product == 0 else None
        stored = weight if order is None else weight.take(order.argsort())
        first = 0
        for name, count in rows.items():
            found[f"{prefix}layers.{layer}.{module}.{name}"] = stored.rows(first, first + count)
            first += count
    return found
