"""Low-rank products beside a decoder's own, with torch's operators: a pair for each run of tokens with one adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.adapter import Adapter, LowRank
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
        slots: per slot what is added; None: nothing.
    """

    __slots__ = ("_base", "_step", "in_features", "out_features", "slots")

    def __init__(self, base: Linear, step: StepRuns, max_loras: int) -> None:
        self._base = base
        self._step = step
        self.in_features, self.out_features = base.in_features, base.out_features
        self.slots: list[LowRank | None] = [None] * max_loras

    def __call__(self, x: Tensor) -> Tensor:
        y = self._base(x)
        for slot, first, end in self._step.runs:
            if (change := self.slots[slot]) is not None:
                y[first:end] += F.linear(F.linear(x[first:end], change.a), change.b)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class TorchAdapter:
    """An adapter that slots can take.

    Attributes:
        changes: (layer, product) -> what it adds, in host memory.
    """

    changes: Mapping[tuple[int, Product], LowRank]

    @property
    def nbytes(self) -> int:
        """Of all its matrices."""
        return sum(matrix.nbytes for change in self.changes.values() for matrix in change)


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

    def pack(self, adapter: Adapter) -> TorchAdapter:
        """Read an adapter into host memory, in the layers' dtype."""
        changes = {at: change for at in self._linears if (change := adapter.read(*at)) is not None}
        return TorchAdapter({at: LowRank(*(one.to(self._dtype) for one in low)) for at, low in changes.items()})

    def place(self, slot: int, adapter: TorchAdapter | None) -> None:
        """Put an adapter into a slot; None: empty it."""
        for at, linear in self._linears.items():
            change = None if adapter is None else adapter.changes.get(at)
            linear.slots[slot] = None if change is None else LowRank(*(one.to(self._device) for one in change))

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
