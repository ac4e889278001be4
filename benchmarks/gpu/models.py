"""Models by their shape alone: a config.json, and small random weights that are made where they are computed.

A weight depends on nothing but its name, its shape and the device, so our engine and transformers get the same model
without a file between them. None is zero: zeros multiply faster than any real weight, and hide mistakes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import engine.models.load as loading
from engine import Engine, EngineConfig
from engine.checkpoints.config import folder_config
from engine.models.decoder import DecoderSpec
from engine.models.families.registry import fused_family
from engine.quant.weight import QWeight

LLAMA, QWEN = "llama-3.1-8b", "qwen3-8b"
SMOLLM_135M, SMOLLM_1_7B, GEMMA = "smollm2-135m", "smollm2-1.7b", "gemma-3-270m"

_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": _ROPE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_SMOLLM_135M: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_SMOLLM_1_7B: Mapping[str, Any] = {
    **_SMOLLM_135M,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rope_theta": 130000.0,
}
_GEMMA: Mapping[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)],
    "sliding_window": 512,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
_SMALL |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2048}
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    LLAMA: _LLAMA,
    QWEN: _QWEN,
    SMOLLM_135M: _SMOLLM_135M,
    SMOLLM_1_7B: _SMOLLM_1_7B,
    GEMMA: _GEMMA,
    "small-llama": {**_LLAMA, **_SMALL},
    "small-qwen3": {**_QWEN, **_SMALL},
    "tiny-llama": {**_LLAMA, **_TINY},
    "tiny-qwen3": {**_QWEN, **_TINY},
    "tiny-smollm2": {**_SMOLLM_135M, **_TINY},
    "tiny-gemma3": {**_GEMMA, **_TINY, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
}
"""Shapes by name. Those that are neither small nor tiny are the published models'; tokens 1 and 2 stand for their
special ones."""

_ROWS = 16384

STD = 0.02
"""Of weights whose products have 4,096 inputs; others get as much more as keeps the outputs' size."""


def write_config(folder: Path, name: str) -> Path:
    """A model folder that holds a config.json and nothing else."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(CONFIGS[name], indent=2) + "\n", encoding="utf-8")
    return place


def fill(name: str, into: Tensor) -> None:
    """Fill a weight with its random numbers, the same bfloat16 ones whatever its dtype: those of vectors lie about 1
    (norms), those of matrices about 0."""
    generator = torch.Generator(into.device).manual_seed(crc32(name.encode()))
    mean, std = (1.0, 0.05) if into.dim() == 1 else (0.0, STD * math.sqrt(4096 / into.shape[1]))
    # Some rows at a time, as float32: how random numbers of another dtype are made is torch's affair.
    for rows in into.split(_ROWS):
        values = torch.empty(rows.shape, dtype=torch.float32, device=into.device)
        rows.copy_(values.normal_(mean, std, generator=generator).bfloat16())


class RandomWeights:
    """A `WeightSource` of a decoder whose folder holds a config only."""

    def __init__(self, folder: Path) -> None:
        config = folder_config(folder)
        family = fused_family(config)
        assert family is not None, f"{config.model_type} is not computed by the fused decoder"
        spec = family(config)
        self._shapes = dict(shapes(spec))
        made = sum(math.prod(shape) for shape in self._shapes.values())
        assert made == spec.num_parameters(), f"{config.model_type} has weights that are not made here"

    @property
    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, into: Tensor) -> None:
        fill(name, into)

    def quantized(self, name: str) -> QWeight | None:
        """None: they are quantized as they are loaded, where that is asked for."""
        return None


def shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all weights of a decoder without biases whose layers are alike, each with attention of heads
    and one MLP."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not spec.tied:
        yield "lm_head.weight", (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        for norm in spec.norms:
            if norm is not None:
                yield f"{layer}.{norm}.weight", (hidden,)
        if spec.qk_norm == "head":
            for norm in ("q_norm", "k_norm"):
                yield f"{layer}.self_attn.{norm}.weight", (spec.head_dim,)
        for part, rows in spec.qkv_rows.items():
            yield f"{layer}.self_attn.{part}.weight", (rows, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, spec.attended_size)
        for part, rows in spec.gate_up_rows(inner).items():
            yield f"{layer}.mlp.{part}.weight", (rows, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)


@contextmanager
def random_weights() -> Iterator[None]:
    """Meanwhile, folders that hold a config have random weights for the engine."""
    with mock.patch.object(loading, "folder_weights", RandomWeights):
        yield


def load_engine(folder: Path, config: EngineConfig) -> Engine:
    """Our engine on the model of a folder that holds a config only."""
    with random_weights():
        return Engine.load(folder, config)


def load_transformers(folder: Path, dtype: torch.dtype, device: torch.device, attention: str = "sdpa") -> Any:
    """transformers' own model of the same folder, with the same weights."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter)
    return model.eval()
