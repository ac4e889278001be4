"""The families with Mamba-2 layers; see `engine.models.families.registry`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.families.dense import granite
from engine.models.families.description import decoder_spec, head_dim_of
from engine.models.families.mixtures import granitemoeshared, shared_mlp
from engine.models.families.state_layers import kernel_size, layers_with_states, state_sizes
from engine.models.rope import no_rope, rope_spec
from engine.models.state_layers.mamba import MambaSpec
from engine.models.state_layers.recurrence import RecurrenceShape

_SIZES = ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head")
"""Key heads, value heads, and the elements of a key and of a value."""

_KINDS = ("full_attention", "linear_attention")


def granitemoehybrid(config: Any) -> DecoderSpec:
    """Granite 4 (2025): Mamba-2 in most layers or in none, attention perhaps without positions, and one MLP or a
    mixture beside it."""
    states = {"state_layers": _mamba(config), "layer_kinds": _KINDS} if "linear_attention" in config.layer_types else {}
    if config.num_local_experts:
        return _without_positions(config, granitemoeshared(config, **states))
    inner = config.shared_intermediate_size
    stored_as = shared_mlp(config, "mlp")
    return _without_positions(config, granite(config, intermediate_size=inner, stored_as=stored_as, **states))


def _without_positions(config: Any, spec: DecoderSpec) -> DecoderSpec:
    if config.position_embedding_type == "rope":
        return spec
    if config.position_embedding_type not in (None, "nope"):
        raise UnsupportedModel(
            f"position_embedding_type is {config.position_embedding_type!r}, but must be 'rope' or null"
        )
    return replace(spec, ropes=(no_rope(spec.head_dim),))


def bamba(config: Any) -> DecoderSpec:
    """Bamba (IBM, Princeton and UIUC, 2024): Llama, most layers of which are Mamba-2; the others rotate half of each
    head."""
    bias = bool(config.attention_bias)
    return decoder_spec(
        config,
        layer_kinds=_KINDS,
        ropes=(rope_spec(config, head_dim_of(config), partial=True),),
        state_layers=_mamba(config),
        norms=("input_layernorm", None, "pre_ff_layernorm", None),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.mlp_bias),
    )


def _mamba(config: Any) -> MambaSpec:
    groups, heads, key_dim, value_dim = state_sizes(config, *_SIZES)
    inner = int(config.mamba_expand * config.hidden_size)
    if heads * value_dim != inner:
        raise UnsupportedModel(f"mamba_n_heads of mamba_d_head are {heads * value_dim}, but mamba_expand gives {inner}")
    if config.hidden_act not in ("silu", "swish"):  # of the convolution, too
        raise UnsupportedModel(f"hidden_act is {config.hidden_act!r}, but must be silu in {config.model_type} models")
    return mamba_spec(
        layers_with_states(config, "linear_attention"),
        (groups, heads, key_dim, value_dim, kernel_size(config, "mamba_d_conv")),
        config.time_step_limit,
        bias=bool(config.mamba_proj_bias),
        conv_bias=bool(config.mamba_conv_bias),
    )


def mamba_spec(
    layers: tuple[bool, ...], sizes: tuple[int, int, int, int, int], time_steps: Any, **differences: Any
) -> MambaSpec:
    """`sizes`: as the first ones of `RecurrenceShape`.  time_steps: bounds of step sizes, as configs give them."""
    groups, heads = sizes[:2]
    if heads % groups:
        raise UnsupportedModel(f"{heads} Mamba heads can't share {groups} groups evenly")
    least, most = (0.0, math.inf) if time_steps is None else map(float, time_steps)
    if not 0 <= least < most:
        raise UnsupportedModel(f"time_step_limit is {[least, most]}, but must be two numbers from 0, ascending")
    shape = RecurrenceShape(*sizes, values_first=True, delta_rule=False)
    return MambaSpec(layers, shape, time_steps=(least, most), **differences)
