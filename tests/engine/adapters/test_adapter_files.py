"""Adapter folders as hostile input: what is refused says which file, module or option, and against what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.adapters.adapter import open_adapter
from engine.adapters.settings import read_settings
from engine.adapters.targets import find_targets
from engine.errors import EngineError, UnsupportedModel
from engine.models.decoder import DecoderSpec
from engine.models.load import open_model

Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
B = Q.replace("lora_A", "lora_B")


@pytest.fixture(scope="module")
def decoder(tiny_model: Callable[[str], Path]) -> DecoderSpec:
    spec = open_model(tiny_model("llama")).decoder
    assert spec is not None
    return spec


@pytest.fixture
def folder(tiny_model: Callable[[str], Path], adapters: ModuleType, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model("llama")))
    made: Path = adapters.make_adapter(model, tmp_path / "adapter", seed=1)
    return made


def change(folder: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    if tensors:
        weights = load_file(folder / "adapter_model.safetensors") | tensors
        left = {name: tensor for name, tensor in weights.items() if tensor is not None}
        save_file(left, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("settings", "tensors", "said"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'"),
        ({"use_dora": True}, {}, "DoRA"),
        ({"bias": "all"}, {}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, {}, "embeddings"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "changed the base's weights"),
        ({"r": 0}, {}, "must be from 1 to 256"),
        ({"r": 257}, {}, "must be from 1 to 256"),
        ({"lora_alpha": "16"}, {}, "lora_alpha is '16'"),
        ({"lora_alpha": float("nan")}, {}, "lora_alpha is nan"),
        ({"target_modules": ["k_proj"]}, {}, "which target_modules of adapter_config.json doesn't name"),
        ({"target_modules": 1}, {}, "target_modules is neither"),
        ({"r": 8}, {}, "has shape [4, 80], but rank 8 and the model ask for [8, 80]"),
        ({"alpha_pattern": {"(a+)+$": 1}}, {}, "may take long to match"),
        ({"rank_pattern": {".*a.*b.*c": 1}}, {}, "may take long to match"),
        ({"rank_pattern": {"[": 1}}, {}, "is no regular expression"),
        ({}, {B: None}, "lora_B of model.layers.1.self_attn.q_proj is missing"),
        ({}, {Q: torch.ones(4, 47)}, "has shape [4, 47]"),
        ({}, {Q: torch.ones(4, 48, dtype=torch.int32)}, "is I32"),
        ({}, {Q.replace("layers.1", "layers.7"): torch.ones(4, 48)}, "'model.layers.7.self_attn.q_proj' can't have"),
        ({}, {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 48)}, "'lm_head' can't have an adapter"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 48)}, "is an embedding"),
        ({}, {Q.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(4)}, "is DoRA"),
        ({}, {"x": torch.ones(1)}, "neither lora_A nor lora_B"),
    ],
)  # fmt: skip
def test_what_is_not_supported_or_does_not_fit_is_refused_by_name(
    folder: Path, decoder: DecoderSpec, settings: dict[str, Any], tensors: dict[str, torch.Tensor | None], said: str
) -> None:
    open_adapter("fits", folder, decoder)
    change(folder, settings, tensors)
    with pytest.raises(EngineError) as refused:
        open_adapter("broken", folder, decoder)
    assert said in str(refused.value)
    assert str(folder) in str(refused.value)


def test_files_that_are_missing_torn_or_pickled_are_refused(folder: Path, decoder: DecoderSpec) -> None:
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(EngineError, match="not a whole safetensors file"):
        open_adapter("torn", folder, decoder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(EngineError, match=r"has no adapter_model\.safetensors: its weights are pickled"):
        open_adapter("pickled", folder, decoder)
    for broken in (b"[]", b"{", b"\xff", b"[" * 200_000, b" " * (1 << 20) + b"{}"):
        config.write_bytes(broken)
        with pytest.raises(EngineError, match=r"adapter_config\.json"):
            open_adapter("broken", folder, decoder)
    config.unlink()
    with pytest.raises(EngineError, match=r"is no adapter: it has no adapter_config\.json"):
        open_adapter("missing", folder, decoder)


def test_ranks_alphas_and_factors_follow_the_patterns_as_peft_matches_them(folder: Path) -> None:
    patterns = {
        "rank_pattern": {"layers.1.mlp.up_proj": 2, r"^model\.layers\.0\..*": 3},
        "alpha_pattern": {"up_proj": 5},
    }
    change(folder, patterns, {})
    settings = read_settings(folder)
    ranks = [settings.rank_of(f"model.layers.{layer}.mlp.up_proj") for layer in (0, 1, 2, 11)]
    assert ranks == [3, 2, 4, 4]
    assert [settings.factor(f"model.layers.1.mlp.{end}") for end in ("up_proj", "down_proj")] == [2.5, 2.0]
    change(folder, {"use_rslora": True}, {})
    assert read_settings(folder).factor("model.layers.2.mlp.down_proj") == 4.0


def test_other_files_have_another_digest(folder: Path, decoder: DecoderSpec) -> None:
    first = open_adapter("a", folder, decoder).digest
    assert open_adapter("b", folder, decoder).digest == first
    change(folder, {"lora_alpha": 9}, {})
    second = open_adapter("a", folder, decoder).digest
    change(folder, {}, {Q: torch.zeros(4, 48)})
    assert len({first, second, open_adapter("a", folder, decoder).digest}) == 3


@pytest.mark.parametrize("family", ["gemma4", "deepseek-v2", "granite4-mamba"])
def test_architectures_with_other_parts_are_refused(family: str, tiny_model: Callable[[str], Path]) -> None:
    spec = open_model(tiny_model(family)).decoder
    assert spec is not None
    with pytest.raises(UnsupportedModel, match="adapters are not supported"):
        find_targets(spec)
