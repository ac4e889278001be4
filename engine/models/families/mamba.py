"""The families with Mamba-2 layers; see `engine.models.families.registry`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.families.dense import granite
from engine.models.families.description import decoder_spec, head_dim_of
from engine.models.families.mixtures import deepseek_experts, granitemoeshared, shared_mlp
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


def nemotron_h(config: Any) -> DecoderSpec:
    """Nemotron-H (2025), Nemotron Nano 2 and 3: each layer is one part, Mamba-2, attention without positions, an MLP or
    a mixture, none of which has gates. Layers that predict further tokens are not read.

    Step sizes are bounded by `time_step_limit`, as in training. transformers 5.24 also raises those of prompts (not of
    answers) to `time_step_min`, which is meant for their initial values.
    """
    for name, neutral in (("attention_bias", False), ("sliding_window", None), ("moe_latent_size", None)):
        if (value := getattr(config, name)) != neutral:
            raise UnsupportedModel(f"{name}={value!r} is not supported for {config.model_type} models")
    kinds = config.layers_block_type
    sparse = tuple(kind == "moe" for kind in kinds)
    shared = config.moe_shared_expert_intermediate_size
    mlps = frozenset(index for index, kind in enumerate(kinds) if kind in ("mlp", "moe"))
    return decoder_spec(
        config,
        activation=config.mlp_hidden_act,
        has_gates=False,
        layer_kinds=(*_KINDS, "mlp", "moe"),
        ropes=(no_rope(head_dim_of(config)),),
        state_layers=_nemotron_mamba(config),
        experts=deepseek_experts(config, sparse, shared_size=shared) if any(sparse) else None,
        without_mixer=mlps,
        without_mlp=frozenset(range(len(kinds))) - mlps,
        norm_eps=config.layer_norm_epsilon,
        norms=("norm", None, "norm", None),
        mlp_bias=bool(config.mlp_bias),
        weight_prefixes=("backbone.", "model."),
        ignored_weights=("mtp.",),
    )


def _nemotron_mamba(config: Any) -> MambaSpec:
    names = "n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim"
    groups, heads, key_dim, value_dim = state_sizes(config, *names)
    if config.mamba_hidden_act not in ("silu", "swish"):
        raise UnsupportedModel(f"mamba_hidden_act is {config.mamba_hidden_act!r}, but must be silu")
    return _mamba_spec(
        layers_with_states(config, "linear_attention"),
        (groups, heads, key_dim, value_dim, kernel_size(config, "conv_kernel")),
        config.time_step_limit,
        module="mixer",
        bias=bool(config.use_bias),
        conv_bias=bool(config.use_conv_bias),
    )


def _mamba(config: Any) -> MambaSpec:
    groups, heads, key_dim, value_dim = state_sizes(config, *_SIZES)
    inner = int(config.mamba_expand * config.hidden_size)
    if heads * value_dim != inner:
        raise UnsupportedModel(f"mamba_n_heads of mamba_d_head are {heads * value_dim}, but mamba_expand gives {inner}")
    if config.hidden_act not in ("silu", "swish"):  # of the convolution, too
        raise UnsupportedModel(f"hidden_act is {config.hidden_act!r}, but must be silu in {config.model_type} models")
    return _mamba_spec(
        layers_with_states(config, "linear_attention"),
        (groups, heads, key_dim, value_dim, kernel_size(config, "mamba_d_conv")),
        config.time_step_limit,
        bias=bool(config.mamba_proj_bias),
        conv_bias=bool(config.mamba_conv_bias),
    )


def _mamba_spec(
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
