"""GGUF files as checkpoints: converts llama.cpp's names, layouts and metadata to those of transformers.

llama.cpp interleaves the rotary halves of Llama's q and k and adds Gemma's 1 to its norm weights; both are undone
here. Its metadata is read key by key, and an unknown key is refused: it may change the result.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.config import built_config, check_sizes, end_tokens
from engine.checkpoints.gguf_file import GGUFFile
from engine.errors import CorruptWeights, UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.families.registry import fused_family
from engine.quant.weight import QWeight

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_DEEPSEEK_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
_EXPERT_KEYS = {
    "mixtral": _LOCAL_EXPERTS,
    "granitemoe": _LOCAL_EXPERTS,
    "qwen2_moe": _QWEN_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    "qwen3_moe": _QWEN_EXPERTS,
    "olmoe": {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    "glm4_moe": _DEEPSEEK_EXPERTS,
    "dots1": _DEEPSEEK_EXPERTS,
    "ernie4_5_moe": {
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "moe_num_shared_experts",
        "interleave_moe_layer_step": "moe_layer_interval",
        "leading_dense_block_count": "moe_layer_start_index",
    },
    "gpt_oss": _LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
}
"""Model type of a mixture -> metadata of its sizes, and the config's names of them."""

_HARMLESS = {"vocab_size", "rope.scaling.finetuned"}
_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's numbers of the functions that make scores of a router's products."""
_GATING = {"dots1": _SIGMOID, "glm4_moe": _SIGMOID}
"""Model type of a mixture -> its function; others: softmax."""

_CORRECTION = "exp_probs_b.bias"
_GEMMA_PATTERN, _GEMMA_LOCAL_THETA = 6, 10_000.0
_GEMMA_27B_LAYERS = 62

_ROPE_FACTORS = "rope_freqs.weight"
_LONG_ROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
_MOST_FACTORS = 1 << 16
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_STACKS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
"""Tensors of all experts of a layer -> the modules of each, one above the other."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How llama.cpp stores an architecture.

    Attributes:
        model_type, class_name: in transformers.
        names: a layer's tensors -> transformers' modules, where they differ from `_INNER`.
        keys: metadata of its own -> config keys; each may be missing.
        biases: config keys -> the tensors of the first layer that have a bias if they are set.
        sorts_pairs: the converter puts the two rows of q and k that are rotated together next to each other.
        adds_one: the converter adds 1 to norms.
        partial: heads may be rotated in part.
        epsilon: (metadata, config key) of the norms' epsilon.
    """

    model_type: str
    class_name: str
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    sorts_pairs: bool = False
    adds_one: bool = False
    partial: bool = False
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")


_GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_ATTENTION_BIAS = {"attention_bias": "attn_q"}
_BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}
_MISTRALS = {"mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"}
"""Model types that llama.cpp stores as Llama -> their classes."""
_LAYER_NORM = ("attention.layer_norm_epsilon", "layer_norm_eps")
_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", biases=_BIASES, sorts_pairs=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM"),
    "gemma": _Architecture("gemma", "GemmaForCausalLM", adds_one=True),
    "gemma3": _Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        names={
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        adds_one=True,
    ),
    "qwen2moe": _Architecture("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": _Architecture("qwen3_moe", "Qwen3MoeForCausalLM"),
    "olmoe": _Architecture("olmoe", "OlmoeForCausalLM"),
    "glm4moe": _Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        names={"post_attention_norm": "post_attention_layernorm"},
        keys={"nextn_predict_layers": "num_nextn_predict_layers", **_GROUPS},
        biases=_ATTENTION_BIAS,
        partial=True,
    ),
    "smollm3": _Architecture("smollm3", "SmolLM3ForCausalLM", biases=_BIASES, sorts_pairs=True),
    "ernie4_5": _Architecture("ernie4_5", "Ernie4_5ForCausalLM", biases={"use_bias": "attn_q"}),
    "ernie4_5-moe": _Architecture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", biases={"use_bias": "attn_q"}),
    "dots1": _Architecture("dots1", "Dots1ForCausalLM", keys=_GROUPS, biases=_ATTENTION_BIAS),
    "gpt-oss": _Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        names={"post_attention_norm": "post_attention_layernorm"},
        keys={"attention.sliding_window": "sliding_window"},
        biases=_ATTENTION_BIAS,
    ),
    "seed_oss": _Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        names={"post_attention_norm": "post_attention_layernorm"},
        biases=_BIASES | {"attention_out_bias": "attn_output"},
    ),
    "granite": _Architecture(
        "granite",
        "GraniteForCausalLM",
        keys=_GRANITE_KEYS,
        biases=_BIASES,
        sorts_pairs=True,
    ),
    "granitemoe": _Architecture(
        "granitemoe", "GraniteMoeForCausalLM", keys=_GRANITE_KEYS, biases=_ATTENTION_BIAS, sorts_pairs=True
    ),
    "olmo2": _Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        biases=_ATTENTION_BIAS,
    ),
    "phi3": _Architecture("phi3", "Phi3ForCausalLM", names={"ffn_up": "mlp.gate_up_proj"}, partial=True),
    "glm4": _Architecture(
        "glm4",
        "Glm4ForCausalLM",
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        biases=_ATTENTION_BIAS,
        partial=True,
    ),
    "command-r": _Architecture(
        "cohere", "CohereForCausalLM", keys={"logit_scale": "logit_scale"}, biases=_ATTENTION_BIAS, epsilon=_LAYER_NORM
    ),
    "cohere2": _Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        keys={"logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
        biases=_ATTENTION_BIAS,
        epsilon=_LAYER_NORM,
    ),
}
"""llama.cpp's name -> how it is stored."""


def gguf_architectures() -> dict[str, str]:
    """Transformers' model types whose GGUF files can be read -> their architecture there."""
    return {stored.model_type: name for name, stored in _ARCHITECTURES.items()} | dict.fromkeys(_MISTRALS, "llama")


class GGUFCheckpoint:
    """A GGUF file of one of the fused families, as a `WeightSource` and a transformers config.

    Raises:
        UnsupportedModel: another architecture, a split file, or unknown metadata.
        CorruptWeights: a truncated file, or missing metadata.
    """

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        if metadata.get("split.count", 1) > 1:
            raise UnsupportedModel(
                f"{path} is one of {metadata['split.count']} parts; merge them with gguf-split first"
            )
        name = metadata.get("general.architecture")
        if name not in _ARCHITECTURES:
            raise UnsupportedModel(f"GGUF files of architecture {name!r} can't be loaded; give safetensors")
        self._name, self._architecture = name, _ARCHITECTURES[name]
        self.config = self._config()
        family = fused_family(self.config)
        assert family is not None, self.config.model_type
        self._spec = family(self.config)
        self._stored = self._names()

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored[name]].shape

    def read(self, name: str, into: Tensor) -> None:
        stored = self._stored[name]
        if (heads := self._rotary_heads(name)) is not None:
            self._read_rotary(stored, into, heads)
        else:
            self._file.read(stored, into)
            if self._architecture.adds_one and name.endswith("norm.weight"):
                into.sub_(1)

    def quantized(self, name: str) -> QWeight | None:
        stored = self._stored[name]
        weight = self._file.quantized(stored)
        heads = self._rotary_heads(name)
        if weight is None or heads is None:
            return weight
        return weight.take(torch.arange(weight.n).view(heads, -1, 2).transpose(1, 2).reshape(-1))

    def decoder_spec(self) -> DecoderSpec:
        """Return the fused decoder's spec, with the file's end tokens and frequency factors."""
        spec = replace(self._spec, eos_token_ids=self._end_tokens())
        if _ROPE_FACTORS not in self._file.tensors:
            return spec
        factors = torch.empty(self._file.tensors[_ROPE_FACTORS].shape, dtype=torch.float32)
        self._file.read(_ROPE_FACTORS, factors)
        if factors.shape != (spec.head_dim // 2,):
            raise CorruptWeights(f"{_ROPE_FACTORS} has shape {list(factors.shape)}, not [{spec.head_dim // 2}]")
        stretched = (replace(rope, inverse_frequencies=rope.inverse_frequencies / factors) for rope in spec.ropes)
        return replace(spec, ropes=tuple(stretched))

    def _names(self) -> dict[str, str]:
        """Return the file's tensors by transformers' names. Stacks of experts are split, and the gate of a shared
        expert is a matrix again."""
        inner = {**_INNER, **self._architecture.names}
        found, tensors, experts = dict[str, str](), self._file.tensors, self._spec.experts
        for stored in sorted(tensors.keys() - {_ROPE_FACTORS, *_LONG_ROPE_FACTORS.values()}):
            match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored)
            if experts is None or match is None or match[2] not in _STACKS:
                found[_translate(stored, inner)] = stored
                shape = tensors[stored].shape
                if stored.endswith("ffn_gate_inp_shexp.weight") and len(shape) == 1:
                    tensors[stored] = replace(tensors[stored], shape=(1, *shape))
                elif stored.endswith(_CORRECTION) and shape[:-1] == (1,):
                    tensors[stored] = replace(tensors[stored], shape=shape[1:])
                continue
            axes = 3 if match[3] == "weight" else 2
            if len(shape := tensors[stored].shape) != axes or shape[0] != experts.num_experts:
                wanted = ", ".join([str(experts.num_experts), *["…"] * (axes - 1)])
                raise CorruptWeights(f"tensor {stored} has shape {list(shape)}, not [{wanted}]")
            modules = _STACKS[match[2]]
            for expert, parts in enumerate(self._file.unstack(stored, len(modules))):
                names = (f"model.layers.{match[1]}.mlp.experts.{expert}.{module}.{match[3]}" for module in modules)
                found |= dict(zip(names, parts, strict=True))
        return found

    def _rotary_heads(self, name: str) -> int | None:
        """Return the heads whose rotary halves are interleaved in this tensor's rows; None: they aren't."""
        if not self._architecture.sorts_pairs:
            return None
        if ".self_attn.q_proj." in name:
            return int(self.config.num_attention_heads)
        return int(self.config.num_key_value_heads) if ".self_attn.k_proj." in name else None

    def _read_rotary(self, stored: str, into: Tensor, heads: int) -> None:
        interleaved = torch.empty(self._file.tensors[stored].shape, dtype=into.dtype)
        self._file.read(stored, interleaved)
        pairs = interleaved.view(heads, -1, 2, *interleaved.shape[1:])
        into.copy_(pairs.transpose(1, 2).reshape(interleaved.shape))

    def _end_tokens(self) -> tuple[int, ...]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        ids = {token_id for key in keys for token_id in end_tokens(self._file.metadata.get(key))}
        return tuple(sorted(token_id for token_id in ids if 0 <= token_id < self.config.vocab_size))

    def _config(self) -> Any:
        prefix = f"{self._name}."
        left = {key.removeprefix(prefix): v for key, v in self._file.metadata.items() if key.startswith(prefix)}
        for key in _HARMLESS:
            left.pop(key, None)
        try:
            sizes = {**_SIZES, self._architecture.epsilon[0]: self._architecture.epsilon[1]}
            values = {ours: left.pop(key) for key, ours in sizes.items()}
            values["vocab_size"] = self._file.tensors["token_embd.weight"].shape[0]
        except KeyError as error:
            raise CorruptWeights(f"{self._file.path} lacks {error.args[0]}") from error
        check_sizes(self._file.path, values)
        values["num_key_value_heads"] = left.pop("attention.head_count_kv", values["num_attention_heads"])
        values["head_dim"] = left.pop("attention.key_length", values["hidden_size"] // values["num_attention_heads"])
        for key in ("attention.value_length", "rope.dimension_count"):
            if (size := left.pop(key, values["head_dim"])) == values["head_dim"]:
                continue
            if not self._architecture.partial or key != "rope.dimension_count":
                raise UnsupportedModel(f"{prefix}{key} is {size}, but heads have {values['head_dim']} dimensions")
            values["partial_rotary_factor"] = size / values["head_dim"]
        values["rope_theta"] = left.pop("rope.freq_base", 10_000.0)
        values["rope_scaling"] = self._long_rope(left, values) or _rope_scaling(left)
        values["tie_word_embeddings"] = "output.weight" not in self._file.tensors
        model_type = self._family_values(left, values)
        if model_type in _EXPERT_KEYS:
            values |= self._expert_values(left, _EXPERT_KEYS[model_type])
        elif left.pop("expert_count", 0) > 0:
            raise UnsupportedModel(f"{self._file.path} is a mixture of experts, which {model_type} models are not")
        left.pop("expert_used_count", None)
        if left:
            raise UnsupportedModel(f"{self._file.path}: metadata {prefix}{min(left)} is not understood")
        name = _MISTRALS.get(model_type, self._architecture.class_name)
        return built_config(self._file.path, model_type, architectures=[name], **values)

    def _family_values(self, left: dict[str, Any], values: dict[str, Any]) -> str:
        """Move this architecture's own keys from `left` into `values`; returns the transformers model type."""
        model_type = self._architecture.model_type
        for key, ours in self._architecture.keys.items():
            if key in left:
                values[ours] = left.pop(key)
        for ours, tensor in self._architecture.biases.items():
            values[ours] = f"blk.0.{tensor}.bias" in self._file.tensors
        if model_type == "llama":
            mixture = left.get("expert_count", 0) != 0
            if (window := left.pop("attention.sliding_window", None)) is not None or mixture:
                values["sliding_window"] = window
                return "mixtral" if mixture else "mistral"
        elif model_type in ("granite", "granitemoe"):  # as llama.cpp, where the file doesn't say
            values.setdefault("attention_multiplier", values["head_dim"] ** -0.5)
        elif model_type == "phi3":
            values["sliding_window"] = left.pop("attention.sliding_window", 0) or None
            original = left.pop("rope.scaling.original_context_length", values["max_position_embeddings"])
            values["original_max_position_embeddings"] = original
        elif model_type == "cohere":
            values["use_qk_norm"] = "blk.0.attn_q_norm.weight" in self._file.tensors
        elif model_type == "gemma3_text":
            values["sliding_window"] = left.pop("attention.sliding_window", None)
            values["sliding_window_pattern"] = left.pop("attention.sliding_window_pattern", _GEMMA_PATTERN)
            values["rope_local_base_freq"] = left.pop("rope.freq_base_swa", _GEMMA_LOCAL_THETA)
            values["final_logit_softcapping"] = left.pop("final_logit_softcapping", None)
            # As llama.cpp: the file does not say, but the 27B model alone scales by hidden_size / heads.
            large = values["num_hidden_layers"] == _GEMMA_27B_LAYERS
            per_head = values["hidden_size"] // values["num_attention_heads"]
            values["query_pre_attn_scalar"] = per_head if large else values["head_dim"]
        elif model_type == "qwen3_moe":
            values["norm_topk_prob"] = True
        elif model_type == "ernie4_5_moe":
            left.pop("expert_shared_feed_forward_length", None)  # what its tensors are, which are checked
        elif model_type == "gpt_oss":
            if (scaling := values["rope_scaling"]) is not None:
                scaling["truncate"] = False  # the file does not say; all of them were trained so
        elif model_type == "dots1":
            values["sliding_window"] = left.pop("attention.sliding_window", None)
        elif model_type == "glm4_moe":
            values["num_hidden_layers"] -= values.setdefault("num_nextn_predict_layers", 0)
            values.setdefault("partial_rotary_factor", 1.0)  # the config's own default is a half
            values["use_qk_norm"] = "blk.0.attn_q_norm.weight" in self._file.tensors
        function = _GATING.get(model_type, _SOFTMAX)
        if (stored := left.pop("expert_gating_func", function)) != function:
            raise UnsupportedModel(f"{self._file.path} makes scores of experts by function {stored}, not {function}")
        return model_type

    def _expert_values(self, left: dict[str, Any], keys: dict[str, str]) -> dict[str, Any]:
        """Move the sizes of a mixture from `left`; `keys`: of the file -> of the config."""
        try:
            return {ours: left.pop(key) for key, ours in keys.items()}
        except KeyError as error:
            raise CorruptWeights(f"{self._file.path} lacks {error.args[0]}") from error

    def _long_rope(self, left: dict[str, Any], values: dict[str, Any]) -> dict[str, Any] | None:
        """LongRoPE's parameters, whose factors are tensors; None: the file has none."""
        if not set(_LONG_ROPE_FACTORS.values()) & self._file.tensors.keys():
            return None
        scaling: dict[str, Any] = {"rope_type": "longrope"}
        for ours, name in _LONG_ROPE_FACTORS.items():
            stored = self._file.tensors.get(name)
            if stored is None or len(stored.shape) != 1 or stored.shape[0] > _MOST_FACTORS:
                raise CorruptWeights(f"{self._file.path} must hold {name} as a list of factors")
            factors = torch.empty(stored.shape, dtype=torch.float32)
            self._file.read(name, factors)
            scaling[ours] = factors.tolist()
        if (factor := left.pop("rope.scaling.attn_factor", None)) is not None:
            scaling["attention_factor"] = factor
        original = left.get("rope.scaling.original_context_length", values["max_position_embeddings"])
        return scaling | {"original_max_position_embeddings": original}


def _rope_scaling(left: dict[str, Any]) -> dict[str, Any] | None:
    kind = left.pop("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"rope scaling {kind!r} of a GGUF file is not supported")
    scaling = {"rope_type": kind, "factor": left.pop("rope.scaling.factor", 1.0)}
    original = left.pop("rope.scaling.original_context_length", None)
    if kind == "yarn":
        known = {name: left.pop(f"rope.scaling.yarn_{name}", None) for name in ("beta_fast", "beta_slow")}
        known["original_max_position_embeddings"] = original
        scaling |= {name: value for name, value in known.items() if value is not None}
    return scaling


def _translate(name: str, inner: dict[str, str]) -> str:
    """Return transformers' name of a tensor; names without one are unchanged, and are reported as unexpected later."""
    if name in _OUTER:
        return _OUTER[name]
    match = re.fullmatch(r"blk\.(\d+)\.((?:nextn\.)?\w+)\.(weight|bias)", name)
    if match is not None and f"{match[2]}.{match[3]}" == _CORRECTION:
        return f"model.layers.{match[1]}.mlp.gate.e_score_correction_bias"
    if match is not None and match[2] == "attn_sinks":
        return f"model.layers.{match[1]}.self_attn.sinks"
    if match is not None and match[2].startswith("nextn."):  # of a layer that predicts further tokens
        return f"model.layers.{match[1]}.{match[2]}.{match[3]}"
    if match is None or match[2] not in inner:
        return name
    return f"model.layers.{match[1]}.{inner[match[2]]}.{match[3]}"
