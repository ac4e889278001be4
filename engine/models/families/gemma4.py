"""Gemma 4 (2026): Gemma 3 whose full-attention layers have other heads; see `engine.models.families.registry`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec, LayerShape
from engine.models.families.dense import NORMS_AROUND
from engine.models.families.description import decoder_spec, layer_windows
from engine.models.families.mixtures import joined_experts
from engine.models.layer_inputs import LayerInputSpec
from engine.models.rope import RopeSpec, rope_spec

MEDIA_WEIGHTS = tuple(
    f"model.{part}." for part in ("vision_tower", "audio_tower", "vision_embedder", "embed_vision", "embed_audio")
)
"""Prefixes of the weights that only images and sound need."""

_MOST = 1 << 16
"""Of a head's dimensions, and of heads."""

_DIFFERING = {"head_dim", "num_key_value_heads"}


def gemma4(config: Any) -> DecoderSpec:
    """Gemma 4, its text (image tokens alone see each other both ways): values are normed, and in the full-attention
    layers perhaps the keys before their norm; nothing scales the scores; each layer's output has a factor. In the small
    models layers have inputs of their own, and the last ones no keys and values; in the mixture, experts compute beside
    each MLP."""
    kinds = sorted(set(config.layer_types))
    of_kind = {kind: _of_kind(config, kind) for kind in kinds}
    base = of_kind[config.layer_types[0]]
    bias = bool(config.attention_bias)
    shapes = {
        kind: LayerShape(
            num_kv_heads=own.num_key_value_heads,
            head_dim=own.head_dim,
            intermediate_size=config.intermediate_size,
            values_are_keys=bool(config.attention_k_eq_v) and kind == "full_attention",
        )
        for kind, own in of_kind.items()
    }
    readers = _readers(config)
    mixture: dict[str, Any] = {}
    if getattr(config, "enable_moe_block", False):
        mixture["experts"] = joined_experts(config)
    width = config.intermediate_size * (2 if config.use_double_wide_mlp else 1)
    return decoder_spec(
        base,
        # Of all tokens use_bidirectional_attention says is_causal=False, too; num_experts counts with enable_moe_block.
        reads=("use_bidirectional_attention", "num_experts"),
        activation=config.hidden_activation,
        windows=layer_windows(config),
        layer_shapes=tuple(
            replace(shapes[kind], intermediate_size=width, reads=readers[layer]) if layer in readers else shapes[kind]
            for layer, kind in enumerate(config.layer_types)
        ),
        layer_inputs=_layer_inputs(config),
        **mixture,
        ropes=tuple(_rope(config, kind, shapes[kind].head_dim) for kind in kinds),
        layer_ropes=tuple(kinds.index(kind) for kind in config.layer_types),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        value_norm=True,
        norms=NORMS_AROUND,
        attention_scale=1.0,
        embedding_scale=config.hidden_size**0.5,
        layer_scales=True,
        final_softcap=config.final_logit_softcapping,
        # Checkpoints may hold what would make the keys and values that these layers don't use.
        ignored_weights=tuple(
            f"{prefix}layers.{layer}.self_attn.{part}."
            for prefix in ("model.", "model.language_model.")
            for layer in readers
            for part in ("k_proj", "v_proj", "k_norm", "v_norm")
        ),
    )


def _of_kind(config: Any, kind: str) -> Any:
    """The config of a kind's layers."""
    if unread := sorted((config.per_layer_attributes or set()) - _DIFFERING):
        raise UnsupportedModel(f"layers that differ in {unread[0]} are not supported for {config.model_type} models")
    own = config.per_layer_config[kind]
    heads = config.num_attention_heads
    for name in sorted(_DIFFERING):
        size = getattr(own, name)
        if type(size) is not int or not 1 <= size <= _MOST:
            raise UnsupportedModel(f"{name} of {kind} layers is {size!r}, but must be from 1 to {_MOST}")
    if heads % own.num_key_value_heads:
        raise UnsupportedModel(f"{heads} attention heads can't share {own.num_key_value_heads} key-value heads evenly")
    return own


def _readers(config: Any) -> dict[int, int]:
    """The last layers, which attend to the keys and values of an earlier one: the last of their kind before them."""
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    if not 0 <= shared < layers:
        raise UnsupportedModel(f"num_kv_shared_layers is {shared}, but must be from 0 to {layers - 1}")
    sources = {kind: layer for layer, kind in enumerate(config.layer_types[: layers - shared])}
    if missing := sorted(set(config.layer_types[layers - shared :]) - set(sources)):
        raise UnsupportedModel(f"num_kv_shared_layers is {shared}, which leaves no {missing[0]} layer to read from")
    return {layer: sources[config.layer_types[layer]] for layer in range(layers - shared, layers)}


def _layer_inputs(config: Any) -> LayerInputSpec | None:
    size = getattr(config, "hidden_size_per_layer_input", 0)
    if not size:
        return None
    rows = config.vocab_size_per_layer_input
    for name, value, least, most in (
        ("hidden_size_per_layer_input", size, 1, _MOST),
        ("vocab_size_per_layer_input", rows, config.vocab_size, 1 << 24),
    ):
        if not least <= value <= most:
            raise UnsupportedModel(f"{name} is {value}, but must be from {least} to {most}")
    return LayerInputSpec(size, rows)


def _rope(config: Any, kind: str, head_dim: int) -> RopeSpec:
    partial = config.rope_parameters[kind].get("rope_type") == "proportional"  # transformers reads it of no other
    return rope_spec(config, head_dim, kind, partial=partial)
