"""A head that can't be used, or is not this model's, is refused in one line that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from engine.errors import CorruptWeights, EngineError, ModelNotFound, UnsupportedModel
from tests.engine.speculative.proposers import eagle_heads as heads
from tests.engine.speculative.proposers.test_eagle import with_head
from tests.engine.test_speculation import load

TinyModel = Callable[[str], Path]
Weights = dict[str, Tensor]

HIDDEN, VOCAB, DRAFT = 48, 257, 100


def save_changed_head(
    folder: Path, target: Path, weights: Callable[[Weights], object] = lambda _: None, **changes: Any
) -> Path:
    """A head for `target`, with its config and its weights changed."""
    shape = heads.head_config(AutoConfig.from_pretrained(target), draft_vocab=DRAFT, layers=[0, 1, 2])
    tensors = heads.random_weights(shape)
    weights(tensors)
    return heads.save_head(folder, {**shape, **changes}, tensors)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 64, "head_dim": 16}, "made for a model with a hidden size of 64, but the model's is 48; choose"),
    ({"target_hidden_size": 96}, "made for a model with a hidden size of 96, but the model's is 48"),
    ({"vocab_size": 300}, "made for a model with a vocabulary of 300, but the model's is 257"),
    (
        {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]},
        r"states before layers \[0, 1, 4\] are not available from 3 layers",
    ),
    ({"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}, r"states before layers \[2, 1, 0\] are not available"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}, r"states before layers \[0, 1, 1\] are not available"),
    ({"eagle_aux_hidden_state_layer_ids": [-5, 1, 2]}, r"states before layers \[-5, 1, 2\] are not available"),
    ({"eagle_aux_hidden_state_layer_ids": ["0"]}, "must be a list of layer numbers"),
    ({"eagle_aux_hidden_state_layer_ids": 7}, "must be a list of layer numbers"),
    ({"eagle_aux_hidden_state_layer_ids": None}, r"states before layers \[2, 1, 0\] are not available from 3 layers"),
    ({"num_hidden_layers": 2}, "a head has one layer, but this one has num_hidden_layers 2"),
    ({"model_type": "mamba"}, "a head with a layer of type 'mamba' is not supported"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "a head of an earlier EAGLE"),
    ({"eagle_config": "yes"}, "can't be used"),
    ({"fc_norm": True}, "fc_norm is not supported"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantized heads are not supported"),
    ({"draft_vocab_size": 1 << 40}, "vocab_size is 1099511627776, but must be from 1"),
    ({"hidden_size": "48"}, "hidden_size is '48', but must be from 1"),
    ({"num_attention_heads": 3}, "3 attention heads can't share 2 key-value heads"),
    ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
    ({"transformer_layer_config": [1]}, "can't be used"),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "a head with dynamic rotary scaling is not supported",
    ),
]


@pytest.mark.parametrize(("changes", "why"), CONFIGS, ids=[str(index) for index in range(len(CONFIGS))])
def test_given_a_config_that_can_t_be_used_then_it_is_refused(
    changes: dict[str, Any], why: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("llama")
    with pytest.raises(UnsupportedModel, match=why) as refused:
        with_head(path, save_changed_head(tmp_path, path, **changes))
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def without(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.pop(name)


def setting(name: str, tensor: Tensor) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: tensor})


WEIGHTS: list[tuple[Callable[[Weights], object], str]] = [
    (without("fc.weight"), "fc.weight is missing"),
    (without("midlayer.hidden_norm.weight"), "layers.0.input_layernorm.weight is missing"),
    (without("midlayer.self_attn.k_proj.weight"), "midlayer.self_attn.k_proj.weight is missing"),
    (without("norm.weight"), "norm.weight is missing"),
    (without("lm_head.weight"), "lm_head.weight is missing"),
    (without("d2t"), "d2t is missing from the checkpoint, but the head has a vocabulary of its own"),
    (setting("fc.weight", torch.zeros(HIDDEN, HIDDEN)), r"fc.weight has shape \[48, 48\], but .* \[48, 144\]"),
    (setting("lm_head.weight", torch.zeros(DRAFT + 1, HIDDEN)), r"lm_head.weight has shape \[101, 48\]"),
    (setting("embed_tokens.weight", torch.zeros(VOCAB - 1, HIDDEN)), r"embed_tokens.weight has shape \[256, 48\]"),
    (setting("fc.bias", torch.ones(HIDDEN)), "holds tensor fc.bias, which this architecture has no use for"),
    (setting("d2t", torch.zeros(DRAFT - 1, dtype=torch.int64)), r"d2t has shape \[99\]"),
    (setting("d2t", torch.zeros(DRAFT)), "d2t is torch.float32, but must hold whole numbers"),
    (setting("d2t", torch.full((DRAFT,), VOCAB)), "d2t leads outside the model's vocabulary of 257"),
    (setting("d2t", torch.full((DRAFT,), -1)), "d2t leads outside the model's vocabulary"),
    (setting("d2t", torch.arange(DRAFT, 0, -1)), "d2t leads to one of the model's tokens twice"),
]


@pytest.mark.parametrize(("change", "why"), WEIGHTS, ids=[str(index) for index in range(len(WEIGHTS))])
def test_given_weights_that_contradict_the_config_then_they_are_refused(
    change: Callable[[Weights], object], why: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("llama")
    with pytest.raises(CorruptWeights, match=why) as refused:
        with_head(path, save_changed_head(tmp_path, path, change))
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_given_files_that_are_no_head_then_they_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model("llama")
    with pytest.raises(ModelNotFound, match=r"no EAGLE-3 head at .*nowhere"):
        with_head(path, tmp_path / "nowhere")
    head = save_changed_head(tmp_path / "head", path)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model.bin is pickled, which can run code"):
        with_head(path, head)
    (head / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CorruptWeights, match="is not a whole safetensors file"):
        with_head(path, head)
    for text in ("[" * 100_000, "{", "[]", "7", json.dumps({"hidden_size": HIDDEN})):
        (head / "config.json").write_text(text)
        with pytest.raises(UnsupportedModel, match=r"config.json can't be used") as refused:
            with_head(path, head)
        assert "\n" not in str(refused.value)


def test_given_a_model_that_no_head_can_read_then_that_is_said(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="transformers' code for PhiForCausalLM does not return here"):
        with_head(tiny_model("phi"), save_changed_head(tmp_path / "phi", tiny_model("llama")))
    with pytest.raises(UnsupportedModel, match="all layers of the model have sliding windows"):
        with_head(tiny_model("mistral"), save_changed_head(tmp_path / "mistral", tiny_model("llama")))
    with pytest.raises(EngineError, match="needs one; name its folder"):
        load(tiny_model("llama"), "eagle3")


def test_given_a_head_of_another_width_without_an_embedding_then_it_is_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("llama")
    config = heads.head_config(AutoConfig.from_pretrained(path), draft_vocab=DRAFT, layers=[0, 1, 2])
    config |= {"hidden_size": 64, "target_hidden_size": HIDDEN}
    weights = heads.random_weights(config)
    own = weights.pop("embed_tokens.weight")
    with pytest.raises(UnsupportedModel, match=r"holds no embed_tokens.weight, and the model has one of 48 columns"):
        with_head(path, heads.save_head(tmp_path, config, weights))
    weights["embed_tokens.weight"] = own
    with_head(path, heads.save_head(tmp_path, config, weights))
