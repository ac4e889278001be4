"""The modules of a model that adapters may change, by their names in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec

Product = Literal["qkv", "output", "gate_up", "down"]
"""A layer's matrix products, as the decoders compute them."""

PRODUCTS: tuple[Product, ...] = ("qkv", "output", "gate_up", "down")

_OUTPUTS = ("o_proj", "out_proj")
_MLPS = ("mlp", "feed_forward")


class Target(NamedTuple):
    """A module's share of a product.

    Attributes:
        layer, product: that it is a part of.
        first, rows: its rows among those of the product, as checkpoints store them.
        columns: of its weight.
    """

    layer: int
    product: Product
    first: int
    rows: int
    columns: int


def find_targets(spec: DecoderSpec) -> Mapping[str, Target]:
    """Return what adapters may change: module -> its place, such as "layers.0.self_attn.q_proj".

    Raises:
        UnsupportedModel: adapters are not supported for the architecture.
    """
    if not spec.is_plain or spec.without_mixer or spec.without_mlp or spec.latent or spec.state_layers:
        raise UnsupportedModel(
            f"adapters are not supported for {spec.architecture}: its layers have parts besides attention and an MLP"
        )
    found: dict[str, Target] = {}
    hidden = spec.hidden_size
    for layer in range(spec.num_layers):
        name = f"layers.{layer}"
        _add(found, f"{name}.self_attn", layer, "qkv", spec.qkv_rows, hidden)
        for output in _OUTPUTS:
            _add(found, f"{name}.self_attn", layer, "output", {output: hidden}, spec.attended_size)
        if spec.experts is None or not spec.experts.layers[layer]:
            inner = spec.intermediate_size
            for block in _MLPS:
                _add(found, f"{name}.{block}", layer, "gate_up", spec.gate_up_rows(inner), hidden)
                _add(found, f"{name}.{block}", layer, "down", {"down_proj": hidden}, inner)
    return found


def _add(
    found: dict[str, Target], block: str, layer: int, product: Product, modules: Mapping[str, int], columns: int
) -> None:
    first = 0
    for module, rows in modules.items():
        found[f"{block}.{module}"] = Target(layer, product, first, rows, columns)
        first += rows
