"""Low-rank products beside a decoder's own, with torch's operators: a pair for each run of tokens with one adapter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.adapter import Adapter
from engine.adapters.targets import Product
from engine.models.decoder import HeadAttention, Layer
from engine.models.experts import Mlp
from engine.quant.base import Linear


def runs_of(slots: NDArray[np.int32] | None) -> Iterator[tuple[int, int, int]]:
    """Yield (slot, first token, token behind the last) of neighbours with one adapter; slots int32 [T], -1: none."""
    if slots is None or not len(slots):
        return
    borders = np.flatnonzero(np.diff(slots)) + 1
    for first, end in zip((0, *borders.tolist()), (*borders.tolist(), len(slots)), strict=True):
        if slots[first] >= 0:
            yield int(slots[first]), first, end


class StepRuns:
    """The runs of the step that is being computed; all products of a decoder read them.

    Attributes:
        runs: (slot, first token, token behind the last).
    """

    __slots__ = ("runs",)

    def __init__(self) -> None:
        self.runs: tuple[tuple[int, int, int], ...] = ()

    def set(self, slots: NDArray[np.int32] | None) -> None:
        """Begin a step; slots as of `runs_of`."""
        self.runs = tuple(runs_of(slots))


class AdaptedLinear:
    """A `Linear`, and the low-rank products of the adapters in slots.

    Attributes:
        slots: per slot A [rank, in_features] and B [out_features, rank]; None: nothing is added.
    """

    __slots__ = ("_base", "_step", "in_features", "out_features", "slots")

    def __init__(self, base: Linear, step: StepRuns, max_loras: int) -> None:
        self._base = base
        self._step = step
        self.in_features, self.out_features = base.in_features, base.out_features
        self.slots: list[tuple[Tensor, Tensor] | None] = [None] * max_loras

    def __call__(self, x: Tensor) -> Tensor:
        y = self._base(x)
        for slot, first, end in self._step.runs:
            if (pair := self.slots[slot]) is not None:
                y[first:end] += F.linear(F.linear(x[first:end], pair[0]), pair[1])
        return y


class AdaptedLayers:
    """A decoder's layers with slots for adapters.

    Attributes:
        layers: in the place of those without.
        step: of all their products.
    """

    def __init__(self, layers: tuple[Layer, ...], max_loras: int, dtype: torch.dtype, device: torch.device) -> None:
        self.step = StepRuns()
        self._max_loras = max_loras
        self._dtype, self._device = dtype, device
        self._linears: dict[tuple[int, Product], AdaptedLinear] = {}
        self.layers = tuple(self._adapted(index, layer) for index, layer in enumerate(layers))

    def load(self, slot: int, adapter: Adapter | None) -> None:
        """Put an adapter into a slot; None: empty it."""
        for (layer, product), linear in self._linears.items():
            linear.slots[slot] = None
            if adapter is not None and (change := adapter.read(layer, product)) is not None:
                linear.slots[slot] = change.a.to(self._device, self._dtype), change.b.to(self._device, self._dtype)

    def _adapted(self, index: int, layer: Layer) -> Layer:
        assert isinstance(layer.attention, HeadAttention), "`find_targets` refuses other layers"
        attention = replace(layer.attention, qkv=self._linear(index, "qkv", layer.attention.qkv))
        output = self._linear(index, "output", layer.output)
        mlp = layer.mlp
        if isinstance(mlp, Mlp):
            mlp = Mlp(self._linear(index, "gate_up", mlp.gate_up), self._linear(index, "down", mlp.down))
        return replace(layer, attention=attention, output=output, mlp=mlp)

    def _linear(self, index: int, product: Product, base: Linear | None) -> AdaptedLinear:
        assert base is not None
        linear = self._linears[index, product] = AdaptedLinear(base, self.step, self._max_loras)
        return linear
