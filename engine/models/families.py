"""Converts a transformers config to a `DecoderSpec`, for the families that the fused decoder computes.

A family function reads the fields that its config class defines. Settings that would change the result and are not
implemented are refused by name: a model that answers slightly wrong is worse than one that does not load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from engine.checkpoints.config import end_tokens
from engine.errors import UnsupportedModel
from engine.models.decoder import Activation, DecoderSpec, NormNames
from engine.models.experts import ExpertSpec
from engine.models.rope import RopeSpec, context_length, no_rope, rope_spec

Family = Callable[[Any], DecoderSpec]

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MOST_EXPERTS = 4096
_MOST_NORM_MIN = 1e-6
"""Of sums of scores, that nothing is divided by less than: ours is smaller still."""

_MOST_FURTHER = 8
"""Layers behind the last one that may be passed over."""

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
    if config.model_type not in IMAGE_MODELS:
        return _FAMILIES.get(config.model_type)
    text = _FAMILIES.get(config.get_text_config().model_type)
    return None if text is None else partial(_text_half, text)


def llama(config: Any) -> DecoderSpec:
    """Llama 2 and 3, SmolLM2, and others that say "llama" (Touvron et al. 2023)."""
    bias = bool(config.attention_bias)
    return _decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.mlp_bias))


def mistral(config: Any) -> DecoderSpec:
    """Mistral (Jiang et al. 2023): Llama with one sliding window for all layers."""
    return _decoder(config, windows=(config.sliding_window,) * config.num_hidden_layers)


def ministral(config: Any) -> DecoderSpec:
    """Ministral (2024), and CWM (2025) likewise: Llama whose layers slide or not, as `layer_types` says."""
    return _decoder(config, windows=_windows(config), mlp_bias=bool(getattr(config, "mlp_bias", False)))


def seed_oss(config: Any) -> DecoderSpec:
    """Seed-OSS (2025): Llama with biases of q, k and v."""
    return _decoder(
        config,
        qkv_bias=bool(config.attention_bias),
        output_bias=bool(config.attention_out_bias),
        mlp_bias=bool(config.mlp_bias),
    )


def smollm3(config: Any) -> DecoderSpec:
    """SmolLM3 (2025): Llama, every fourth layer of which has no positions."""
    bias = bool(config.attention_bias)
    rotated = [bool(rotates) for rotates in config.no_rope_layers[: config.num_hidden_layers]]
    return _decoder(
        config,
        reads=("no_rope_layers", "no_rope_layer_interval"),
        rotated=rotated,
        windows=_windows(config) if config.use_sliding_window else (None,) * config.num_hidden_layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.mlp_bias),
    )


def ernie4_5(config: Any) -> DecoderSpec:
    """ERNIE 4.5 (technical report, 2025), its dense models: Llama whose rotated pairs are neighbours."""
    bias = bool(config.use_bias)
    return _decoder(config, interleaved_rope=True, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def helium(config: Any) -> DecoderSpec:
    """Helium 1 (Kyutai, 2025): Llama whose rotated pairs are neighbours."""
    return _decoder(config, interleaved_rope=True, qkv_bias=bool(config.attention_bias), mlp_bias=bool(config.mlp_bias))


def granite(config: Any, **differences: Any) -> DecoderSpec:
    """Granite 3 and 4, dense (technical report, 2024): Llama with four multipliers."""
    return _granite(config, logits_scale=1.0 / float(config.logits_scaling), **differences)


def hyperclovax(config: Any) -> DecoderSpec:
    """HyperCLOVA X (NAVER, 2024): Granite, perhaps with norms of what joins the residual. Its logits' scale is a
    factor."""
    around = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    norms = around if config.use_post_norm else _NORMS_BEFORE
    return _granite(config, logits_scale=float(config.logits_scaling), norms=norms)


def _granite(config: Any, **differences: Any) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return _decoder(
        config,
        reads=("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
        attention_scale=float(config.attention_multiplier),
        embedding_scale=float(config.embedding_multiplier),
        residual_scale=float(config.residual_multiplier),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        **differences,
    )


def phi3(config: Any) -> DecoderSpec:
    """Phi 3, 3.5 and 4 (technical report, 2024), without images: fused products, heads rotated in part, LongRoPE."""
    return _decoder(
        config,
        partial_rotary=True,
        windows=(config.sliding_window,) * config.num_hidden_layers,
        fused_qkv=True,
        fused_gate_up=True,
    )


def glm(config: Any) -> DecoderSpec:
    """GLM-4 of 2024 (GLM team, 2024): half of each head is rotated, pairs of neighbours."""
    return _glm(config, _NORMS_BEFORE)


def glm4(config: Any) -> DecoderSpec:
    """GLM-4-0414 and GLM-Z1: GLM-4 with norms of what joins the residual."""
    outputs = "post_self_attn_layernorm", "post_mlp_layernorm"
    return _glm(config, ("input_layernorm", outputs[0], "post_attention_layernorm", outputs[1]))


def _glm(config: Any, norms: NormNames) -> DecoderSpec:
    return _decoder(
        config,
        partial_rotary=True,
        interleaved_rope=True,
        qkv_bias=bool(config.attention_bias),
        fused_gate_up=True,
        norms=norms,
    )


def olmo2(config: Any) -> DecoderSpec:
    """OLMo 2 (OLMo team, 2025, section 2.1): norms behind attention and MLP only, and of all of q and of k."""
    bias = bool(config.attention_bias)
    return _decoder(config, qk_norm="projection", norms=_NORMS_BEHIND, qkv_bias=bias, output_bias=bias)


def olmo3(config: Any) -> DecoderSpec:
    """OLMo 3 (2025): OLMo 2, most layers of which slide, with frequencies by kind of layer."""
    bias = bool(config.attention_bias)
    kinds = sorted(set(config.layer_types))
    return _decoder(
        config,
        windows=_windows(config),
        ropes=tuple(rope_spec(config, config.hidden_size // config.num_attention_heads, kind) for kind in kinds),
        layer_ropes=tuple(kinds.index(kind) for kind in config.layer_types),
        qk_norm="projection",
        norms=_NORMS_BEHIND,
        qkv_bias=bias,
        output_bias=bias,
    )


def exaone4(config: Any) -> DecoderSpec:
    """EXAONE 4.0 (LG AI Research, 2025): norms behind attention and MLP only; where some layers slide, the others have
    no positions."""
    windows = _windows(config)
    rotated = [config.sliding_window is None or window is not None for window in windows]
    return _decoder(config, windows=windows, rotated=rotated, qk_norm="head", norms=_NORMS_BEHIND)


def cohere(config: Any) -> DecoderSpec:
    """Command R and R+ (Cohere, 2024): attention and MLP in parallel, LayerNorm without a bias."""
    reads = ("logit_scale", "use_qk_norm")
    return _cohere(config, reads=reads, qk_norm="heads" if config.use_qk_norm else None)


def cohere2(config: Any) -> DecoderSpec:
    """Command R7B and A (Cohere, 2025): Command R whose layers that don't slide have no positions."""
    windows = _windows(config)
    rotated = [window is not None for window in windows]
    return _cohere(config, reads=("logit_scale",), windows=windows, rotated=rotated)


def _cohere(config: Any, **differences: Any) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return _decoder(
        config,
        norm_eps=config.layer_norm_eps,
        norms=("input_layernorm", None, None, None),
        layer_norm=True,
        parallel=True,
        interleaved_rope=True,
        logits_scale=1.0 if config.logit_scale is None else float(config.logit_scale),
        qkv_bias=bias,
        output_bias=bias,
        **differences,
    )


def qwen2(config: Any) -> DecoderSpec:
    """Qwen 2 and 2.5: biases on q, k and v; the later layers may slide."""
    return _decoder(config, qkv_bias=True, windows=_windows(config))


def qwen3(config: Any) -> DecoderSpec:
    """Qwen 3: q and k normed per head."""
    bias = bool(config.attention_bias)
    return _decoder(config, qk_norm="head", qkv_bias=bias, output_bias=bias, windows=_windows(config))


def qwen3_vl(config: Any) -> DecoderSpec:
    """The text half of Qwen3-VL: Qwen 3. The three positions of a token differ in images only."""
    bias = bool(config.attention_bias)
    rope = rope_spec(config, config.head_dim, ignored=("mrope_section", "mrope_interleaved"))
    return _decoder(config, ropes=(rope,), qk_norm="head", qkv_bias=bias, output_bias=bias)


def gemma(config: Any) -> DecoderSpec:
    """Gemma (Gemma team, 2024), the first."""
    bias = bool(config.attention_bias)
    scale = config.hidden_size**0.5
    return _decoder(config, qkv_bias=bias, output_bias=bias, norm_offset=True, embedding_scale=scale)


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
        qk_norm="head",
        norm_offset=True,
        norms=_NORMS_AROUND,
        attention_scale=text.query_pre_attn_scalar**-0.5,
        embedding_scale=text.hidden_size**0.5,
        final_softcap=text.final_logit_softcapping,
        weight_prefixes=("model.language_model.", "language_model.model.") if images else ("model.",),
        ignored_weights=_IMAGE_WEIGHTS if images else (),
    )


def mixtral(config: Any) -> DecoderSpec:
    """Mixtral (Jiang et al. 2024): Mistral with a mixture in each layer."""
    windows = (config.sliding_window,) * config.num_hidden_layers
    return _decoder(
        config,
        windows=windows,
        experts=_experts(config, "num_local_experts", config.intermediate_size, renormalize=True),
    )


def qwen2_moe(config: Any) -> DecoderSpec:
    """Qwen 1.5 and 2 MoE: every token goes through a shared expert, too, which a gate scales."""
    experts = _experts(
        config,
        "num_experts",
        config.moe_intermediate_size,
        layers=_sparse_layers(config),
        renormalize=bool(config.norm_topk_prob),
        shared_size=config.shared_expert_intermediate_size,
        has_shared_gate=True,
    )
    return _decoder(config, qkv_bias=bool(config.qkv_bias), windows=_windows(config), experts=experts)


def qwen3_moe(config: Any) -> DecoderSpec:
    """Qwen 3 MoE: Qwen 3 with mixtures."""
    bias = bool(config.attention_bias)
    experts = _experts(
        config,
        "num_experts",
        config.moe_intermediate_size,
        layers=_sparse_layers(config),
        renormalize=bool(config.norm_topk_prob),
    )
    windows = (config.sliding_window,) * config.num_hidden_layers
    return _decoder(config, qk_norm="head", qkv_bias=bias, output_bias=bias, windows=windows, experts=experts)


def olmoe(config: Any) -> DecoderSpec:
    """OLMoE (Muennighoff et al. 2024): norms of all of q and of k, as in OLMo 2."""
    bias = bool(config.attention_bias)
    experts = _experts(config, "num_experts", config.intermediate_size, renormalize=bool(config.norm_topk_prob))
    return _decoder(config, qk_norm="projection", qkv_bias=bias, output_bias=bias, experts=experts)


def granitemoe(config: Any) -> DecoderSpec:
    """Granite 3 MoE: Granite with mixtures."""
    experts = _experts(config, "num_local_experts", config.intermediate_size, renormalize=True)
    return granite(config, experts=experts)


def ernie4_5_moe(config: Any) -> DecoderSpec:
    """ERNIE 4.5 (technical report, 2025), its mixtures: experts are chosen by corrected scores. Layers that predict
    further tokens are not read."""
    bias = bool(config.use_bias)
    if not 0 <= config.moe_norm_min <= _MOST_NORM_MIN:
        raise UnsupportedModel(f"moe_norm_min is {config.moe_norm_min}, but must be from 0 to {_MOST_NORM_MIN}")
    if config.moe_layer_interval < 1:
        raise UnsupportedModel(f"moe_layer_interval is {config.moe_layer_interval}, but must be 1 or more")
    first, last = config.moe_layer_start_index, config.moe_layer_end_index
    experts = _experts(
        config,
        "moe_num_experts",
        config.moe_intermediate_size,
        layers=tuple(
            (index + 1) % config.moe_layer_interval == 0 and first <= index <= last
            for index in range(config.num_hidden_layers)
        ),
        renormalize=True,
        has_correction=True,
        shared_size=config.moe_intermediate_size * config.moe_num_shared_experts,
    )
    return _decoder(
        config,
        interleaved_rope=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        experts=experts,
        ignored_weights=("model.mtp_",),
    )


def dots1(config: Any) -> DecoderSpec:
    """dots.llm1 (rednote, 2025): Qwen 3 with the mixtures of DeepSeek-V3."""
    bias = bool(config.attention_bias)
    experts = _deepseek_experts(config)
    return _decoder(config, qk_norm="head", qkv_bias=bias, output_bias=bias, windows=_windows(config), experts=experts)


def glm4_moe(config: Any) -> DecoderSpec:
    """GLM 4.5 and 4.6: a part of each head is rotated, and mixtures are DeepSeek-V3's. Layers that predict further
    tokens are not read."""
    layers = config.num_hidden_layers
    further = range(layers, layers + min(config.num_nextn_predict_layers, _MOST_FURTHER))
    return _decoder(
        config,
        qkv_bias=bool(config.attention_bias),
        reads=("use_qk_norm",),
        qk_norm="head" if config.use_qk_norm else None,
        partial_rotary=True,
        experts=_deepseek_experts(config),
        ignored_weights=tuple(f"model.layers.{index}." for index in further),
    )


def _text_half(family: Family, config: Any) -> DecoderSpec:
    """The decoder of an image model, whose text half is of `family`."""
    return replace(
        family(config.get_text_config()),
        architecture=(config.architectures or [config.model_type])[0],
        tied=bool(config.tie_word_embeddings),
        weight_prefixes=("model.language_model.", "language_model.model."),
        ignored_weights=IMAGE_MODELS[config.model_type],
    )


_NORMS_BEFORE: NormNames = ("input_layernorm", None, "post_attention_layernorm", None)
_NORMS_BEHIND: NormNames = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_NORMS_AROUND: NormNames = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip

_FAMILIES: Mapping[str, Family] = {
    "cohere": cohere,
    "cohere2": cohere2,
    "cwm": ministral,
    "ernie4_5": ernie4_5,
    "exaone4": exaone4,
    "gemma": gemma,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "glm": glm,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "granite": granite,
    "granitemoe": granitemoe,
    "dots1": dots1,
    "ernie4_5_moe": ernie4_5_moe,
    "helium": helium,
    "hyperclovax": hyperclovax,
    "internlm3": llama,
    "iquestcoder": llama,
    "llama": llama,
    "ministral": ministral,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "olmoe": olmoe,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_vl_text": qwen3_vl,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
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

IMAGE_MODELS: Mapping[str, tuple[str, ...]] = {"mistral3": _IMAGE_WEIGHTS, "qwen3_vl": ("model.visual.", "visual.")}
"""Image models whose text half is one of the families -> prefixes of the weights that only images need."""


def _decoder(
    config: Any,
    *,
    activation: str | None = None,
    reads: Sequence[str] = (),
    partial_rotary: bool = False,
    rotated: Sequence[bool] | None = None,
    **differences: Any,
) -> DecoderSpec:
    """Return a Llama-like decoder with `differences`; refuses settings that no family function has read.

    Args:
        reads: keys of `_OFF` that this family's function reads.
        partial_rotary: its heads may be rotated in part.
        rotated: which layers have positions; None: all.
    """
    _refuse_unread(config, differences, reads)
    activation = activation or config.hidden_act
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {activation!r} is not supported; known are {', '.join(_ACTIVATIONS)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} attention heads can't share {kv_heads} key-value heads evenly")
    head_dim = _head_dim(config)
    ropes: tuple[RopeSpec, ...] = differences.pop("ropes", None) or (
        rope_spec(config, head_dim, partial=partial_rotary),
    )
    fields: dict[str, Any] = {
        "windows": (None,) * config.num_hidden_layers,
        "layer_ropes": (0,) * config.num_hidden_layers,
        "attention_scale": head_dim**-0.5,
        "tied": bool(getattr(config, "tie_word_embeddings", False)),  # text halves leave it to the whole
        "norm_eps": getattr(config, "rms_norm_eps", None),
    } | differences
    if rotated is not None and not all(rotated):
        ropes = (*ropes, no_rope(head_dim))
        fields["layer_ropes"] = tuple(0 if rotates else len(ropes) - 1 for rotates in rotated)
    _check_numbers(fields)
    windows = fields["windows"]
    if any(window is not None and window < 1 for window in windows):
        raise UnsupportedModel(f"sliding_window is {min(w for w in windows if w is not None)}, but must be 1 or more")
    return DecoderSpec(
        architecture=(config.architectures or [config.model_type])[0],
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        activation=_ACTIVATIONS[activation],
        ropes=ropes,
        max_position=max(context_length(config, rope) for rope in ropes),
        eos_token_ids=end_tokens(getattr(config, "eos_token_id", None)),
        **fields,
    )


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _experts(
    config: Any, name: str, inner: int, *, layers: tuple[bool, ...] | None = None, **differences: Any
) -> ExpertSpec:
    """Return the mixture of a config.

    Args:
        name: the key of the number of experts.  inner: intermediate size of one.  layers: None: all of them.
    """
    count, top_k = getattr(config, name), config.num_experts_per_tok
    if not 1 <= count <= _MOST_EXPERTS:
        raise UnsupportedModel(f"{name} is {count}, but must be from 1 to {_MOST_EXPERTS}")
    if not 1 <= top_k <= count:
        raise UnsupportedModel(f"num_experts_per_tok is {top_k}, but must be from 1 to {name}, {count}")
    spec = ExpertSpec(count, top_k, inner, layers or (True,) * config.num_hidden_layers, **differences)
    groups, best = spec.num_groups, spec.top_groups
    if not (1 <= best <= groups and count % groups == 0 and (groups == 1 or count // groups >= 2)):
        raise UnsupportedModel(f"n_group={groups} and topk_group={best} do not fit {name}={count}")
    if not 0 < spec.scale < math.inf:
        raise UnsupportedModel(f"routed_scaling_factor is {spec.scale}, but must be above 0, and finite")
    if count // groups * best < top_k:
        raise UnsupportedModel(f"num_experts_per_tok is {top_k}, but topk_group={best} groups have fewer experts")
    return spec


def _deepseek_experts(config: Any) -> ExpertSpec:
    """Return DeepSeek-V3's mixture: sigmoid scores, corrected, in groups; the first layers are dense."""
    return _experts(
        config,
        "n_routed_experts",
        config.moe_intermediate_size,
        layers=tuple(index >= config.first_k_dense_replace for index in range(config.num_hidden_layers)),
        scoring="sigmoid",
        renormalize=bool(config.norm_topk_prob),
        num_groups=config.n_group,
        top_groups=config.topk_group,
        scale=config.routed_scaling_factor,
        has_correction=True,
        shared_size=config.moe_intermediate_size * (config.n_shared_experts or 0),
    )


def _sparse_layers(config: Any) -> tuple[bool, ...]:
    """Return per layer whether Qwen's MLP is a mixture."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    if step < 1:
        raise UnsupportedModel(f"decoder_sparse_step is {step}, but must be 1 or more")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(config.num_hidden_layers))


def _check_numbers(fields: Mapping[str, Any]) -> None:
    if not 0 <= fields["norm_eps"] < math.inf:
        raise UnsupportedModel(f"the norms' epsilon is {fields['norm_eps']}, but must be 0 or more, and finite")
    for name in ("attention_scale", "embedding_scale", "residual_scale", "logits_scale"):
        scale = fields.get(name)
        if scale is not None and not 0 < scale < math.inf:
            raise UnsupportedModel(f"the config gives a {name.replace('_', ' ')} of {scale}, but it must be above 0")


def _windows(config: Any) -> tuple[int | None, ...]:
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


def _refuse_unread(config: Any, differences: Mapping[str, Any], reads: Sequence[str]) -> None:
    reads = (*reads, *(_EXPERT_COUNTS if "experts" in differences else ()))
    for key, neutral in _OFF.items():
        value = None if key in reads else getattr(config, key, None)
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
