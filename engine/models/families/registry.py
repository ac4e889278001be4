"""The families that the fused decoder computes, each as a function that converts a transformers config to a
`DecoderSpec`.

A family function reads the fields that its config class defines. Settings that would change the result and are not
implemented are refused by name: a model that answers slightly wrong is worse than one that does not load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from engine.models.decoder import DecoderSpec
from engine.models.families import delta, dense, gemma4, latent, mamba, mixtures, short_conv

Family = Callable[[Any], DecoderSpec]

_FAMILIES: Mapping[str, Family] = {
    "arcee": dense.arcee,
    "bamba": mamba.bamba,
    "cohere": dense.cohere,
    "cohere2": dense.cohere2,
    "cohere2_moe": mixtures.cohere2_moe,
    "cwm": dense.ministral,
    "deepseek_v2": latent.deepseek_v2,
    "deepseek_v3": latent.deepseek_v3,
    "ernie4_5": dense.ernie4_5,
    "exaone4": dense.exaone4,
    "exaone_moe": mixtures.exaone_moe,
    "flex_olmo": mixtures.flex_olmo,
    "gemma": dense.gemma,
    "gemma3": dense.gemma3,
    "gemma3_text": dense.gemma3,
    "gemma4_text": gemma4.gemma4,
    "gemma4_unified_text": gemma4.gemma4,
    "glm": dense.glm,
    "glm4": dense.glm4,
    "glm4_moe": mixtures.glm4_moe,
    "glm4_moe_lite": latent.glm4_moe_lite,
    "glm4v_moe_text": mixtures.glm4v_moe,
    "glm4v_text": dense.glm4v,
    "gpt_oss": mixtures.gpt_oss,
    "granite": dense.granite,
    "granitemoe": mixtures.granitemoe,
    "granitemoehybrid": mamba.granitemoehybrid,
    "granitemoeshared": mixtures.granitemoeshared,
    "dots1": mixtures.dots1,
    "ernie4_5_moe": mixtures.ernie4_5_moe,
    "helium": dense.helium,
    "hunyuan_v1_dense": dense.hunyuan,
    "hunyuan_v1_moe": mixtures.hunyuan_moe,
    "hy_v3": mixtures.hy_v3,
    "hyperclovax": dense.hyperclovax,
    "internlm3": dense.llama,
    "iquestcoder": dense.llama,
    "lfm2": short_conv.lfm2,
    "lfm2_moe": mixtures.lfm2_moe,
    "llama": dense.llama,
    "llama4_text": mixtures.llama4,
    "mellum": mixtures.mellum,
    "minicpm3": latent.minicpm3,
    "minimax_m2": mixtures.minimax_m2,
    "ministral": dense.ministral,
    "ministral3": dense.ministral3,
    "mistral": dense.mistral,
    "mistral4": latent.mistral4,
    "mixtral": mixtures.mixtral,
    "nemotron": dense.nemotron,
    "nemotron_h": mamba.nemotron_h,
    "olmo2": dense.olmo2,
    "olmo3": dense.olmo3,
    "olmoe": mixtures.olmoe,
    "phi3": dense.phi3,
    "qwen2": dense.qwen2,
    "qwen2_moe": mixtures.qwen2_moe,
    "qwen2_5_vl_text": dense.qwen2_vl,
    "qwen2_vl_text": dense.qwen2_vl,
    "qwen3": dense.qwen3,
    "qwen3_5_moe_text": delta.qwen3_5_moe,
    "qwen3_5_text": delta.qwen3_5,
    "qwen3_moe": mixtures.qwen3_moe,
    "qwen3_next": delta.qwen3_next,
    "qwen3_vl_moe_text": mixtures.qwen3_vl_moe,
    "qwen3_vl_text": dense.qwen3_vl,
    "sarvam_mla": latent.deepseek_v3,
    "seed_oss": dense.seed_oss,
    "smollm3": dense.smollm3,
    "solar_open": mixtures.solar_open,
    "starcoder2": dense.starcoder2,
    "youtu": latent.youtu,
}

_VISUAL = ("model.visual.", "visual.")
_CONNECTED = ("model.vision_model.", "model.connector.")
_NEWLINE = ("model.image_newline", "image_newline")
IMAGE_MODELS: Mapping[str, tuple[str, ...]] = {
    "gemma4": gemma4.MEDIA_WEIGHTS,
    "gemma4_unified": gemma4.MEDIA_WEIGHTS,
    "glm4v": _VISUAL,
    "glm4v_moe": _VISUAL,
    "idefics3": _CONNECTED,
    "internvl": dense.IMAGE_WEIGHTS,
    "llama4": ("vision_model.", "multi_modal_projector."),
    "llava": dense.IMAGE_WEIGHTS,
    "llava_next": (*dense.IMAGE_WEIGHTS, *_NEWLINE),
    "llava_onevision": (*dense.IMAGE_WEIGHTS, *_NEWLINE),
    "mistral3": dense.IMAGE_WEIGHTS,
    "qwen2_5_vl": _VISUAL,
    "qwen2_vl": _VISUAL,
    "qwen3_5": _VISUAL,
    "qwen3_5_moe": _VISUAL,
    "qwen3_vl": _VISUAL,
    "qwen3_vl_moe": _VISUAL,
    "smolvlm": _CONNECTED,
}
"""Image models whose text half is one of the families -> prefixes of the weights that only images need."""


def fused_family(config: Any) -> Family | None:
    """Return the family function for a config, or None when the fused decoder does not support its model type."""
    if config.model_type not in IMAGE_MODELS:
        return _FAMILIES.get(config.model_type)
    text = _FAMILIES.get(config.get_text_config().model_type)
    return None if text is None else partial(_text_half, text)


def _text_half(family: Family, config: Any) -> DecoderSpec:
    """The decoder of an image model, whose text half is of `family`."""
    text = family(config.get_text_config())
    return replace(
        text,
        architecture=(config.architectures or [config.model_type])[0],
        tied=bool(config.tie_word_embeddings),
        weight_prefixes=("model.language_model.", "language_model.model.", "model.text_model.", "model."),
        ignored_weights=(*text.ignored_weights, *IMAGE_MODELS[config.model_type]),
    )
