"""Encoders against transformers' own, one text at a time; what is refused, and that neighbours don't matter."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertForMaskedLM, T5Config, T5Model

from engine.checkpoints.config import folder_config
from engine.config import CacheConfig, EngineConfig, ScheduleConfig, SpeculationConfig
from engine.embedding.engine import EncoderEngine
from engine.engine import resolve_model_dtype
from engine.errors import CorruptWeights, ModelNotFound, UnsupportedModel
from engine.models.encoders.encoder import Encoder, load_encoder
from engine.models.load import describe_model, is_encoder, load_model
from engine.request import Request, SamplingParams, as_token_ids

FAMILIES = ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "modernbert")
MODES = {
    "cls_token": "cls",
    "lasttoken": "last",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weightedmean",
}
CONFIG = EngineConfig(dtype="float32", threads=1, schedule=ScheduleConfig(max_num_batched_tokens=96))
SCORES = SamplingParams(max_tokens=0, temperature=0)


@pytest.fixture(scope="session")
def texts() -> list[np.ndarray]:
    chance = np.random.default_rng(5)
    return [as_token_ids(chance.integers(3, 400, length)) for length in (1, 2, 9, 9, 17, 30, 3, 64, 9)]


def run(engine: EncoderEngine, texts: list[np.ndarray], pooling: str) -> list[np.ndarray]:
    """The vectors, in the order of the texts."""
    for at, ids in enumerate(texts):
        engine.add(Request(str(at), ids, SCORES, pooling=pooling))
    found = {}
    while engine.has_work:
        found |= {done.request_id: done.pooled for done in engine.step()}
    return [found[str(at)] for at in range(len(texts))]


def oracle(folder: Path, texts: list[np.ndarray], mode: str, tiny_encoders: Any) -> list[np.ndarray]:
    """Each text by itself through AutoModel with plain attention, and the pooling's formula."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        states = [model(torch.from_numpy(ids[None].astype(np.int64))).last_hidden_state[0] for ids in texts]
    return [tiny_encoders.pooled(hidden, mode).float().numpy() for hidden in states]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_vectors_are_transformers_own(family: str, tiny_encoders: Any, tmp_path: Path, texts: list[np.ndarray]) -> None:
    # Given encoders of each family, and texts of unlike length that go in batches
    folder = tiny_encoders.make_embedding_model(family, tmp_path)
    engine = EncoderEngine.load(folder, CONFIG)
    ours = run(engine, texts, "mean")
    # then each vector is what the text gives by itself
    for got, want in zip(ours, oracle(folder, texts, "mean_tokens", tiny_encoders), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)
    assert 1 < engine.stats().steps < len(texts)
    # and its room is that of its table of positions
    assert engine.max_model_len == 64


@pytest.mark.parametrize("mode", MODES)
def test_poolings_are_those_of_sentence_transformers(
    mode: str, tiny_encoders: Any, tmp_path: Path, texts: list[np.ndarray]
) -> None:
    folder = tiny_encoders.make_embedding_model("bert", tmp_path, pooling=mode)
    ours = run(EncoderEngine.load(folder, CONFIG), texts, MODES[mode])
    for got, want in zip(ours, oracle(folder, texts, mode, tiny_encoders), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_neighbours_and_order_change_nothing_that_counts(embedding_model: Path, texts: list[np.ndarray]) -> None:
    alone = [run(EncoderEngine.load(embedding_model, CONFIG), [ids], "mean")[0] for ids in texts]
    back = run(EncoderEngine.load(embedding_model, CONFIG), texts[::-1], "mean")[::-1]
    for got, want in zip(back, alone, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_mean_may_leave_out_the_beginning(embedding_model: Path, texts: list[np.ndarray], tiny_encoders: Any) -> None:
    engine = EncoderEngine.load(embedding_model, CONFIG)
    engine.add(Request("a", texts[4], SCORES, pooling="mean", pooling_skip=5))
    engine.add(Request("b", texts[5], SCORES, pooling="mean"))
    vectors = {done.request_id: done.pooled for done in engine.step()}
    model = AutoModel.from_pretrained(embedding_model, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(torch.from_numpy(texts[4][None].astype(np.int64))).last_hidden_state[0]
    np.testing.assert_allclose(vectors["a"], hidden[5:].mean(dim=0).numpy(), atol=1e-5)


def test_a_model_that_padding_changes_is_refused(embedding_model: Path) -> None:
    # Given a model that looks at what stands behind a text's end
    encoder = load_encoder(embedding_model, folder_config(embedding_model), torch.float32)

    def careless(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=input_ids.float().cumsum(dim=1)[..., None] + input_ids.shape[1])

    with pytest.raises(UnsupportedModel, match="padding changes hidden states"):
        Encoder(careless, encoder.spec, 0).check()


def test_bfloat16_stays_close(embedding_model: Path, texts: list[np.ndarray]) -> None:
    exact = run(EncoderEngine.load(embedding_model, CONFIG), texts, "mean")
    config = EngineConfig(dtype="bfloat16", threads=1)
    rounded = run(EncoderEngine.load(embedding_model, config), texts, "mean")
    for got, want in zip(rounded, exact, strict=True):
        assert got.dtype == np.float32
        assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


def test_encoders_compute_in_float32_by_default(embedding_model: Path) -> None:
    cpu = torch.device("cpu")
    assert resolve_model_dtype(embedding_model, "auto", cpu) is torch.float32
    assert resolve_model_dtype(embedding_model, "bfloat16", cpu) is torch.bfloat16
    assert EncoderEngine.load(embedding_model, EngineConfig(threads=1)).spec.dtype is torch.float32


def test_the_description_before_the_weights_are_read(embedding_model: Path) -> None:
    description = describe_model(embedding_model, dtype=torch.float32)
    encoder = load_encoder(embedding_model, folder_config(embedding_model), torch.float32)
    assert is_encoder(embedding_model)
    assert description.spec == encoder.spec
    assert not description.spec.generates
    with pytest.raises(UnsupportedModel, match="BertModel is not a causal language model"):
        load_model(embedding_model, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (EngineConfig(quantize="int8"), "quantize int8"),
        (EngineConfig(kv_dtype="int8"), "kv_dtype int8"),
        (EngineConfig(cache=CacheConfig(memory_bytes=1 << 20)), "no KV cache"),
        (EngineConfig(speculation=SpeculationConfig("ngram")), "nothing can be drafted"),
    ],
)
def test_what_an_encoder_can_not_follow_is_refused(config: EngineConfig, named: str, embedding_model: Path) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        EncoderEngine.load(embedding_model, config)


def test_a_training_heads_weights_may_be_there_and_nothing_else(
    embedding_model: Path, tiny_encoders: Any, tmp_path: Path
) -> None:
    # Given a checkpoint for masked tokens, as many sentence-transformers are
    folder = tiny_encoders.make_embedding_model("bert", tmp_path / "masked")
    BertForMaskedLM(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    assert EncoderEngine.load(folder, CONFIG).spec.architecture == "BertForMaskedLM"
    # when a part of the encoder is missing, or one is there too many, then that is named
    tensors = load_file(folder / "model.safetensors")
    name = "bert.encoder.layer.1.output.dense.weight"
    surprise = {**tensors, "bert.encoder.layer.7.output.dense.bias": torch.ones(3)}
    without = {key: tensor for key, tensor in tensors.items() if key != name}
    misshapen = {**tensors, name: torch.ones(3, 3)}
    for changed, kind in ((surprise, r"layer\.7.*unexpected"), (without, "missing"), (misshapen, "mismatched")):
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CorruptWeights, match=kind):
            EncoderEngine.load(folder, CONFIG)


def test_weights_are_never_unpickled(tiny_encoders: Any, tmp_path: Path) -> None:
    folder = tiny_encoders.make_embedding_model("bert", tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="pickled, which can run code"):
        EncoderEngine.load(folder, CONFIG)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelNotFound, match="holds no weights"):
        EncoderEngine.load(folder, CONFIG)


def test_encoders_that_are_not_for_this_are_refused(tiny_encoders: Any, tmp_path: Path) -> None:
    plain = tiny_encoders.make_embedding_model("bert", tmp_path / "plain", pooling=None)
    for load in (lambda: EncoderEngine.load(plain, CONFIG), lambda: describe_model(plain, dtype=torch.float32)):
        with pytest.raises(UnsupportedModel, match="without pooling settings"):
            load()
    other = tiny_encoders.make_embedding_model("bert", tmp_path / "t5")
    T5Model(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=40)).save_pretrained(other)
    with pytest.raises(UnsupportedModel, match="T5Model is not supported: it is an encoder-decoder"):
        EncoderEngine.load(other, CONFIG)
    remote = tiny_encoders.make_embedding_model("bert", tmp_path / "remote")
    config = json.loads((remote / "config.json").read_text())
    code = {"model_type": "house_made", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (remote / "config.json").write_text(json.dumps(config | code))
    (remote / "code.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(UnsupportedModel):
        EncoderEngine.load(remote, CONFIG)
