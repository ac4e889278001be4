"""Weights with an adapter added to them: W + factor * B A in float32, for work that has no other adapter and none
without it. Its products then cost nothing.

Only float32 weights take it: the sum then differs from the products beside them by float32's rounding. In bfloat16, or
quantized, the sum would be rounded to fewer digits than the adapter's own, and answers would be those of another model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.adapters.adapter import Adapter, AdapterPart, find_target, open_adapter
from engine.adapters.places import AdapterPlaces
from engine.adapters.targets import find_targets
from engine.checkpoints.checkpoint import WeightSource
from engine.config import LoraConfig, Quantize
from engine.errors import EngineError, UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.quant.weight import QWeight

_INSTEAD = "leave out the merging, and its products are computed beside the model's"


class MergedWeights:
    """A `WeightSource` with an adapter added to the weights that it changes.

    Raises:
        UnsupportedModel: the adapter changes a weight that the source has not as one.
    """

    def __init__(self, source: WeightSource, adapter: Adapter, decoder: DecoderSpec) -> None:
        self._source = source
        self._adapter = adapter
        self._parts = _weights_of(source, adapter, decoder)

    @property
    def names(self) -> Collection[str]:
        return self._source.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, into: Tensor) -> None:
        self._source.read(name, into)
        if (part := self._parts.get(name)) is not None:
            a, b = self._adapter.matrices(part)
            into.addmm_(b.to(into.device), a.to(into.device), alpha=part.factor)

    def quantized(self, name: str) -> QWeight | None:
        weight = self._source.quantized(name)
        if weight is not None and name in self._parts:
            raise UnsupportedModel(
                f"{self._adapter.name} can't be merged into {name}, which is {weight.form}: the sum would be rounded; "
                f"dequantize the weights (--quantize dense), or {_INSTEAD}"
            )
        return weight


class AdapterMerger:
    """Adds the only adapter of a model to its weights while these are loaded.

    Args:
        lora, quantize, dtype: of the model.

    Raises:
        EngineError: there are several adapters, or the weights are not float32; says why that matters.
    """

    def __init__(self, lora: LoraConfig, quantize: Quantize, dtype: torch.dtype) -> None:
        if len(lora.adapters) != 1:
            raise EngineError(f"one adapter can be merged, but there are {len(lora.adapters)}; give one")
        ((self._name, folder),) = lora.adapters
        self._folder = Path(folder)
        self._opened: Adapter | None = None
        if dtype != torch.float32 or quantize not in ("none", "dense"):
            form = quantize if quantize not in ("none", "dense") else str(dtype).removeprefix("torch.")
            raise EngineError(
                f"{self._name} can't be merged into {form} weights: the sum would be rounded, and answers be those of "
                f"another model; use dtype float32 without quantization, or {_INSTEAD}"
            )

    def __call__(self, source: WeightSource, decoder: DecoderSpec) -> MergedWeights:
        """Return the weights to load. Raises what `open_adapter` and `MergedWeights` raise."""
        self._opened = open_adapter(self._name, self._folder, decoder)
        return MergedWeights(source, self._opened, decoder)

    def make_places(self) -> AdapterPlaces:
        """Return the scheduler's view of the loaded model: all rows have the adapter."""
        assert self._opened is not None, "the weights are loaded"
        return AdapterPlaces({self._name: self._opened.digest}, 1, is_merged=True)


def _weights_of(source: WeightSource, adapter: Adapter, decoder: DecoderSpec) -> Mapping[str, AdapterPart]:
    """Return the adapter's parts by the names of their weights."""
    targets = find_targets(decoder)
    by_target = {part.target: part for parts in adapter.parts.values() for part in parts}
    found = {}
    for name in source.names:
        target = find_target(name.removesuffix(".weight"), targets) if name.endswith(".weight") else None
        if target is not None and target in by_target:
            found[name] = by_target[target]
    if missing := by_target.keys() - {part.target for part in found.values()}:
        first = min(missing)
        raise UnsupportedModel(
            f"{adapter.name} can't be merged: its change of {first.product} in layer {first.layer} is of no weight of "
            f"its own in this checkpoint; {_INSTEAD}"
        )
    return found
