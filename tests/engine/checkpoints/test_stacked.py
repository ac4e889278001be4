"""Stacked tensors, seen one by one: the same rows, whatever the source can read in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.checkpoints.checkpoint import WeightSource
from engine.checkpoints.stacked import UnstackedWeights
from engine.errors import CorruptWeights
from engine.models.load import open_model
from engine.quant.rtn import Rounding, round_to_nearest
from engine.quant.weight import QWeight

QKV = {"q_proj": 48, "k_proj": 24, "v_proj": 24}
LAYER = "model.layers.0.self_attn"


class WholeTensors:
    """A source that reads no parts, and has every matrix rounded to int8."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.names, self.shape, self.read = source.names, source.shape, source.read

    def quantized(self, name: str) -> QWeight | None:
        return round_to_nearest(read(self._source, name), Rounding("int8"))


def read(source: Any, name: str) -> torch.Tensor:
    into = torch.empty(source.shape(name))
    source.read(name, into)
    return into


@pytest.mark.parametrize("parts", [True, False])
def test_joined_parts_are_the_stored_tensor(parts: bool, tiny_model: Any) -> None:
    weights = open_model(tiny_model("phi3")).weights
    source = UnstackedWeights(weights if parts else WholeTensors(weights), {"qkv_proj": QKV})
    assert f"{LAYER}.qkv_proj.weight" not in source.names
    names = [f"{LAYER}.{part}.weight" for part in QKV]
    assert set(names) < set(source.names)
    whole = read(weights, f"{LAYER}.qkv_proj.weight")
    assert torch.equal(torch.cat([read(source, name) for name in names]), whole)
    assert torch.equal(read(source, f"{LAYER}.o_proj.weight"), read(weights, f"{LAYER}.o_proj.weight"))
    for axis, first, end in ((0, 5, 17), (1, 7, 40)):
        into = torch.empty(24, 48).narrow(axis, 0, end - first).clone()
        source.read_part(names[1], axis, first, end, into)
        assert torch.equal(into, whole[48:72].narrow(axis, first, end - first))
    if not parts:
        apart = [source.quantized(name) for name in names]
        again = torch.cat([weight.dequantize() for weight in apart if weight is not None])
        assert torch.equal(again, round_to_nearest(whole, Rounding("int8")).dequantize())


def test_a_tensor_of_other_rows_is_named(tiny_model: Any) -> None:
    source = UnstackedWeights(open_model(tiny_model("phi3")).weights, {"qkv_proj": {**QKV, "v_proj": 25}})
    with pytest.raises(CorruptWeights, match=r"qkv_proj\.weight has shape \[96, 48\], but the config asks for 97 rows"):
        source.shape(f"{LAYER}.k_proj.weight")
