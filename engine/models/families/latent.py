"""The families with multi-head latent attention (`engine.models.latent`); see `engine.models.families.registry`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.families.description import decoder_spec, query_growth
from engine.models.families.mixtures import behind_dense, deepseek_experts, further_layers, layers_said_sparse
from engine.models.latent import LatentSpec
from engine.models.rope import rope_spec

_MAX_SIZE = 1 << 14
"""Of a head or a latent vector, far above any model's."""


_MAX_FACTOR = 1 << 16
"""Of a context's extension, far above any model's."""


def deepseek_v2(config: Any) -> DecoderSpec:
    """DeepSeek-V2 (DeepSeek-AI 2024): softmax scores; groups of experts, where there are some, are ranked by their best
    one."""
    _expect(config, topk_method=("greedy", "group_limited_greedy"), scoring_func=("softmax",), mlp_bias=(False,))
    _expect(config, norm_topk_prob=(False,))  # the paper and transformers have no such weights
    grouped = config.topk_method == "group_limited_greedy"
    experts = deepseek_experts(
        config,
        behind_dense(config),
        scoring="softmax",
        has_correction=False,
        num_groups=config.n_group if grouped else 1,
        top_groups=config.topk_group if grouped else 1,
        group_scores=1,
    )
    return _latent(config, interleaved_rope=True, experts=experts)


def deepseek_v3(config: Any) -> DecoderSpec:
    """DeepSeek-V3 and R1 (DeepSeek-AI 2024), and models of their shape. Layers that predict further tokens are not
    read."""
    _expect(config, topk_method=("noaux_tc",), scoring_func=("sigmoid",))
    return _latent(
        config, experts=deepseek_experts(config, behind_dense(config)), ignored_weights=further_layers(config)
    )


def glm4_moe_lite(config: Any) -> DecoderSpec:
    """GLM 4.7 Flash: DeepSeek-V3. Layers that predict further tokens are not read."""
    experts = deepseek_experts(config, layers_said_sparse(config))
    return _latent(config, experts=experts, ignored_weights=further_layers(config))


def youtu(config: Any) -> DecoderSpec:
    """Youtu-LLM (Tencent, 2025): DeepSeek-V3 without mixtures."""
    return _latent(config)


def minicpm3(config: Any) -> DecoderSpec:
    """MiniCPM 3 (OpenBMB, 2024): small, with scaled embeddings, residuals and logits (Hu et al. 2024, section 4)."""
    if config.dim_model_base < 1:
        raise UnsupportedModel(f"dim_model_base is {config.dim_model_base}, but must be 1 or more")
    return _latent(
        config,
        interleaved_rope=False,
        reads=("logits_scaling",),
        mlp_bias=bool(config.mlp_bias),
        embedding_scale=float(config.scale_emb),
        residual_scale=config.scale_depth / math.sqrt(config.num_hidden_layers),
        logits_scale=1.0 / config.logits_scaling,
    )


def mistral4(config: Any) -> DecoderSpec:
    """Mistral Small 4 (Mistral AI, 2026): DeepSeek-V3 with softmax scores, whose queries grow with their position."""
    parameters = config.rope_parameters
    beta = parameters.get("llama_4_scaling_beta")
    ignored = ("llama_4_scaling_beta", "max_position_embeddings")
    # The config counts all of a query's dimensions, and says which part of them is rotated.
    rope = replace(rope_spec(config, config.head_dim, partial=True, ignored=ignored), passing=0)
    if beta is not None:
        names = "llama_4_scaling_beta", "original_max_position_embeddings"
        rope = replace(rope, growth=query_growth(beta, parameters[names[1]], names))
    experts = deepseek_experts(config, behind_dense(config), scoring="softmax", has_correction=False)
    return _latent(config, ropes=(rope,), experts=experts)


def _latent(config: Any, **differences: Any) -> DecoderSpec:
    """Return a decoder with the config's latent attention."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    sizes = {name: getattr(config, name) for name in names}
    for name, size in sizes.items():
        if name == "q_lora_rank" and size is None:
            continue
        if type(size) is not int or not 1 <= size <= _MAX_SIZE:
            raise UnsupportedModel(f"{name} is {size!r}, but must be from 1 to {_MAX_SIZE}")
    bias = bool(config.attention_bias)
    if bias and sizes["q_lora_rank"] is None:
        raise UnsupportedModel("attention_bias=True without q_lora_rank is not supported")
    latent = LatentSpec(
        query_rank=sizes["q_lora_rank"],
        rank=sizes["kv_lora_rank"],
        plain_dim=sizes["qk_nope_head_dim"],
        rotated_dim=sizes["qk_rope_head_dim"],
        value_dim=sizes["v_head_dim"],
    )
    fields: dict[str, Any] = {
        "attention_scale": latent.query_dim**-0.5 * _length_factor(config.rope_parameters),
        "qkv_bias": bias,
        "output_bias": bias,
    } | differences
    if "interleaved_rope" not in fields:
        fields["interleaved_rope"] = bool(config.rope_interleave)
    return decoder_spec(config, latent=latent, **fields)


def _length_factor(parameters: Mapping[str, Any]) -> float:
    """Of scores, of a model whose context was extended: the square of YaRN's attention factor (Peng et al. 2023,
    section 3.4), where `mscale_all_dim` says that the rotation does not apply it."""
    scale, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if parameters.get("rope_type", "default") == "default" or not scale or factor is None:
        return 1.0
    for name, value in (("mscale_all_dim", scale), ("factor", factor)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MAX_FACTOR:
            raise UnsupportedModel(f"{name} is {value!r}, but must be above 0, to {_MAX_FACTOR}")
    return float(0.1 * scale * math.log(max(1.0, factor)) + 1) ** 2


def _expect(config: Any, **known: tuple[Any, ...]) -> None:
    """Refuse settings with other values than these."""
    for name, values in known.items():
        value = getattr(config, name, None)
        if value is not None and value not in values:
            raise UnsupportedModel(f"{name}={value!r} is not supported for {config.model_type} models")
