"""The families with gated delta nets; see `engine.models.families.registry`."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.families.description import decoder_spec, head_dim_of
from engine.models.families.mixtures import experts_with_gate, sparse_layers
from engine.models.families.state_layers import kernel_size, layers_with_states, state_sizes
from engine.models.rope import rope_spec
from engine.models.state_layers.delta import DeltaSpec
from engine.models.state_layers.recurrence import RecurrenceShape

_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip


def qwen3_next(config: Any) -> DecoderSpec:
    """Qwen3-Next (2025): three of four layers are gated delta nets, and mixtures with a shared expert."""
    layers, renormalize = sparse_layers(config), bool(config.norm_topk_prob)
    experts = experts_with_gate(config, layers=layers, renormalize=renormalize)
    return _qwen(config, interleaved=True, experts=experts)


def qwen3_5(config: Any) -> DecoderSpec:
    """Qwen 3.5 (2026), dense: Qwen3-Next without mixtures. The three positions of a token differ in images only."""
    return _qwen(config, interleaved=False)


def qwen3_5_moe(config: Any) -> DecoderSpec:
    """Qwen 3.5 (2026), its mixtures."""
    return _qwen(config, interleaved=False, experts=experts_with_gate(config))


def _qwen(config: Any, *, interleaved: bool, **differences: Any) -> DecoderSpec:
    """Layers that predict further tokens are not read."""
    bias = bool(config.attention_bias)
    rope = rope_spec(config, head_dim_of(config), partial=True, ignored=("mrope_section", "mrope_interleaved"))
    return decoder_spec(
        config,
        layer_kinds=("full_attention", "linear_attention"),
        ropes=(rope,),
        state_layers=_delta(config, interleaved=interleaved),
        gated_attention=True,
        qk_norm="head",
        norm_offset=True,
        qkv_bias=bias,
        output_bias=bias,
        ignored_weights=("mtp.",),
        **differences,
    )


def _delta(config: Any, *, interleaved: bool) -> DeltaSpec:
    key_heads, value_heads, key_dim, value_dim = state_sizes(config, *_SIZES)
    if value_heads % key_heads:
        raise UnsupportedModel(
            f"linear_num_value_heads is {value_heads}, but must be a multiple of linear_num_key_heads, {key_heads}"
        )
    kernel = kernel_size(config, "linear_conv_kernel_dim")
    if config.hidden_act not in ("silu", "swish"):  # of the convolution, too
        raise UnsupportedModel(f"hidden_act is {config.hidden_act!r}, but must be silu in {config.model_type} models")
    layers = layers_with_states(config, "linear_attention")
    return DeltaSpec(layers, RecurrenceShape(key_heads, value_heads, key_dim, value_dim, kernel), interleaved)
