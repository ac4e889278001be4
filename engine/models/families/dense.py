"""The families without mixtures of experts; see `engine.models.families.registry`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.decoder import DecoderSpec, NormNames
from engine.models.families.description import decoder_spec, head_dim_of, layer_windows, query_growth, ropes_by_kind
from engine.models.rope import rope_spec

_NORMS_BEFORE: NormNames = ("input_layernorm", None, "post_attention_layernorm", None)

NORMS_BEHIND: NormNames = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")

NORMS_AROUND: NormNames = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip

IMAGE_WEIGHTS = tuple(
    f"{outer}{part}." for outer in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)


def llama(config: Any) -> DecoderSpec:
    """Llama 2 and 3, SmolLM2, and others that say "llama" (Touvron et al. 2023)."""
    bias = bool(config.attention_bias)
    return decoder_spec(config, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.mlp_bias))


def mistral(config: Any) -> DecoderSpec:
    """Mistral (Jiang et al. 2023): Llama with one sliding window for all layers."""
    return decoder_spec(config, windows=(config.sliding_window,) * config.num_hidden_layers)


def ministral(config: Any) -> DecoderSpec:
    """Ministral (2024), and CWM (2025) likewise: Llama whose layers slide or not, as `layer_types` says."""
    return decoder_spec(config, windows=layer_windows(config), mlp_bias=bool(getattr(config, "mlp_bias", False)))


def ministral3(config: Any) -> DecoderSpec:
    """Ministral 3 (Mistral AI, 2025): Llama with YaRN, whose queries grow with their position."""
    parameters = config.rope_parameters
    beta = parameters.get("llama_4_scaling_beta")
    rope = rope_spec(config, config.head_dim, ignored=("llama_4_scaling_beta", "max_position_embeddings"))
    if beta is not None:
        names = "llama_4_scaling_beta", "original_max_position_embeddings"
        rope = replace(rope, growth=query_growth(beta, parameters[names[1]], names))
    return decoder_spec(config, ropes=(rope,), windows=(config.sliding_window,) * config.num_hidden_layers)


def seed_oss(config: Any) -> DecoderSpec:
    """Seed-OSS (2025): Llama with biases of q, k and v."""
    return decoder_spec(
        config,
        qkv_bias=bool(config.attention_bias),
        output_bias=bool(config.attention_out_bias),
        mlp_bias=bool(config.mlp_bias),
    )


def smollm3(config: Any) -> DecoderSpec:
    """SmolLM3 (2025): Llama, every fourth layer of which has no positions."""
    bias = bool(config.attention_bias)
    rotated = [bool(rotates) for rotates in config.no_rope_layers[: config.num_hidden_layers]]
    return decoder_spec(
        config,
        reads=("no_rope_layers", "no_rope_layer_interval"),
        rotated=rotated,
        windows=layer_windows(config) if config.use_sliding_window else (None,) * config.num_hidden_layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.mlp_bias),
    )


def ernie4_5(config: Any) -> DecoderSpec:
    """ERNIE 4.5 (technical report, 2025), its dense models: Llama whose rotated pairs are neighbours."""
    bias = bool(config.use_bias)
    return decoder_spec(config, interleaved_rope=True, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def helium(config: Any) -> DecoderSpec:
    """Helium 1 (Kyutai, 2025): Llama whose rotated pairs are neighbours."""
    return decoder_spec(
        config, interleaved_rope=True, qkv_bias=bool(config.attention_bias), mlp_bias=bool(config.mlp_bias)
    )


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
    return decoder_spec(
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
    return decoder_spec(
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


def glm4v(config: Any) -> DecoderSpec:
    """The text half of GLM-4.1V: GLM-4-0414. The three positions of a token differ in images only."""
    outputs = "post_self_attn_layernorm", "post_mlp_layernorm"
    rope = rope_spec(config, head_dim_of(config), partial=True, ignored=("mrope_section",))
    return _glm(config, ("input_layernorm", outputs[0], "post_attention_layernorm", outputs[1]), ropes=(rope,))


def _glm(config: Any, norms: NormNames, **differences: Any) -> DecoderSpec:
    return decoder_spec(
        config,
        **differences,
        partial_rotary=True,
        interleaved_rope=True,
        qkv_bias=bool(getattr(config, "attention_bias", True)),  # GLM-4.1V's has no such key
        fused_gate_up=True,
        norms=norms,
    )


def olmo2(config: Any) -> DecoderSpec:
    """OLMo 2 (OLMo team, 2025, section 2.1): norms behind attention and MLP only, and of all of q and of k."""
    bias = bool(config.attention_bias)
    return decoder_spec(config, qk_norm="projection", norms=NORMS_BEHIND, qkv_bias=bias, output_bias=bias)


def olmo3(config: Any) -> DecoderSpec:
    """OLMo 3 (2025): OLMo 2, most layers of which slide, with frequencies by kind of layer."""
    bias = bool(config.attention_bias)
    return decoder_spec(
        config,
        windows=layer_windows(config),
        **ropes_by_kind(config, head_dim_of(config)),
        qk_norm="projection",
        norms=NORMS_BEHIND,
        qkv_bias=bias,
        output_bias=bias,
    )


def exaone4(config: Any) -> DecoderSpec:
    """EXAONE 4.0 (LG AI Research, 2025): norms behind attention and MLP only; where some layers slide, the others have
    no positions."""
    windows = layer_windows(config)
    rotated = [config.sliding_window is None or window is not None for window in windows]
    return decoder_spec(config, windows=windows, rotated=rotated, qk_norm="head", norms=NORMS_BEHIND)


def cohere(config: Any) -> DecoderSpec:
    """Command R and R+ (Cohere, 2024): attention and MLP in parallel, LayerNorm without a bias."""
    reads = ("logit_scale", "use_qk_norm")
    return cohere_like(config, reads=reads, qk_norm="heads" if config.use_qk_norm else None)


def cohere2(config: Any) -> DecoderSpec:
    """Command R7B and A (Cohere, 2025): Command R whose layers that don't slide have no positions."""
    windows = layer_windows(config)
    rotated = [window is not None for window in windows]
    return cohere_like(config, reads=("logit_scale",), windows=windows, rotated=rotated)


def cohere_like(config: Any, **differences: Any) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return decoder_spec(
        config,
        **({"norm_eps": config.layer_norm_eps, "layer_norm": True} | differences),
        norms=("input_layernorm", None, None, None),
        parallel=True,
        interleaved_rope=True,
        logits_scale=1.0 if config.logit_scale is None else float(config.logit_scale),
        qkv_bias=bias,
        output_bias=bias,
    )


def hunyuan(config: Any, **differences: Any) -> DecoderSpec:
    """Hunyuan of 2025 (Tencent), dense: Llama whose q and k are normed per head behind the rotation."""
    bias = bool(config.attention_bias)
    return decoder_spec(
        config,
        ropes=(rope_spec(config, head_dim_of(config), ignored=("alpha",)),),
        qk_norm="head",
        late_qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        **differences,
    )


def arcee(config: Any) -> DecoderSpec:
    """Arcee Foundation Models (2025): Llama whose MLPs have no gate."""
    bias = bool(config.attention_bias)
    return decoder_spec(config, has_gates=False, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.mlp_bias))


def nemotron(config: Any) -> DecoderSpec:
    """Nemotron 3 and 4 (Parmar et al. 2024) and Minitron: LayerNorm, MLPs without a gate, heads rotated in part."""
    bias = bool(config.attention_bias)
    return decoder_spec(
        config,
        has_gates=False,
        partial_rotary=True,
        norm_eps=config.norm_eps,
        layer_norm=True,
        norm_bias=True,
        norm_offset=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.mlp_bias),
    )


def starcoder2(config: Any) -> DecoderSpec:
    """StarCoder2 (Lozhkov et al. 2024): LayerNorm, MLPs without a gate, and one sliding window for all layers."""
    bias = bool(config.use_bias)
    return decoder_spec(
        config,
        has_gates=False,
        windows=(config.sliding_window,) * config.num_hidden_layers,
        norm_eps=config.norm_epsilon,
        layer_norm=True,
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        stored_as={
            "mlp.c_fc": {"mlp.up_proj": config.intermediate_size}, "mlp.c_proj": {"mlp.down_proj": config.hidden_size},
        },
    )  # fmt: skip


def qwen2(config: Any) -> DecoderSpec:
    """Qwen 2 and 2.5: biases on q, k and v; the later layers may slide."""
    return decoder_spec(config, qkv_bias=True, windows=layer_windows(config))


def qwen2_vl(config: Any) -> DecoderSpec:
    """The text half of Qwen2-VL and Qwen2.5-VL: Qwen 2. The three positions of a token differ in images only."""
    rope = rope_spec(config, head_dim_of(config), ignored=("mrope_section",))
    return decoder_spec(config, ropes=(rope,), qkv_bias=True, windows=layer_windows(config))


def qwen3(config: Any) -> DecoderSpec:
    """Qwen 3: q and k normed per head."""
    bias = bool(config.attention_bias)
    return decoder_spec(config, qk_norm="head", qkv_bias=bias, output_bias=bias, windows=layer_windows(config))


def qwen3_vl(config: Any) -> DecoderSpec:
    """The text half of Qwen3-VL: Qwen 3. The three positions of a token differ in images only."""
    bias = bool(config.attention_bias)
    rope = rope_spec(config, config.head_dim, ignored=("mrope_section", "mrope_interleaved"))
    return decoder_spec(config, ropes=(rope,), qk_norm="head", qkv_bias=bias, output_bias=bias)


def gemma(config: Any) -> DecoderSpec:
    """Gemma (Gemma team, 2024), the first."""
    bias = bool(config.attention_bias)
    scale = config.hidden_size**0.5
    return decoder_spec(config, qkv_bias=bias, output_bias=bias, norm_offset=True, embedding_scale=scale)


def gemma3(config: Any) -> DecoderSpec:
    """Gemma 3 (technical report, section 2), also the text half of its image models."""
    images = config.model_type == "gemma3"
    text = config.get_text_config()
    bias = bool(text.attention_bias)
    return decoder_spec(
        text,
        activation=text.hidden_activation,
        windows=layer_windows(text),
        **ropes_by_kind(text, text.head_dim),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        norm_offset=True,
        norms=NORMS_AROUND,
        attention_scale=text.query_pre_attn_scalar**-0.5,
        embedding_scale=text.hidden_size**0.5,
        final_softcap=text.final_logit_softcapping,
        weight_prefixes=("model.language_model.", "language_model.model.") if images else ("model.",),
        ignored_weights=IMAGE_WEIGHTS if images else (),
    )
