"""Tiny random models of every family, saved as their real checkpoints are: config.json and safetensors.

Their weights are drawn wide enough that the likeliest token leads clearly and that position, window and order of the
prompt all matter: with transformers' small default init, a model that ignores its positions would pass most tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

WINDOW = 8
"""Sliding window of the tiny models that have one; prompts of tests are longer."""

_SHAPE = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


_LLAMA3 = _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_GROWING = _rope("yarn", factor=16.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.5)
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 24,
    "rope_parameters": _GEMMA_ROPE,
}
_SLIDING_QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_MIXED_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_OLMO3_ROPE = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 50_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 50_000.0},
}
_GRANITE = {
    "logits_scaling": 4.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6,
}  # fmt: skip
_GRANITE4 = {**_GRANITE, "shared_intermediate_size": 40, "mamba_n_heads": 4, "layer_types": ["full_attention"] * 3}
_MAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 20, "tie_word_embeddings": False,
}  # fmt: skip
_GRANITE4_MAMBA = {
    **_GRANITE4, **_MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "linear_attention"],
    "head_dim": 16, "ssm_state_size": 20, "mamba_num_heads": 6, "mamba_head_dim": 12, "n_groups": 2,
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.5,
    "time_step_min": 1e-9,  # to which transformers raises the step sizes of prompts, but not of answers
}  # fmt: skip
_GPT2 = {"vocab_size": 257, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 512, "eos_token_id": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_MIXED = {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3], "num_experts_per_tok": 3}
_QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 2,
}
_GLM = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "num_nextn_predict_layers": 0,
}
_LATENT = {
    "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 4,
}  # fmt: skip
_LATENT_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.8, mscale_all_dim=0.9)
_DEEPSEEK = {
    **_LATENT,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
_DEEPSEEK_V2 = {**_DEEPSEEK, **_LATENT_YARN, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}
_DEEPSEEK_V3 = {**_DEEPSEEK, "n_group": 3, "topk_group": 2, "num_nextn_predict_layers": 0}
_UNGROUPED = {"n_group": 1, "topk_group": 1}
_ERNIE_MOE = {
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 24,
    "moe_layer_start_index": 1,
    "tie_word_embeddings": False,
}
_LLAMA4 = {
    **_LLAMA3,
    "head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "moe_layers": [1, 2],
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 128,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
_HUNYUAN_ROPE = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0}}
_SIX_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
_SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"], "moe_intermediate_size": 24}
_SHARED = {"num_shared_experts": 2, **_SIX_EXPERTS, **_SPARSE}
_EXAONE_MOE = {**_SHARED, **_MIXED_WINDOWS, "n_group": 3, "topk_group": 2}
_MELLUM = {**_SIX_EXPERTS, **_SPARSE, **_MIXED_WINDOWS, "head_dim": 16, "rope_parameters": _OLMO3_ROPE}
_SOLAR = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
_COHERE_MOE = {
    **_SIX_EXPERTS,
    **_MIXED_WINDOWS,
    "head_dim": 12,
    "intermediate_size": 24,
    "prefix_dense_intermediate_size": 80,
    "mlp_layer_types": ["sparse", "dense", "sparse"],
}
_GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    **_MIXED_WINDOWS,
    **_rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
}
_DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 8,
    **_rope("default", partial_rotary_factor=0.25),
}
_DELTA_MOE = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
_GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 50_000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
}
_GEMMA4_SMALL = {
    **_GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 260,
}
_GEMMA4_MOE = {
    **_GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24,
}  # fmt: skip
_LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": False}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama3-rope": ("LlamaConfig", _LLAMA3),
    "llama-linear": ("LlamaConfig", _rope("linear", factor=4.0)),
    "llama-yarn": ("LlamaConfig", _YARN),
    "llama-dynamic": ("LlamaConfig", {**_rope("dynamic", factor=4.0), "max_position_embeddings": 16}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2": ("Qwen2Config", _SLIDING_QWEN),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-sliding": ("Qwen3Config", {"head_dim": 16, **_SLIDING_QWEN}),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "gemma3-softcap": ("Gemma3TextConfig", {**_GEMMA, "final_logit_softcapping": 5.0}),
    "gemma4": ("Gemma4TextConfig", _GEMMA4),
    "gemma4-moe": ("Gemma4TextConfig", _GEMMA4_MOE),
    "gemma4-small": ("Gemma4TextConfig", _GEMMA4_SMALL),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "ministral": ("MinistralConfig", {**_MIXED_WINDOWS, "head_dim": 16}),
    "cwm": ("CwmConfig", {**_MIXED_WINDOWS, "head_dim": 12, **_LLAMA3}),
    "seed-oss": ("SeedOssConfig", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW}),
    "ernie4.5": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True}),
    "helium": ("HeliumConfig", {"head_dim": 12, "attention_bias": True}),
    "granite": ("GraniteConfig", _GRANITE),
    "hyperclovax": ("HyperCLOVAXConfig", {**_GRANITE, "attention_bias": True}),
    "internlm3": ("InternLM3Config", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "ministral3": ("Ministral3Config", {"head_dim": 16, **_GROWING}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "phi3-partial": ("Phi3Config", {"partial_rotary_factor": 0.5, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {**_MIXED_WINDOWS, "rope_parameters": _OLMO3_ROPE}),
    "exaone4": ("Exaone4Config", _MIXED_WINDOWS),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "cohere-norms": ("CohereConfig", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("Cohere2Config", _MIXED_WINDOWS),
    "gpt2": ("GPT2Config", _GPT2),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5}),
    "gpt-neox": ("GPTNeoXConfig", {"rotary_pct": 0.5, "num_key_value_heads": 4}),
    "opt": ("OPTConfig", {"ffn_dim": 80, "word_embed_proj_dim": 48, "num_key_value_heads": 4}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4, "head_dim": 16}),
    "qwen2-moe": ("Qwen2MoeConfig", _QWEN2_MOE),
    "qwen3-moe-mixed": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 6, "head_dim": 16, **_MIXED}),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 3, "attention_bias": True}),
    "granite-moe": ("GraniteMoeConfig", {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    ),
    "granite4": (
        "GraniteMoeHybridConfig",
        {**_GRANITE4, "num_local_experts": 0, "num_experts_per_tok": None, "position_embedding_type": "rope"},
    ),
    "granite4-nope": ("GraniteMoeHybridConfig", {**_GRANITE4, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite4-mamba": (
        "GraniteMoeHybridConfig",
        {**_GRANITE4_MAMBA, "num_local_experts": 0, "num_experts_per_tok": None, "mamba_proj_bias": True},
    ),
    "granite4-mamba-moe": (
        "GraniteMoeHybridConfig",
        {
            **_GRANITE4_MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "time_step_limit": [0.05, 0.5],
        },
    ),
    "bamba": ("BambaConfig", {**_MAMBA, "mamba_n_groups": 3, "attn_layer_indices": [1], "attention_bias": True}),
    "nemotron-h": ("NemotronHConfig", _NEMOTRON_H),
    "nemotron-h-dense": (
        "NemotronHConfig",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["mlp", "full_attention", "linear_attention"],
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    "arcee": ("ArceeConfig", {"attention_bias": True}),
    "nemotron": ("NemotronConfig", {"mlp_bias": True, "tie_word_embeddings": False}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW, "num_key_value_heads": 1}),
    "dots1": ("Dots1Config", {**_GLM, "head_dim": 16, "first_k_dense_replace": 1, "norm_topk_prob": True}),
    "ernie4.5-moe": ("Ernie4_5_MoeConfig", _ERNIE_MOE),
    "glm4-moe": ("Glm4MoeConfig", _GLM),
    "glm4-moe-grouped": ("Glm4MoeConfig", {**_GLM, "n_group": 3, "topk_group": 2, "head_dim": 16, "use_qk_norm": True}),
    "gpt-oss": ("GptOssConfig", _GPT_OSS),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 16, **_HUNYUAN_ROPE}),
    "hunyuan-moe": ("HunYuanMoEV1Config", {"head_dim": 16, "num_experts": 6, "moe_topk": 3}),
    "hy-v3": ("HYV3Config", {**_SHARED, "head_dim": 16}),
    "minimax-m2": (
        "MiniMaxM2Config",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            **_rope("default", partial_rotary_factor=0.5),
        },
    ),
    "exaone-moe": ("ExaoneMoeConfig", _EXAONE_MOE),
    "solar-open": ("SolarOpenConfig", _SOLAR),
    "mellum": ("MellumConfig", _MELLUM),
    "flex-olmo": ("FlexOlmoConfig", {**_SIX_EXPERTS, "norm_topk_prob": True}),
    "cohere2-moe": ("Cohere2MoeConfig", {**_COHERE_MOE, "rms_norm_eps": 1e-5}),
    "cohere2-moe-sigmoid": (
        "Cohere2MoeConfig",
        {
            **_COHERE_MOE,
            "expert_selection_fn": "sigmoid",
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
        },
    ),
    "llama4": ("Llama4TextConfig", _LLAMA4),
    "llama4-yarn": ("Llama4TextConfig", {**_LLAMA4, **_YARN}),
    "llama4-plain": (
        "Llama4TextConfig",
        {**_LLAMA4, "attn_temperature_tuning": False, "use_qk_norm": False, "num_experts_per_tok": 2},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {**_DELTA, **_DELTA_MOE, "attention_bias": True, "mlp_only_layers": [1], "linear_value_head_dim": 20},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**_DELTA, **_DELTA_MOE}),
    "deepseek-v2": ("DeepseekV2Config", {**_DEEPSEEK_V2, "q_lora_rank": 16, "attention_bias": True}),
    "deepseek-v2-lite": ("DeepseekV2Config", {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"}),
    "sarvam-mla": ("SarvamMLAConfig", {**_DEEPSEEK_V3, **_LATENT_YARN}),
    "deepseek-v3": ("DeepseekV3Config", {**_DEEPSEEK_V3, **_LATENT_YARN, "q_lora_rank": 16}),
    "deepseek-v3-halves": ("DeepseekV3Config", {**_DEEPSEEK_V3, "q_lora_rank": None, "rope_interleave": False}),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", {**_DEEPSEEK, **_UNGROUPED, "q_lora_rank": 16}),
    "youtu": ("YoutuConfig", {**_LATENT, "q_lora_rank": 16, "tie_word_embeddings": True, "pad_token_id": None}),
    "minicpm3": ("MiniCPM3Config", {**_LATENT, "q_lora_rank": 16, "dim_model_base": 24, "tie_word_embeddings": True}),
    "mistral4": ("Mistral4Config", {**_DEEPSEEK, **_UNGROUPED, **_GROWING, "q_lora_rank": 16}),
    "lfm2": ("Lfm2Config", {**_LFM2, "block_multiple_of": 16}),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {**_LFM2, **_EXPERTS, "num_experts": 6, "num_dense_layers": 1, "conv_bias": True},
    ),
    "jetmoe": ("JetMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}),
}
"""Family -> its transformers config class and what differs from the common shape."""

MIXTURES = (
    "mixtral", "qwen2-moe", "qwen3-moe", "qwen3-moe-mixed", "olmoe", "granite-moe", "dots1", "ernie4.5-moe", "glm4-moe",
    "glm4-moe-grouped", "gpt-oss", "llama4", "llama4-yarn", "llama4-plain", "hunyuan-moe", "hy-v3", "minimax-m2",
    "exaone-moe", "solar-open", "mellum", "flex-olmo", "cohere2-moe", "cohere2-moe-sigmoid", "deepseek-v2",
    "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-halves", "glm4-moe-lite", "granite-moe-shared", "granite4-nope",
    "sarvam-mla",
)  # fmt: skip
"""Families with experts that the fused decoder computes."""

FUSED = (
    "llama", "llama-tied", "llama-bias", "llama3-rope", "llama-linear", "llama-yarn", "mistral", "qwen2", "qwen3",
    "qwen3-sliding", "gemma", "gemma3", "gemma3-softcap", "ministral", "cwm", "seed-oss", "smollm3", "ernie4.5",
    "helium", "granite", "phi3", "phi3-partial", "glm", "glm4", "olmo2", "olmo3", "exaone4", "cohere", "cohere-norms",
    "cohere2", "hyperclovax", "internlm3", "ministral3", "hunyuan", "youtu", "minicpm3", "granite4", "arcee",
    "nemotron", "starcoder2", "gemma4", "gemma4-small", "gemma4-moe",
    *MIXTURES,
)  # fmt: skip
"""Families that the fused decoder computes and whose rotation does not depend on the sequence's length."""

WITH_STATES = (
    "qwen3-next", "qwen3.5", "qwen3.5-moe", "lfm2", "lfm2-moe", "granite4-mamba", "granite4-mamba-moe", "bamba",
    "nemotron-h", "nemotron-h-dense",
)  # fmt: skip
"""Families that the fused decoder computes and some of whose layers have states instead of keys and values."""


LATENT = (
    "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-halves", "glm4-moe-lite", "youtu", "minicpm3",
    "sarvam-mla",
)  # fmt: skip
"""Families with latent attention."""

FALLBACK = ("gpt2", "phi", "phi3", "gpt-neox", "opt", "cohere", "granite", "jetmoe")
"""Families that go through transformers' own code, or can be made to."""


def make_config(family: str, **changes: Any) -> Any:
    """The transformers config of a tiny model of this family."""
    class_name, differences = FAMILIES[family]
    shape = {} if family == "gpt2" else _SHAPE
    if not hasattr(transformers, class_name):
        pytest.skip(f"NOT TESTED HERE: {family}; transformers {transformers.__version__} does not know it")
    return getattr(transformers, class_name)(**{**shape, **differences, **changes})


def make_tiny_model(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    max_shard_size: str = "5GB",
    edit: Callable[[Any], None] | None = None,
    **changes: Any,
) -> Path:
    """Save a random float32 model of `family` in `folder` (config changed by `changes`) and return the folder."""
    config = make_config(family, **changes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            _draw(name, parameter, tied=config.tie_word_embeddings, scaled="gemma" in family)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
        if edit is not None:
            edit(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _draw(name: str, parameter: torch.Tensor, *, tied: bool, scaled: bool) -> None:
    if name.endswith((".A_log", ".dt_bias")) and "linear_attn" not in name:
        # Decays of a half to nearly 1: else a Mamba-2 layer remembers nothing, or everything.
        parameter.normal_(-1.5 if name.endswith("dt_bias") else 0.0, 0.7)
    elif parameter.dim() < 2:
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    elif "embed" in name or "wte" in name or "wpe" in name:
        # Through a tied head, wide embeddings would only ever repeat the last token.
        parameter.normal_(std=0.1 if scaled else 0.3 if tied else 1.0)
    else:
        fan_in = parameter.shape[0] if ".c_" in name else parameter.shape[-1]
        gain = 2.0 if any(part in name for part in ("q_proj", "k_proj", "c_attn", "query_key_value")) else 1.2
        parameter.normal_(std=gain * fan_in**-0.5)
