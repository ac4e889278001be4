"""The families with mixtures of experts; see `engine.models.families.registry`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.experts import ExpertSpec
from engine.models.families.dense import NORMS_BEHIND, cohere_like, granite, hunyuan
from engine.models.families.description import decoder_spec, head_dim_of, layer_windows, query_growth, ropes_by_kind
from engine.models.families.short_conv import with_convolutions
from engine.models.layer_ops.torch_ops import SWIGLU_ALPHA, SWIGLU_LIMIT
from engine.models.rope import rope_spec

_MOST_EXPERTS = 4096

_MOST_NORM_MIN = 1e-6
"""Of sums of scores, that nothing is divided by less than: ours is smaller still."""

_MOST_FURTHER = 8
"""Layers behind the last one that may be passed over."""


def mixtral(config: Any) -> DecoderSpec:
    """Mixtral (Jiang et al. 2024): Mistral with a mixture in each layer."""
    windows = (config.sliding_window,) * config.num_hidden_layers
    return decoder_spec(
        config,
        windows=windows,
        experts=_experts(config, "num_local_experts", config.intermediate_size, renormalize=True),
    )


def qwen2_moe(config: Any) -> DecoderSpec:
    """Qwen 1.5 and 2 MoE: every token goes through a shared expert, too, which a gate scales."""
    layers, renormalize = sparse_layers(config), bool(config.norm_topk_prob)
    experts = experts_with_gate(config, layers=layers, renormalize=renormalize)
    return decoder_spec(config, qkv_bias=bool(config.qkv_bias), windows=layer_windows(config), experts=experts)


def qwen3_moe(config: Any) -> DecoderSpec:
    """Qwen 3 MoE: Qwen 3 with mixtures."""
    bias = bool(config.attention_bias)
    experts = _experts(
        config,
        "num_experts",
        config.moe_intermediate_size,
        layers=sparse_layers(config),
        renormalize=bool(config.norm_topk_prob),
    )
    windows = (config.sliding_window,) * config.num_hidden_layers
    return decoder_spec(config, qk_norm="head", qkv_bias=bias, output_bias=bias, windows=windows, experts=experts)


def qwen3_vl_moe(config: Any) -> DecoderSpec:
    """The text half of Qwen3-VL's mixtures: Qwen 3 MoE. The three positions of a token differ in images only."""
    bias = bool(config.attention_bias)
    experts = _experts(
        config,
        "num_experts",
        config.moe_intermediate_size,
        layers=sparse_layers(config),
        renormalize=True,
        stack_layout="columns",
    )
    rope = rope_spec(config, head_dim_of(config), ignored=("mrope_section", "mrope_interleaved"))
    return decoder_spec(config, ropes=(rope,), qk_norm="head", qkv_bias=bias, output_bias=bias, experts=experts)


def olmoe(config: Any) -> DecoderSpec:
    """OLMoE (Muennighoff et al. 2024): norms of all of q and of k, as in OLMo 2."""
    bias = bool(config.attention_bias)
    experts = _experts(config, "num_experts", config.intermediate_size, renormalize=bool(config.norm_topk_prob))
    return decoder_spec(config, qk_norm="projection", qkv_bias=bias, output_bias=bias, experts=experts)


def granitemoe(config: Any) -> DecoderSpec:
    """Granite 3 MoE: Granite with mixtures."""
    experts = _experts(config, "num_local_experts", config.intermediate_size, renormalize=True)
    return granite(config, experts=experts)


def granitemoeshared(config: Any, **differences: Any) -> DecoderSpec:
    """Granite 3 MoE with a shared MLP (technical report, 2025)."""
    inner = config.shared_intermediate_size
    experts = _experts(config, "num_local_experts", config.intermediate_size, renormalize=True, shared_size=inner)
    stored_as = shared_mlp(config, "block_sparse_moe.shared_expert") if inner else {}
    return granite(config, experts=experts, stored_as=stored_as, **differences)


def shared_mlp(config: Any, name: str) -> dict[str, dict[str, int]]:
    """`DecoderSpec.stored_as` of Granite's shared MLP, which is `name` here."""
    inner = config.shared_intermediate_size
    return {
        "shared_mlp.input_linear": {f"{name}.gate_proj": inner, f"{name}.up_proj": inner},
        "shared_mlp.output_linear": {f"{name}.down_proj": config.hidden_size},
    }


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
    return decoder_spec(
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
    experts = deepseek_experts(config, behind_dense(config))
    return decoder_spec(
        config, qk_norm="head", qkv_bias=bias, output_bias=bias, windows=layer_windows(config), experts=experts
    )


def minimax_m2(config: Any) -> DecoderSpec:
    """MiniMax M2 (2025): heads rotated in part, norms of all of q and of k, and mixtures with corrected scores."""
    experts = _experts(
        config,
        "num_local_experts",
        config.intermediate_size,
        scoring="sigmoid",
        renormalize=True,
        has_correction=True,
    )
    return decoder_spec(config, partial_rotary=True, qk_norm="projection", experts=experts)


def exaone_moe(config: Any) -> DecoderSpec:
    """K-EXAONE (LG AI Research, 2025): norms before attention and MLP, layers that don't slide without positions where
    some do, and the mixtures of DeepSeek-V3. Layers that predict further tokens are not read."""
    windows = layer_windows(config)
    return decoder_spec(
        config,
        windows=windows,
        rotated=[config.sliding_window is None or window is not None for window in windows],
        qk_norm="head",
        experts=deepseek_experts(config, layers_said_sparse(config), "num_experts", "num_shared_experts"),
        ignored_weights=("mtp.",),
    )


def solar_open(config: Any) -> DecoderSpec:
    """Solar Open (Upstage, 2025): Llama with the mixtures of DeepSeek-V3."""
    return decoder_spec(
        config,
        partial_rotary=True,
        qkv_bias=bool(config.attention_bias),
        intermediate_size=config.moe_intermediate_size,  # no layer is dense
        experts=deepseek_experts(config, None),
    )


def hy_v3(config: Any) -> DecoderSpec:
    """Hunyuan 3 (Tencent, 2026): Qwen 3 with corrected scores and shared experts. Layers that predict further tokens
    are not read."""
    bias = bool(config.attention_bias)
    layers = config.num_hidden_layers
    further = range(layers, layers + _MOST_FURTHER)
    experts = _experts(
        config,
        "num_experts",
        config.moe_intermediate_size,
        layers=layers_said_sparse(config),
        scoring="sigmoid",
        renormalize=True,
        scale=config.router_scaling_factor,
        has_correction=True,
        shared_size=config.moe_intermediate_size * config.num_shared_experts,
    )
    return decoder_spec(
        config,
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.mlp_bias),
        experts=experts,
        ignored_weights=tuple(f"model.layers.{index}." for index in further),
    )


def hunyuan_moe(config: Any) -> DecoderSpec:
    """Hunyuan-A13B (Tencent, 2025): Hunyuan with a mixture beside a shared MLP in each layer."""
    for name in ("num_experts", "moe_topk"):
        if not isinstance(value := getattr(config, name), int):
            raise UnsupportedModel(f"{name} is {value}, but must be one number for all layers")
    inner = config.intermediate_size
    return hunyuan(config, experts=_experts(config, "num_experts", inner, renormalize=True, shared_size=inner))


def mellum(config: Any) -> DecoderSpec:
    """Mellum 2 (JetBrains, 2026): Qwen 3 MoE, frequencies by kind of layer. Layers that predict further tokens are not
    read."""
    bias = bool(config.attention_bias)
    experts = _experts(
        config,
        "num_experts",
        config.moe_intermediate_size,
        layers=layers_said_sparse(config),
        renormalize=bool(config.norm_topk_prob),
    )
    return decoder_spec(
        config,
        windows=layer_windows(config),
        **ropes_by_kind(config, config.head_dim, partial=True),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
        experts=experts,
        ignored_weights=("mtp.",),
    )


def flex_olmo(config: Any) -> DecoderSpec:
    """FlexOlmo (Shi et al. 2025): OLMo 2 with mixtures."""
    bias = bool(config.attention_bias)
    experts = _experts(config, "num_experts", config.intermediate_size, renormalize=bool(config.norm_topk_prob))
    return decoder_spec(
        config, qk_norm="projection", norms=NORMS_BEHIND, qkv_bias=bias, output_bias=bias, experts=experts
    )


def cohere2_moe(config: Any) -> DecoderSpec:
    """Command A's mixtures (Cohere, 2026): Cohere 2 whose experts' weights are the softmax of the chosen logits, or
    their sigmoids."""
    strategy, shared = config.shared_expert_combination_strategy, config.num_shared_experts
    if shared and strategy != "sum":
        raise UnsupportedModel(f"shared_expert_combination_strategy is {strategy!r}, but must be 'sum'")
    scoring = config.expert_selection_fn
    if scoring not in ("softmax", "sigmoid"):
        raise UnsupportedModel(f"expert_selection_fn is {scoring!r}; known are 'softmax' and 'sigmoid'")
    sparse, windows = layers_said_sparse(config), layer_windows(config)
    inner = config.intermediate_size
    experts = _experts(
        config,
        "num_experts",
        inner,
        layers=sparse,
        scoring=scoring,
        renormalize=scoring == "softmax" or bool(config.norm_topk_prob),
        shared_size=inner * shared,
    )
    rms = {} if config.rms_norm_eps is None else {"norm_eps": config.rms_norm_eps, "layer_norm": False}
    dense_rotate = config.prefix_dense_sliding_window_pattern == 1
    return cohere_like(
        config,
        reads=("logit_scale",),
        windows=windows,
        rotated=[
            window is not None or (dense_rotate and not mixes) for window, mixes in zip(windows, sparse, strict=True)
        ],
        intermediate_size=config.prefix_dense_intermediate_size or inner,
        experts=experts,
        **rms,
    )


def gpt_oss(config: Any) -> DecoderSpec:
    """gpt-oss (OpenAI 2025, section 2): sinks, every second layer slides, and experts with biases."""
    for name, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if (given := getattr(config, name, value)) != value:
            raise UnsupportedModel(f"{name} is {given}, but must be {value}")
    bias = bool(config.attention_bias)
    # The softmax of the chosen logits is that of all of them, renormalized.
    experts = _experts(
        config,
        "num_local_experts",
        config.intermediate_size,
        renormalize=True,
        has_bias=True,
        stack_layout="interleaved",
    )
    return replace(
        decoder_spec(
            config,
            has_sinks=True,
            qkv_bias=bias,
            output_bias=bias,
            windows=layer_windows(config),
            experts=experts,
        ),
        activation="clamped_swiglu",
    )


def llama4(config: Any) -> DecoderSpec:
    """Llama 4 (Meta, 2025), its text: one expert reads a token times its score, beside a shared one; every fourth layer
    has no positions, and queries that grow. The other layers attend in chunks of tokens, which contexts up to one chunk
    don't tell from attending to all; longer ones are refused."""
    layers = range(config.num_hidden_layers)
    rotated = [bool(rotates) for rotates in config.no_rope_layers[: len(layers)]]
    if not set(config.moe_layers).issubset(layers):
        raise UnsupportedModel(f"moe_layers is {config.moe_layers}, but there are {len(layers)} layers")
    bias = bool(config.attention_bias)
    names = "attn_scale", "floor_scale"
    tuned = config.attn_temperature_tuning
    spec = decoder_spec(
        config,
        reads=(
            "attention_chunk_size",
            "attn_temperature_tuning",
            "no_rope_layers",
            "no_rope_layer_interval",
            "use_qk_norm",
        ),
        layer_kinds=("full_attention", "chunked_attention"),
        intermediate_size=config.intermediate_size_mlp,
        rotated=rotated,
        unrotated_growth=query_growth(config.attn_scale, config.floor_scale, names, shift=1) if tuned else None,
        interleaved_rope=True,
        qk_norm="unit" if config.use_qk_norm else None,
        late_qk_norm=bool(config.use_qk_norm),
        qkv_bias=bias,
        output_bias=bias,
        experts=_experts(
            config,
            "num_local_experts",
            config.intermediate_size,
            layers=tuple(index in config.moe_layers for index in layers),
            scoring="sigmoid",
            scales_inputs=True,
            stack_layout="columns",
            shared_size=config.intermediate_size,
        ),
    )
    chunk = config.attention_chunk_size
    if "chunked_attention" not in config.layer_types or chunk >= spec.max_position:
        return spec
    if chunk < 1:
        raise UnsupportedModel(f"attention_chunk_size is {chunk}, but must be 1 or more")
    return replace(spec, max_position=chunk, context_limit=f"attention_chunk_size={chunk}")


def glm4_moe(config: Any) -> DecoderSpec:
    """GLM 4.5 and 4.6: a part of each head is rotated, and mixtures are DeepSeek-V3's. Layers that predict further
    tokens are not read."""
    return decoder_spec(
        config,
        qkv_bias=bool(config.attention_bias),
        reads=("use_qk_norm",),
        qk_norm="head" if config.use_qk_norm else None,
        partial_rotary=True,
        experts=deepseek_experts(config, behind_dense(config)),
        ignored_weights=further_layers(config),
    )


def glm4v_moe(config: Any) -> DecoderSpec:
    """The text half of GLM 4.5V and 4.6V: GLM 4.5. The three positions of a token differ in images only."""
    return decoder_spec(
        config,
        ropes=(rope_spec(config, head_dim_of(config), partial=True, ignored=("mrope_section",)),),
        qkv_bias=bool(config.attention_bias),
        experts=deepseek_experts(config, behind_dense(config)),
    )


def lfm2_moe(config: Any) -> DecoderSpec:
    """LFM2's mixtures (Liquid AI, 2025): experts are chosen by corrected sigmoid scores."""
    experts = _experts(
        config,
        "num_experts",
        config.moe_intermediate_size,
        layers=tuple(index >= config.num_dense_layers for index in range(config.num_hidden_layers)),
        scoring="sigmoid",
        renormalize=bool(config.norm_topk_prob),
        scale=config.routed_scaling_factor,
        has_correction=bool(config.use_expert_bias),
    )
    return with_convolutions(config, experts=experts)


def experts_with_gate(config: Any, *, layers: tuple[bool, ...] | None = None, renormalize: bool = True) -> ExpertSpec:
    """Qwen's mixture with a shared expert that a gate scales. `layers`: with a mixture; None: all."""
    return _experts(
        config,
        "num_experts",
        config.moe_intermediate_size,
        layers=layers,
        renormalize=renormalize,
        shared_size=config.shared_expert_intermediate_size,
        has_shared_gate=True,
    )


def further_layers(config: Any) -> tuple[str, ...]:
    """The prefixes of layers that predict further tokens."""
    layers = config.num_hidden_layers
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    further = range(layers, layers + min(count, _MOST_FURTHER))
    return tuple(f"model.layers.{index}." for index in further)


def joined_experts(config: Any) -> ExpertSpec:
    """Gemma 4's mixture, beside each layer's MLP."""
    inner = config.moe_intermediate_size
    if not inner:
        raise UnsupportedModel(f"moe_intermediate_size is {inner}, but must be 1 or more")
    return _experts(config, "num_experts", inner, top="top_k_experts", renormalize=True, joins_mlp=True)


def _experts(
    config: Any, name: str, inner: int, *, layers: tuple[bool, ...] | None = None, top: str = "num_experts_per_tok",
    **differences: Any,
) -> ExpertSpec:  # fmt: skip
    """Return the mixture of a config.

    Args:
        name: the key of the number of experts.  inner: intermediate size of one.  layers: None: all of them.
        top: the key of the number of a token's.
    """
    count, top_k = getattr(config, name), getattr(config, top)
    if not 1 <= count <= _MOST_EXPERTS:
        raise UnsupportedModel(f"{name} is {count}, but must be from 1 to {_MOST_EXPERTS}")
    if not 1 <= top_k <= count:
        raise UnsupportedModel(f"{top} is {top_k}, but must be from 1 to {name}, {count}")
    spec = ExpertSpec(count, top_k, inner, layers or (True,) * config.num_hidden_layers, **differences)
    groups, best = spec.num_groups, spec.top_groups
    counted = type(groups) is int and type(best) is int and 1 <= best <= groups and count % groups == 0
    if not counted or (groups > 1 and count // groups < spec.group_scores):
        raise UnsupportedModel(f"n_group={groups} and topk_group={best} do not fit {name}={count}")
    if not 0 < spec.scale < math.inf:
        raise UnsupportedModel(f"routed_scaling_factor is {spec.scale}, but must be above 0, and finite")
    if count // groups * best < top_k:
        raise UnsupportedModel(f"{top} is {top_k}, but topk_group={best} groups have fewer experts")
    return spec


def deepseek_experts(
    config: Any, layers: tuple[bool, ...] | None, count: str = "n_routed_experts", shared: str = "n_shared_experts",
    **differences: Any,
) -> ExpertSpec:  # fmt: skip
    """Return DeepSeek-V3's mixture, with `differences`: sigmoid scores, corrected, in groups. `count`, `shared`: keys
    of the numbers of experts."""
    fields: dict[str, Any] = {
        "scoring": "sigmoid",
        "renormalize": bool(config.norm_topk_prob),
        "num_groups": config.n_group,
        "top_groups": config.topk_group,
        "scale": config.routed_scaling_factor,
        "has_correction": True,
        "shared_size": config.moe_intermediate_size * (getattr(config, shared) or 0),
    } | differences
    return _experts(config, count, config.moe_intermediate_size, layers=layers, **fields)


def behind_dense(config: Any) -> tuple[bool, ...]:
    """Return per layer whether its MLP is a mixture: the first ones are dense."""
    return tuple(index >= config.first_k_dense_replace for index in range(config.num_hidden_layers))


def layers_said_sparse(config: Any) -> tuple[bool, ...]:
    """Return per layer whether its MLP is a mixture, as `mlp_layer_types` says."""
    kinds = config.mlp_layer_types
    if len(kinds) != config.num_hidden_layers:
        raise UnsupportedModel(f"mlp_layer_types describes {len(kinds)} layers, not {config.num_hidden_layers}")
    return tuple(kind == "sparse" for kind in kinds)


def sparse_layers(config: Any) -> tuple[bool, ...]:
    """Return per layer whether Qwen's MLP is a mixture."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    if step < 1:
        raise UnsupportedModel(f"decoder_sparse_step is {step}, but must be 1 or more")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(config.num_hidden_layers))
