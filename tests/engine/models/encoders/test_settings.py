"""The embedding settings of model folders: old and new spellings, and folders with wrong settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CorruptWeights, UnsupportedModel
from engine.models.encoders.head import EmbeddingHead
from engine.models.encoders.settings import EmbeddingSettings, embedding_settings

PREFIX = "sentence_transformers"


@pytest.fixture
def folder(tiny_encoders: Any, tmp_path: Path) -> Path:
    made: Path = tiny_encoders.make_embedding_model(
        "bert", tmp_path, dense=[(16, "Tanh"), (8, "Identity")], normalize=True, max_seq_length=24, lower_case=True,
        prompts={"query": "query: ", "document": ""}, default_prompt="query",
    )  # fmt: skip
    return made


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_everything_published_is_read(folder: Path) -> None:
    settings = embedding_settings(folder)
    assert settings is not None
    assert (settings.pooling, settings.normalize, settings.max_tokens, settings.lower_case) == ("mean", True, 24, True)
    assert (settings.prompts, settings.default_prompt) == ({"query": "query: ", "document": ""}, "query")
    assert [(d.in_features, d.out_features, d.activation) for d in settings.dense] == [
        (32, 16, "Tanh"), (16, 8, "Identity"),
    ]  # fmt: skip
    assert (settings.size(32), settings.dimensions) == (8, None)
    assert set(settings.files) == {
        "modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors",
        "3_Dense/config.json", "3_Dense/model.safetensors", "sentence_bert_config.json",
        "config_sentence_transformers.json",
    }  # fmt: skip


def test_a_folder_without_modules_has_no_settings(tiny_encoders: Any, tmp_path: Path) -> None:
    assert embedding_settings(tiny_encoders.make_embedding_model("bert", tmp_path, pooling=None)) is None


def test_newer_spellings_mean_the_same(folder: Path) -> None:
    before = embedding_settings(folder)
    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        kind = module["type"].rpartition(".")[2]
        module["type"] = f"{PREFIX}.sentence_transformer.modules.{kind.lower()}.{kind}"
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True})
    )
    assert embedding_settings(folder) == before


def test_lengths_of_nested_vectors_are_read(folder: Path) -> None:
    change(folder / "config.json", matryoshka_dimensions=[8, 4])
    settings = embedding_settings(folder)
    assert settings is not None
    assert settings.dimensions == (4, 8)


def module(kind: str, path: str) -> dict[str, str]:
    return {"type": f"{PREFIX}.models.{kind}", "path": path}


START = [module("Transformer", ""), module("Pooling", "1_Pooling")]


@pytest.mark.parametrize(
    ("file", "values", "named"),
    [
        ("modules.json", {"a": 1}, "must be a list"),
        ("modules.json", [1], "a type and a path"),
        ("modules.json", [], "modules are none"),
        ("modules.json", [module("CLIPModel", "")], "modules are CLIPModel"),
        ("modules.json", [*START, module("Router", "2")], "a module Router is not supported"),
        ("modules.json", [*START, module("Normalize", ""), module("Dense", "2_Dense")], "a module Dense"),
        ("modules.json", [START[0], module("Pooling", "../../etc")], "points outside its folder"),
        ("modules.json", [START[0], module("Pooling", "/etc")], "points outside its folder"),
        ("modules.json", [START[0], module("Pooling", "..")], "points outside its folder"),
        ("modules.json", [START[0], module("Pooling", "nowhere")], "can't be read"),
        ("modules.json", [module("Transformer", "0_BERT"), START[1]], "the transformer is in 0_BERT"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, "several poolings"),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "'attention' is not known"),
        ("1_Pooling/config.json", {"include_prompt": "no"}, "include_prompt is no"),
        ("1_Pooling/config.json", {"pooling_mode": "cls", "include_prompt": False}, "left out of the pooling"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "word_embedding_dimension": 10**9}, "must be from 1 to"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "word_embedding_dimension": 31}, "what comes in has 31"),
        ("2_Dense/config.json", {"in_features": 32, "out_features": 0}, "out_features is 0"),
        ("2_Dense/config.json", {"in_features": 32, "out_features": 16, "activation_function": "os.system"}, "torch's"),
        ("2_Dense/config.json", {"in_features": 32, "out_features": 16, "use_residual": True}, "use_residual"),
        (
            "2_Dense/config.json",
            {"in_features": 32, "out_features": 16, "module_input_name": "token_embeddings"},
            "one of the pooled vector",
        ),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length is -1"),
        ("sentence_bert_config.json", {"max_seq_length": True}, "max_seq_length is True"),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "an object of texts"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "'x' is none of the prompts"),
        ("config.json", {"matryoshka_dimensions": [0]}, "matryoshka_dimensions is 0"),
    ],
)
def test_settings_that_can_not_be_followed_are_refused(folder: Path, file: str, values: Any, named: str) -> None:
    (folder / file).write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match=named) as caught:
        embedding_settings(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[" * 100_000, b"{", b" " * (5 << 20)])
def test_files_that_are_no_json_are_refused_in_one_line(folder: Path, data: bytes) -> None:
    (folder / "modules.json").write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"modules\.json") as caught:
        embedding_settings(folder)
    assert "\n" not in str(caught.value)


def test_a_dense_layer_is_never_unpickled(folder: Path) -> None:
    weights = folder / "2_Dense" / "model.safetensors"
    torch.save(load_file(weights), folder / "2_Dense" / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(UnsupportedModel, match="pickles are not opened"):
        embedding_settings(folder)


def test_the_head_is_torchs(folder: Path) -> None:
    settings = embedding_settings(folder)
    assert settings is not None
    pooled = np.random.default_rng(1).standard_normal((5, 32)).astype(np.float32)
    want = torch.from_numpy(pooled)
    for number, activation in ((2, torch.tanh), (3, lambda x: x)):
        tensors = load_file(folder / f"{number}_Dense" / "model.safetensors")
        want = activation(want @ tensors["linear.weight"].T + tensors["linear.bias"])
    want = torch.nn.functional.normalize(want, dim=1)
    head = EmbeddingHead(settings)
    np.testing.assert_allclose(head.apply(pooled), want.numpy(), atol=1e-6)
    # Bit for bit the same, alone and in a batch
    np.testing.assert_array_equal(head.apply(pooled[2:3]), head.apply(pooled)[2:3])


def test_a_vector_of_zeros_stays_one() -> None:
    head = EmbeddingHead(EmbeddingSettings("mean", normalize=True))
    np.testing.assert_array_equal(head.apply(np.zeros((1, 4), np.float32)), np.zeros((1, 4), np.float32))


def test_a_dense_layers_weights_must_match_its_config(folder: Path) -> None:
    weights = folder / "2_Dense" / "model.safetensors"
    settings = embedding_settings(folder)
    assert settings is not None
    save_file({"linear.weight": torch.ones(16, 31), "linear.bias": torch.ones(16)}, weights)
    with pytest.raises(CorruptWeights, match="2_Dense"):
        EmbeddingHead(settings)
    weights.write_bytes(b"short")
    with pytest.raises(CorruptWeights, match="not a whole safetensors file"):
        EmbeddingHead(settings)
    change(folder / "2_Dense" / "config.json", activation_function="torch.nn.modules.linear.Linear")
    settings = embedding_settings(folder)
    assert settings is not None
    with pytest.raises(UnsupportedModel, match="activation Linear is none of"):
        EmbeddingHead(settings)
