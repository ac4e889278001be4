"""A model of a known shape with random weights: what its configuration and its folder say."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import gguf
import pytest
import random_model
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from engine import Engine, EngineConfig, Request, SamplingParams, as_token_ids
from engine.checkpoints.config import folder_config
from engine.models.families.registry import fused_family


def test_the_shape_of_llama_1b_is_that_of_its_publication() -> None:
    shape = random_model.SHAPES["llama-3.2-1b"]
    hidden, inner, kv = (
        shape["hidden_size"],
        shape["intermediate_size"],
        shape["num_key_value_heads"] * shape["head_dim"],
    )
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden

    parameters = shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden + hidden

    assert parameters == 1_235_814_400


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer of three tokens."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    return tmp_path / "words"


def small_shape(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> None:
    """Adds "small", of the same kind as Llama's."""
    small = dict(random_model.SHAPES["llama-3.2-1b"])
    small |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"head_dim": 16, "intermediate_size": 96, "bos_token_id": None, "eos_token_id": None}
    monkeypatch.setitem(random_model.SHAPES, "small", small | {"vocab_size": vocab_size})


def test_the_folder_holds_what_the_fused_decoder_reads(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_shape(monkeypatch, 300)

    random_model.write_random_model("small", tokenizer, tmp_path / "model")

    # Then the decoder computes it, its head is the embedding, and the weights are random in bfloat16
    family = fused_family(folder_config(tmp_path / "model"))
    assert family is not None
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert float(weights["model.embed_tokens.weight"].float().std()) == pytest.approx(0.02, rel=0.05)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["rope_parameters"]["rope_type"] == "llama3"
    assert (tmp_path / "model" / "tokenizer.json").exists()


def test_a_tokenizer_with_more_tokens_than_the_shape_is_refused(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_shape(monkeypatch, 2)
    with pytest.raises(ValueError, match=r"3 tokens, and small has 2"):
        random_model.write_random_model("small", tokenizer, tmp_path / "model")


def test_a_mixture_as_a_gguf_file_answers_as_its_folder(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a small mixture, and a GGUF file with a tokenizer
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16}
    monkeypatch.setitem(random_model.SHAPES, "small", random_model.SHAPES["mixture-32x4"] | small | {"vocab_size": 300})
    random_model.write_random_model("small", tokenizer, tmp_path / "model")
    with closing(gguf.GGUFWriter(tmp_path / "words.gguf", "llama")) as writer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "c"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()

    random_model.write_gguf(tmp_path / "model", tmp_path / "words.gguf", tmp_path / "model.gguf")

    config = EngineConfig(dtype="float32", threads=1, max_model_len=64)
    request = Request("1", as_token_ids([5, 6, 7]), SamplingParams(max_tokens=20, ignore_eos=True))
    answers = [
        completion.choices[0].token_ids.tolist()
        for name in ("model", "model.gguf")
        for completion in Engine.load(tmp_path / name, config).run([request])
    ]
    assert answers[0] == answers[1]
    tokens = gguf.GGUFReader(tmp_path / "model.gguf").fields["tokenizer.ggml.tokens"].contents()
    assert tokens == ["a", "b", "c"]
    with pytest.raises(ValueError, match="with the tokenizer of a GGUF file"):
        random_model.write_gguf(tmp_path / "model", tokenizer, tmp_path / "other.gguf")
