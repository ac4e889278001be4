"""Converts a transformers config to a `DecoderSpec`, for the families that the fused decoder computes.

A family function reads the fields that its config class defines. Settings that would change the result and are not
implemented are refused by name: a model that answers slightly wrong is worse than one that does not load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.checkpoints.config import end_tokens
from engine.errors import UnsupportedModel
from engine.models.decoder import Activation, DecoderSpec
from engine.models.rope import RopeSpec, context_length, rope_spec

Family = Callable[[Any], DecoderSpec]

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


def fused_family(config: Any) -> Family | None:
    """Return the family function for a config, or None when the fused decoder does not support its model type."""
    return _FAMILIES.get(config.model_type)


def llama(config: Any) -> DecoderSpec:
    """Llama 2 and 3, SmolLM2, and others that say "llama" (Touvron et al. 2023)."""
    bias = bool(config.attention_bias)
    return _decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.mlp_bias))


def mistral(config: Any) -> DecoderSpec:
    """Mistral (Jiang et al. 2023): Llama with one sliding window for all layers."""
    return _decoder(config, windows=(config.sliding_window,) * config.num_hidden_layers)


def qwen2(config: Any) -> DecoderSpec:
    """Qwen 2 and 2.5: biases on q, k and v; the later layers may slide."""
    return _decoder(config, qkv_bias=True, windows=_windows(config))


def qwen3(config: Any) -> DecoderSpec:
    """Qwen 3: q and k normed per head."""
    bias = bool(config.attention_bias)
    return _decoder(config, qk_norm=True, qkv_bias=bias, output_bias=bias, windows=_windows(config))


def gemma3(config: Any) -> DecoderSpec:
    """Gemma 3 (technical report, section 2), also the text half of its image models."""
    images = config.model_type == "gemma3"
    text = config.get_text_config()
    bias = bool(text.attention_bias)
    kinds = sorted(set(text.layer_types))
    return _decoder(
        text,
        activation=text.hidden_activation,
        windows=_windows(text),
        ropes=tuple(rope_spec(text, text.head_dim, kind) for kind in kinds),
        layer_ropes=tuple(kinds.index(kind) for kind in text.layer_types),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norm_offset=True,
        sandwich_norms=True,
        attention_scale=text.query_pre_attn_scalar**-0.5,
        embedding_scale=text.hidden_size**0.5,
        final_softcap=text.final_logit_softcapping,
        weight_prefixes=("model.language_model.", "language_model.model.") if images else ("model.",),
        ignored_weights=_IMAGE_WEIGHTS if images else (),
    )


_FAMILIES: Mapping[str, Family] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
}

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

_IMAGE_WEIGHTS = tuple(
    f"{outer}{part}." for outer in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)


def _decoder(config: Any, *, activation: str | None = None, **differences: Any) -> DecoderSpec:
    """Return a Llama-like decoder with `differences`; refuses settings that no family function has read."""
    _refuse_unread(config, differences)
    activation = activation or config.hidden_act
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {activation!r} is not supported; known are {', '.join(_ACTIVATIONS)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} attention heads can't share {kv_heads} key-value heads evenly")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    ropes: tuple[RopeSpec, ...] = differences.pop("ropes", None) or (rope_spec(config, head_dim),)
    fields: dict[str, Any] = {
        "windows": (None,) * config.num_hidden_layers,
        "layer_ropes": (0,) * config.num_hidden_layers,
        "attention_scale": head_dim**-0.5,
        "tied": bool(config.tie_word_embeddings),
    }
    windows = (fields | differences)["windows"]
    if any(window is not None and window < 1 for window in windows):
        raise UnsupportedModel(f"sliding_window is {min(w for w in windows if w is not None)}, but must be 1 or more")
    if not 0 <= config.rms_norm_eps < float("inf"):
        raise UnsupportedModel(f"rms_norm_eps is {config.rms_norm_eps}, but must be 0 or more, and finite")
    return DecoderSpec(
        architecture=(config.architectures or [config.model_type])[0],
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        activation=_ACTIVATIONS[activation],
        ropes=ropes,
        max_position=max(context_length(config, rope) for rope in ropes),
        eos_token_ids=end_tokens(config.eos_token_id),
        **(fields | differences),
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


def _refuse_unread(config: Any, differences: Mapping[str, Any]) -> None:
    for key, neutral in _OFF.items():
        value = getattr(config, key, None)
        if value is not None and value not in neutral:
            raise UnsupportedModel(f"{key}={value!r} is not supported for {config.model_type} models")
    if getattr(config, "final_logit_softcapping", None) is not None and "final_softcap" not in differences:
        raise UnsupportedModel(f"final_logit_softcapping is not supported for {config.model_type} models")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(layer_types - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(f"layers of type {unknown[0]!r} are not supported for {config.model_type} models")
    if "sliding_attention" in layer_types and "windows" not in differences:
        raise UnsupportedModel(f"sliding layer_types are not supported for {config.model_type} models")
    if config.model_type == "mistral" and len(layer_types) > 1:
        raise UnsupportedModel("mistral with mixed layer_types is another architecture (ministral); correct model_type")
