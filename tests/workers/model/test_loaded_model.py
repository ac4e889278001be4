"""A model is loaded with its tokenizer and with proof of what it is; answers agree with transformers'."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import CacheConfig, EngineConfig, LoraConfig, ScheduleConfig
from engine.engine import Engine
from engine.errors import EngineError
from engine.groups import GroupEngine
from schemas.jobs.results import RowStatus
from tests.workers.model.scoring import score, windows
from workers.errors import WorkerError
from workers.model.loaded_model import LoadedModel, library_versions, model_digest, model_path
from workers.shards.worker import ShardWorker
from workers.text.chat_options import ChatOptions

CONFIG = EngineConfig(
    dtype="float32", cache=CacheConfig(block_size=16, num_blocks=200), schedule=ScheduleConfig(max_num_seqs=8)
)


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> LoadedModel:
    return LoadedModel.load(model_folder, name="tiny", config=CONFIG, aliases=frozenset({"other"}))


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    torch.set_num_threads(threads)


def test_a_loaded_model_has_its_pin_and_limits(loaded: LoadedModel, model_folder: Path) -> None:
    pin = loaded.pin("other")
    assert (pin.name, pin.source, pin.dtype) == ("other", str(model_folder), "float32")
    assert pin.digest == model_digest(model_folder)
    assert loaded.mismatch(pin) is None
    assert loaded.limits.vocab_size == 400
    assert loaded.answers_to("tiny")
    assert loaded.answers_to("other")
    assert not loaded.answers_to("gpt-4")
    assert loaded.facts["architecture"]
    assert (loaded.facts["quantization"], loaded.facts["kv_dtype"]) == ("none", "auto")
    assert library_versions()["torch"].split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.slow
def test_in_float32_a_merged_adapter_and_one_beside_the_model_compute_each_others_shards(
    model_folder: Path, adapters: ModuleType, kit: Any, tmp_path: Path
) -> None:
    # Given a model with an adapter beside it, and one with the same adapter merged, which is no longer the model,
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    lora = LoraConfig((("a", str(adapters.make_adapter(model, tmp_path / "a", 0))),))
    beside, merged = (
        LoadedModel.load(model_folder, name="tiny", config=replace(CONFIG, lora=replace(lora, merge=merge)))
        for merge in (False, True)
    )
    assert [pin.key for pin in merged.pins] == [beside.pin("a").key]
    assert (merged.answers_to("a"), merged.answers_to("tiny")) == (True, False)
    assert str(merged.mismatch(beside.pin())).startswith("weights sha256:")
    # when each computes shards of jobs that were begun with either, then the answers are the same.
    texts = []
    for loaded in (beside, merged):
        for pins in (beside.pins, merged.pins):
            job = kit.make_job().model_copy(update={"models": pins})
            work = kit.make_work([kit.chat(model="a", temperature=0, max_tokens=8)], job=job)
            sink = kit.MemorySink()
            ShardWorker(loaded, kit.ListSource([work]), sink, kit.FakeClock()).run()
            texts.append(sink.rows[0].text)
    assert len(set(texts)) == 1
    assert texts[0]


def test_engine_facts_have_quantization_and_attention(model_folder: Path, loaded: LoadedModel) -> None:
    quantized = LoadedModel.load(
        model_folder, name="tiny", config=replace(CONFIG, attention="paged-sdpa", quantize="int8")
    )
    assert (quantized.facts["quantization"], quantized.facts["attention"]) == ("int8", "paged-sdpa")
    assert quantized.pin().quantization == "int8"
    assert quantized.mismatch(quantized.pin()) is None
    assert quantized.mismatch(loaded.pin()) == "quantization none, but int8 is loaded"
    native = LoadedModel.load(
        model_folder, name="tiny", config=replace(CONFIG, instruction_set="avx2", kv_dtype="int8")
    )
    assert (native.facts["kv_dtype"], native.facts["attention"]) == ("int8", "native (avx2)")
    assert native.mismatch(loaded.pin()) == "kv_dtype auto, but int8 is loaded"


def test_the_digest_changes_with_each_file_that_influences_answers(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model_folder, folder)
    same = model_digest(folder)
    assert same == model_digest(model_folder)
    (folder / "README.md").write_text("notes")
    assert model_digest(folder) == same
    for chat in (ChatOptions("{{ messages }}"), ChatOptions(reasoning_parser="think"), ChatOptions(None, None, 7)):
        assert model_digest(folder, chat) != same
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert model_digest(folder) != same


def test_a_gguf_files_digest_is_its_own(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF weights")
    assert model_digest(file) == "sha256:" + hashlib.sha256(b"GGUF weights").hexdigest()
    # and a folder that holds just that file is that file
    assert model_path(tmp_path) == file
    with pytest.raises(WorkerError, match="holds no model"):
        model_digest(tmp_path / "gone")


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises((EngineError, WorkerError), match=str(tmp_path)):
        LoadedModel.load(tmp_path, name="x", config=CONFIG)


def test_greedy_answers_are_transformers(loaded: LoadedModel, reference: Any, kit: Any) -> None:
    # Given chat and completion requests, greedy, when a worker answers them
    prompts = ["The quick brown", "Q: what? A:", "naïve 日本"]
    bodies = [kit.chat(prompt, max_tokens=12, temperature=0) for prompt in prompts]
    bodies += [kit.completion(prompt, max_tokens=12, temperature=0) for prompt in prompts]
    sink = kit.MemorySink()
    ShardWorker(loaded, kit.ListSource([kit.make_work(bodies)]), sink, kit.FakeClock()).run()
    # Then each text is what transformers generates from the same conversation
    for row, body in enumerate(bodies):
        chat = "messages" in body
        text = loaded.tokenizer.render_chat(kit.parse(body).messages) if chat else body["prompt"]
        (ids,) = loaded.tokenizer.encode_batch([text], add_special_tokens=False)
        prompt = torch.from_numpy(ids.astype(np.int64))[None]
        whole = reference.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0)
        assert sink.rows[row].status == RowStatus.SUCCEEDED
        assert sink.rows[row].text == loaded.tokenizer.decode_answers([ids], [whole[0, len(ids) :].numpy()])[0]
        assert sink.rows[row].prompt_tokens == len(ids)


def test_logprobs_and_echo_through_the_whole_worker(loaded: LoadedModel, reference: Any, kit: Any) -> None:
    prompt = "The quick brown fox"
    body = kit.completion(prompt, max_tokens=0, echo=True, logprobs=2)
    sink = kit.MemorySink()
    ShardWorker(loaded, kit.ListSource([kit.make_work([body])]), sink, kit.FakeClock()).run()
    logprobs = json.loads(sink.rows[0].response)["choices"][0]["logprobs"]
    (ids,) = loaded.tokenizer.encode_batch([prompt], add_special_tokens=False)
    with torch.no_grad():
        logits = reference(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    assert logprobs["token_logprobs"][0] is None
    np.testing.assert_allclose(logprobs["token_logprobs"][1:], expected.numpy(), atol=1e-4)
    assert all(2 <= len(tops) <= 3 for tops in logprobs["top_logprobs"][1:])


def test_perplexity_is_transformers(loaded: LoadedModel, reference: Any) -> None:
    texts = ["The quick brown fox jumps", "日本語 🎉 and more", "x"]
    sequences = loaded.tokenizer.encode_batch(texts, add_special_tokens=False)
    assert isinstance(loaded.engine, GroupEngine)
    assert isinstance(loaded.engine.engine, Engine)
    scores = score(loaded.engine.engine, sequences)
    for ids, result in zip(sequences, scores, strict=True):
        assert result.tokens == len(ids) - 1
        if result.tokens:
            tokens = torch.from_numpy(ids.astype(np.int64))[None]
            with torch.no_grad():
                out = reference(tokens, labels=tokens)
            assert result.perplexity == pytest.approx(float(out.loss.exp()), rel=1e-3)
            assert result.greedy == int((out.logits[0, :-1].argmax(-1) == tokens[0, 1:]).sum())
    total = scores[0] + scores[1]
    assert total.tokens == scores[0].tokens + scores[1].tokens


def test_windows_cover_every_token_once() -> None:
    ids = np.arange(100, dtype=np.int32)
    assert np.concatenate(list(windows(ids, 32, 32))).tolist() == list(range(100))
    assert [len(piece) for piece in windows(ids, 32, 16)][-1] >= 16
    assert [piece.tolist() for piece in windows(ids[:1], 32, 32)] == [[0]]
