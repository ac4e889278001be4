"""Weights with an adapter added to them: W + factor * B A, for work that has no other adapter and none without it. The
step then computes a model without adapters.

The sum is that of PEFT's `merge_and_unload`: computed in float32, and rounded to the weight's dtype. In float32 it
differs from the products beside the weights by float32's rounding. In bfloat16 or float16 it is another model: of a
change that is small beside its weight, digits are lost. Weights that stay quantized would lose more, and are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path

from torch import Tensor

from engine.adapters.adapter import Adapter, AdapterPart, find_target, open_adapter
from engine.adapters.targets import find_targets
from engine.checkpoints.checkpoint import WeightSource
from engine.config import LoraConfig, Quantize
from engine.errors import EngineError, UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.quant.weight import QWeight

_INSTEAD = "leave out the merging, and its products are computed beside the model's"


class MergedWeights:
    """A `WeightSource` with an adapter added to the weights that it changes, which are dense.

    Raises:
        UnsupportedModel: the adapter changes a weight that the source has not as one, or that stays quantized.
    """

    def __init__(self, source: WeightSource, adapter: Adapter, decoder: DecoderSpec, quantize: Quantize) -> None:
        self._source = source
        self._adapter = adapter
        self._parts = _weights_of(source, adapter, decoder)
        _check_dense(source, self._parts, adapter.name, quantize)

    @property
    def names(self) -> Collection[str]:
        return self._source.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, into: Tensor) -> None:
        self._source.read(name, into)
        if (part := self._parts.get(name)) is not None:
            a, b = (matrix.to(into.device) for matrix in self._adapter.matrices(part))
            into.add_((b @ a).mul_(part.factor))  # rounded once, to the dtype of `into`

    def quantized(self, name: str) -> QWeight | None:
        return None if name in self._parts else self._source.quantized(name)


class AdapterMerger:
    """Adds the only adapter of a model to its weights while these are loaded.

    Raises:
        EngineError: there is no adapter, or there are several.
    """

    def __init__(self, lora: LoraConfig, quantize: Quantize) -> None:
        if len(lora.adapters) != 1:
            raise EngineError(f"one adapter can be merged, but there are {len(lora.adapters)}; give one")
        ((self._name, folder),) = lora.adapters
        self._folder = Path(folder)
        self._quantize: Quantize = quantize
        self._digest: bytes | None = None

    def __call__(self, source: WeightSource, decoder: DecoderSpec) -> MergedWeights:
        """Return the weights to load. Raises what `open_adapter` and `MergedWeights` raise."""
        adapter = open_adapter(self._name, self._folder, decoder)
        self._digest = adapter.digest
        return MergedWeights(source, adapter, decoder, self._quantize)

    @property
    def digest(self) -> bytes:
        """Of the adapter that was added."""
        assert self._digest is not None, "the weights are loaded"
        return self._digest


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


def _check_dense(source: WeightSource, parts: Mapping[str, AdapterPart], adapter: str, quantize: Quantize) -> None:
    """Check that these weights are dense when they are loaded."""
    if quantize == "dense":
        return
    into = f"weights that are quantized to {quantize} at load"
    if quantize == "none":
        stored = ((name, source.quantized(name)) for name in sorted(parts))
        into = next((f"{name}, which is {weight.form}" for name, weight in stored if weight is not None), "")
        if not into:
            return
    num_parameters = sum(prod(source.shape(one)) for one in source.names)
    raise UnsupportedModel(
        f"{adapter} can't be merged into {into}: the sum would be rounded to fewer digits than the adapter has; "
        f"load them as dense ones (--quantize dense, which takes 4 bytes for each of {num_parameters:,} parameters in "
        f"float32, 2 in bfloat16), or {_INSTEAD}"
    )
