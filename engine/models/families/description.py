"""Describes a decoder that differs from Llama's in some fields: what the functions of all families share.

Settings that would change the result, and that no family function reads, are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine.checkpoints.config import end_tokens
from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.latent import LatentSpec
from engine.models.layer_ops import Activation
from engine.models.rope import QueryGrowth, RopeSpec, context_length, no_rope, rope_spec

_MAX_POSITIONS = 1 << 31
"""Kernels count positions in 32 bits."""

_MAX_BETA = 1000
"""Far above any model's; queries that grow much faster overflow."""

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_OFF: Mapping[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (0,),
    "attention_multiplier": (),
    "attention_sinks": (False, 0),
    "attn_logit_softcapping": (),
    "attn_temperature_tuning": (False, 0),
    "add_cross_attention": (False,),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "is_causal": (True,),
    "kv_lora_rank": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "n_routed_experts": (0,),
    "no_rope_layer_interval": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "parallel_attn": (False,),
    "is_heterogeneous": (False,),
    "qk_layernorm": (False,),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "rotary_pct": (1.0,),
    "use_bidirectional_attention": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}
"""Config keys that change a decoder's result -> the values (besides None) with which they don't."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_PLAIN_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "plain_silu",
    "swish": "plain_silu",
    "gelu_pytorch_tanh": "plain_gelu_tanh",
    "gelu_new": "plain_gelu_tanh",
    "relu2": "plain_relu2",
}
"""Of MLPs without a gate."""


def decoder_spec(
    config: Any,
    *,
    activation: str | None = None,
    has_gates: bool = True,
    reads: Sequence[str] = (),
    layer_kinds: Sequence[str] = ("full_attention", "sliding_attention"),
    partial_rotary: bool = False,
    rotated: Sequence[bool] | None = None,
    unrotated_growth: QueryGrowth | None = None,
    **differences: Any,
) -> DecoderSpec:
    """Return a Llama-like decoder with `differences`; refuses settings that no family function has read.

    Args:
        activation: None: `hidden_act`.  has_gates: MLPs have a gate.
        reads: keys of `_OFF` that this family's function reads.  layer_kinds: the `layer_types` that it reads.
        partial_rotary: its heads may be rotated in part.
        rotated: which layers have positions; None: all.  unrotated_growth: of the others.
    """
    _refuse_unread(config, differences, reads, layer_kinds)
    activation = activation or config.hidden_act
    activations = _ACTIVATIONS if has_gates else _PLAIN_ACTIVATIONS
    if activation not in activations:
        raise UnsupportedModel(f"activation {activation!r} is not supported; known are {', '.join(activations)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} attention heads can't share {kv_heads} key-value heads evenly")
    latent: LatentSpec | None = differences.get("latent")
    if latent is None:
        head_dim = rotated_dim = head_dim_of(config)
    else:
        kv_heads, head_dim, rotated_dim = 1, latent.key_dim, latent.rotated_dim
    ropes: tuple[RopeSpec, ...] = differences.pop("ropes", None) or (
        rope_spec(config, rotated_dim, partial=partial_rotary),
    )
    fields: dict[str, Any] = {
        "windows": (None,) * config.num_hidden_layers,
        "layer_ropes": (0,) * config.num_hidden_layers,
        "attention_scale": head_dim**-0.5,
        "tied": bool(getattr(config, "tie_word_embeddings", False)),  # text halves leave it to the whole
        "norm_eps": getattr(config, "rms_norm_eps", None),
        "intermediate_size": getattr(config, "intermediate_size", 0),  # none where all MLPs are mixtures
    } | differences
    if rotated is not None and not all(rotated):
        ropes = (*ropes, no_rope(rotated_dim, unrotated_growth))
        fields["layer_ropes"] = tuple(0 if rotates else len(ropes) - 1 for rotates in rotated)
    _check_numbers(fields)
    windows = fields["windows"]
    if (given := min(map(len, (windows, fields["layer_ropes"], rotated or windows)))) != config.num_hidden_layers:
        raise UnsupportedModel(
            f"the config describes {given} layers, but num_hidden_layers is {config.num_hidden_layers}"
        )
    shapes = fields.get("layer_shapes") or ()
    for layer, kind in enumerate(fields["layer_ropes"]):
        # Kernels read rows of as many.
        dim = shapes[layer].head_dim if shapes else rotated_dim
        if (width := 2 * (len(ropes[kind].inverse_frequencies) + ropes[kind].passing)) != dim:
            raise UnsupportedModel(f"heads have {dim} dimensions, but their positions rotate {width}")
    if any(window is not None and window < 1 for window in windows):
        raise UnsupportedModel(f"sliding_window is {min(w for w in windows if w is not None)}, but must be 1 or more")
    if any(window is not None and window >= _MAX_POSITIONS for window in windows):
        raise UnsupportedModel(f"sliding_window is {max(w for w in windows if w is not None)}, but must be below 2^31")
    return DecoderSpec(
        architecture=(config.architectures or [config.model_type])[0],
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        activation=activations[activation],
        ropes=ropes,
        max_position=max(context_length(config, rope) for rope in ropes),
        eos_token_ids=end_tokens(getattr(config, "eos_token_id", None)),
        **fields,
    )


def head_dim_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _check_numbers(fields: Mapping[str, Any]) -> None:
    if not 0 <= fields["norm_eps"] < math.inf:
        raise UnsupportedModel(f"the norms' epsilon is {fields['norm_eps']}, but must be 0 or more, and finite")
    for name in ("attention_scale", "embedding_scale", "residual_scale", "logits_scale"):
        scale = fields.get(name)
        if scale is not None and not 0 < scale < math.inf:
            raise UnsupportedModel(f"the config gives a {name.replace('_', ' ')} of {scale}, but it must be above 0")


def ropes_by_kind(config: Any, head_dim: int, *, partial: bool = False) -> dict[str, Any]:
    """`ropes` and `layer_ropes` of a config with rotary parameters for each kind of `layer_types`."""
    kinds = sorted(set(config.layer_types))
    return {
        "ropes": tuple(rope_spec(config, head_dim, kind, partial=partial) for kind in kinds),
        "layer_ropes": tuple(kinds.index(kind) for kind in config.layer_types),
    }


def query_growth(beta: float, original_max: int, names: tuple[str, str], shift: int = 0) -> QueryGrowth:
    """`QueryGrowth` of a config whose keys of the two numbers are `names`."""
    if not 0 <= beta <= _MAX_BETA:
        raise UnsupportedModel(f"{names[0]} is {beta}, but must be from 0 to {_MAX_BETA}")
    if not 1 <= original_max < _MAX_POSITIONS:
        raise UnsupportedModel(f"{names[1]} is {original_max}, but must be 1 or more, and below 2^31")
    return QueryGrowth(float(beta), original_max, shift)


def layer_windows(config: Any) -> tuple[int | None, ...]:
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


def _refuse_unread(
    config: Any, differences: Mapping[str, Any], reads: Sequence[str], layer_kinds: Sequence[str]
) -> None:
    reads = (
        *reads,
        *(_EXPERT_COUNTS if "experts" in differences else ()),
        *("kv_lora_rank",) * ("latent" in differences),
    )
    for key, neutral in _OFF.items():
        value = None if key in reads else getattr(config, key, None)
        if value is not None and value not in neutral:
            raise UnsupportedModel(f"{key}={value!r} is not supported for {config.model_type} models")
    if getattr(config, "final_logit_softcapping", None) is not None and "final_softcap" not in differences:
        raise UnsupportedModel(f"final_logit_softcapping is not supported for {config.model_type} models")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(layer_types.difference(layer_kinds)):
        raise UnsupportedModel(f"layers of type {unknown[0]!r} are not supported for {config.model_type} models")
    if "sliding_attention" in layer_types and "windows" not in differences:
        raise UnsupportedModel(f"sliding layer_types are not supported for {config.model_type} models")
    if config.model_type == "mistral" and len(layer_types) > 1:
        raise UnsupportedModel("mistral with mixed layer_types is another architecture (ministral); correct model_type")
