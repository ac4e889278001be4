"""Rows that ask for embeddings, from the body to the result: among others, in shards and on the lane, on the real
engine."""

from __future__ import annotations

import base64
import json
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.engine import Engine
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.client import CallSettings
from pipeline.lane.client import answer as call
from pipeline.lane.memory import MemoryLane
from pipeline.worker_client.ports import ShardWork
from schemas.jobs.results import RowStatus
from schemas.workers.lane import EndEvent, ErrorEvent, LaneRequest
from tests.waiting import HANG_SECONDS
from workers.errors import BrokenEngineError
from workers.lane.server import LaneServer
from workers.model.loaded_model import LoadedModel, model_digest
from workers.shards.worker import ShardWorker, WorkerSettings
from workers.translation.requests import ModelLimits

URL = "/v1/embeddings"
CALL = CallSettings(silence_timeout_seconds=0.2, poll_interval_seconds=0.02)
CONFIG = EngineConfig(
    dtype="float32", threads=1, max_model_len=64, cache=CacheConfig(block_size=16, num_blocks=64),
    schedule=ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=64),
)  # fmt: skip
TEXTS = ["The quick brown fox", "jumps over", "the lazy dog. 0123456789", "a river?"]


@pytest.fixture(scope="module")
def embeds(embedding_model: Path) -> LoadedModel:
    return LoadedModel.load(embedding_model, name="tiny", config=CONFIG)


@pytest.fixture
def answer(kit: Any) -> Callable[..., dict[int, Any]]:
    """The results of these bodies, each by its row, from one shard."""

    def answer(model: LoadedModel, *bodies: Any, **settings: Any) -> dict[int, Any]:
        job = kit.make_job(**settings)
        sink = kit.MemorySink()
        work: ShardWork = kit.make_work(
            [body if isinstance(body, int) else {"model": "tiny", **body} for body in bodies], job=job
        )
        ShardWorker(model, kit.ListSource([work]), sink, kit.FakeClock(), helper=kit.InlineExecutor()).run()
        rows: dict[int, Any] = sink.rows
        return rows

    return answer


def vector_of(folder: Path, model: LoadedModel, text: str, *, unit: bool = True) -> Any:
    """The vector by definition: the tokenizer's ids, the mean of the last hidden states, length 1."""
    (ids,) = model.tokenizer.encode_batch([text], add_special_tokens=True)
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = reference(torch.from_numpy(ids[None].astype(np.int64))).last_hidden_state[0]
    mean = hidden.double().mean(dim=0).numpy()
    return mean / np.linalg.norm(mean) if unit else mean


def test_each_text_gets_its_vector(embeds: LoadedModel, embedding_model: Path, answer: Any) -> None:
    rows = answer(embeds, *({"input": text} for text in TEXTS), 2)
    for at, text in enumerate(TEXTS):
        row = rows[at]
        np.testing.assert_allclose(row.embedding, vector_of(embedding_model, embeds, text), atol=1e-5)
        response = json.loads(row.response)
        assert [data["index"] for data in response["data"]] == [0]
        np.testing.assert_array_equal(np.float32(response["data"][0]["embedding"]), row.embedding)
        assert response["object"] == "list"
        assert response["model"] == "tiny"
        tokens = len(embeds.tokenizer.encode_batch([text], add_special_tokens=True)[0])
        assert response["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert (row.status, row.status_code, row.text, row.finish_reason) == (RowStatus.SUCCEEDED, 200, None, None)
        assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (tokens, 0, 0)
    # A copy has the same answer, for which nothing was computed
    np.testing.assert_array_equal(rows[4].embedding, rows[2].embedding)
    assert rows[4].cached_tokens == rows[2].prompt_tokens


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_blanks_at_the_ends_are_text_as_in_sentence_transformers(
    family: str, include_prompt: bool, tiny_encoders: Any, tmp_path: Path, answer: Any
) -> None:
    # Given a byte-level tokenizer, for which a blank is a token of its own, and a prompt that ends in one
    prompts = {"query": "query: "}
    folder = tiny_encoders.make_embedding_model(
        family, tmp_path, prompts=prompts, default_prompt="query", include_prompt=include_prompt
    )
    texts = ["a", "  blanks  ", "a\n", "\ta b", "The quick brown fox "]
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts, batch_size=1)
    # When texts with blanks at their ends are embedded, then the vectors are the library's
    rows = answer(LoadedModel.load(folder, name="tiny", config=CONFIG), *({"input": text} for text in texts))
    np.testing.assert_allclose(np.stack([rows[at].embedding for at in range(len(texts))]), theirs, atol=1e-5)


def test_several_texts_of_a_request_are_all_in_the_response(embeds: LoadedModel, answer: Any) -> None:
    ids = embeds.tokenizer.encode_batch([TEXTS[1]], add_special_tokens=True)[0].tolist()
    rows = answer(embeds, {"input": [*TEXTS, ids]}, *({"input": text} for text in TEXTS))
    assert rows[0].embedding is None
    data = json.loads(rows[0].response)["data"]
    assert [one["index"] for one in data] == [0, 1, 2, 3, 4]
    for at in range(4):
        np.testing.assert_allclose(data[at]["embedding"], rows[at + 1].embedding, atol=1e-6)
    np.testing.assert_allclose(data[4]["embedding"], rows[2].embedding, atol=1e-6)  # ids are taken as they are
    assert rows[0].prompt_tokens == sum(rows[at].prompt_tokens for at in range(1, 5)) + len(ids)


def test_base64_holds_the_same_numbers(embeds: LoadedModel, answer: Any) -> None:
    rows = answer(embeds, {"input": TEXTS[0]}, {"input": TEXTS[0], "encoding_format": "base64"})
    written = json.loads(rows[1].response)["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(written), "<f4"), rows[1].embedding)
    np.testing.assert_allclose(rows[0].embedding, rows[1].embedding, atol=1e-6)


def test_vectors_can_be_cut(embeds: LoadedModel, answer: Any) -> None:
    rows = answer(embeds, {"input": TEXTS[0]}, {"input": TEXTS[0], "dimensions": 5}, {"input": "x", "dimensions": 33})
    whole = np.asarray(rows[0].embedding)[:5]
    np.testing.assert_allclose(rows[1].embedding, whole / np.linalg.norm(whole), atol=1e-6)
    assert (rows[2].error_code, rows[2].status_code) == ("invalid_request", 400)
    assert "dimensions is 33, but the model's vectors have 32" in rows[2].error_message


def test_blanks_stay_and_prompts_come_before(embeds: LoadedModel, embedding_model: Path, answer: Any) -> None:
    rows = answer(embeds, {"input": " a river? \n"}, {"input": "a river?", "prompt_name": "query"})
    np.testing.assert_allclose(rows[0].embedding, vector_of(embedding_model, embeds, " a river? \n"), atol=1e-5)
    np.testing.assert_allclose(rows[1].embedding, vector_of(embedding_model, embeds, "query: a river?"), atol=1e-5)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({"input": "x " * 30}, "context_length_exceeded", r"input has \d+ tokens, but the model embeds at most 24"),
        ({"input": ["x", "x " * 30]}, "context_length_exceeded", r"input\[1\] has"),
        ({"input": [5, 400]}, "invalid_request", "input holds token 400, but the model's ids end at 399"),
        ({"input": "x", "prompt_name": "other"}, "invalid_request", "prompt_name is 'other', but .* are query"),
        ({"input": [5], "prompt_name": "query"}, "invalid_request", "before which no prompt can be put"),
        ({"input": ["a b"] * 90}, "invalid_request", "input holds .* tokens, but at most 400 are allowed"),
        ({"messages": [{"role": "user", "content": "x"}]}, "unsupported_url", "makes embeddings and generates nothing"),
        ({"prompt": "x"}, "unsupported_url", "use /v1/embeddings"),
    ],
)
def test_an_invalid_request_fails_its_row(
    embeds: LoadedModel, answer: Any, body: dict[str, Any], code: str, message: str
) -> None:
    rows = answer(embeds, body, {"input": "fine"}, limits={"max_embedding_tokens": 400})
    assert rows[0].error_code == code
    assert re.search(message, rows[0].error_message), rows[0].error_message
    assert rows[1].status is RowStatus.SUCCEEDED


def test_a_model_without_pooling_settings_makes_none(model_folder: Path, answer: Any) -> None:
    chats = LoadedModel.load(model_folder, name="tiny", config=CONFIG)
    rows = answer(chats, {"input": "x"}, {"prompt": "x", "max_tokens": 2})
    assert rows[0].error_code == "unsupported_url"
    assert "publishes no pooling settings (modules.json)" in rows[0].error_message
    assert rows[1].status is RowStatus.SUCCEEDED


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens", "cls_token", "max_tokens", "weightedmean_tokens"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_decoder_without_a_head_makes_them_too(
    family: str, mode: str, tiny_encoders: Any, tmp_path: Path, answer: Any
) -> None:
    # Given a decoder that is published for embeddings, whose tokenizer ends each text with its end token
    folder = tiny_encoders.make_embedding_model(
        family, tmp_path, pooling=mode, dense=[(16, "Identity")], normalize=True
    )
    model = LoadedModel.load(folder, name="tiny", config=CONFIG)
    rows = answer(model, *({"input": text} for text in TEXTS), {"input": TEXTS}, {"prompt": "x"})
    # then its vectors are those that the definition gives
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    dense = load_file(folder / "2_Dense" / "model.safetensors")
    for at, text in enumerate(TEXTS):
        (ids,) = model.tokenizer.encode_batch([text], add_special_tokens=True)
        assert ids[-1] == 2
        with torch.inference_mode():
            hidden = reference(torch.from_numpy(ids[None].astype(np.int64))).last_hidden_state[0]
        want = tiny_encoders.pooled(hidden, mode) @ dense["linear.weight"].double().T + dense["linear.bias"].double()
        np.testing.assert_allclose(rows[at].embedding, want / want.norm(), atol=1e-5)
        np.testing.assert_allclose(json.loads(rows[4].response)["data"][at]["embedding"], rows[at].embedding, atol=1e-6)
    assert rows[5].error_code == "unsupported_url"


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_decoder_with_a_head_answers_both(
    quantize: Any, model_folder: Path, tiny_encoders: Any, tmp_path: Path, answer: Any
) -> None:
    # Given a model for text that publishes a pooling too
    folder = tmp_path / "both"
    shutil.copytree(model_folder, folder)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in modules]
    tiny_encoders.write(folder / "modules.json", listed)
    tiny_encoders.write(folder / "1_Pooling" / "config.json", {"pooling_mode": "lasttoken"})
    loaded = LoadedModel.load(folder, name="tiny", config=replace(CONFIG, quantize=quantize))
    model = replace(loaded, quantization="none")  # the made-up job is pinned to that
    rows = answer(model, {"prompt": TEXTS[0], "max_tokens": 4}, {"input": TEXTS[0]}, {"input": TEXTS[:2]})
    assert {row.status for row in rows.values()} == {RowStatus.SUCCEEDED}
    assert rows[0].completion_tokens == 4
    np.testing.assert_allclose(np.linalg.norm(rows[1].embedding), 1, atol=1e-5)
    both = json.loads(rows[2].response)["data"]
    np.testing.assert_allclose(both[0]["embedding"], rows[1].embedding, atol=1e-5)
    if quantize == "none":
        np.testing.assert_allclose(rows[1].embedding, _last_state(folder, model, TEXTS[0]), atol=1e-5)


def _last_state(folder: Path, model: LoadedModel, text: str) -> Any:
    (ids,) = model.tokenizer.encode_batch([text], add_special_tokens=True)
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        last = reference(torch.from_numpy(ids[None].astype(np.int64))).last_hidden_state[0, -1]
    return (last / last.norm()).numpy()


def test_a_finished_row_is_logged_with_its_vector(embeds: LoadedModel, kit: Any) -> None:
    # Given a worker that logs after each step, of which one computes a few rows only
    sink = kit.MemorySink()
    work = kit.make_work([{"model": "tiny", "input": f"text number {n}"} for n in range(40)])
    settings = WorkerSettings(checkpoint_seconds=0)
    ShardWorker(embeds, kit.ListSource([work]), sink, kit.FakeClock(), settings, helper=kit.InlineExecutor()).run()
    # then the log holds finished rows, vectors included, and nothing half done
    logged = [row for one in sink.checkpoints[1] for row in one.finished.to_pylist()]
    assert len(sink.checkpoints[1]) > 2
    assert not any(one.running for one in sink.checkpoints[1])
    for row in logged:
        np.testing.assert_array_equal(np.float32(row["embedding"]), sink.rows[row["row"]].embedding)


def test_prompts_can_be_left_out_of_the_mean(tiny_encoders: Any, tmp_path: Path, answer: Any) -> None:
    folder = tiny_encoders.make_embedding_model(
        "bert", tmp_path, prompts={"q": "query: "}, default_prompt="q", include_prompt=False
    )
    model = LoadedModel.load(folder, name="tiny", config=CONFIG)
    row = answer(model, {"input": "a river?"})[0]
    (prompt,) = model.tokenizer.encode_batch(["query: "], add_special_tokens=True)
    (ids,) = model.tokenizer.encode_batch(["query: a river?"], add_special_tokens=True)
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = reference(torch.from_numpy(ids[None].astype(np.int64))).last_hidden_state[0]
    np.testing.assert_allclose(row.embedding, hidden[len(prompt) - 1 :].mean(dim=0), atol=1e-5)


def test_the_digest_includes_the_pooling_settings(tiny_encoders: Any, tmp_path: Path) -> None:
    folder = tiny_encoders.make_embedding_model("bert", tmp_path, dense=[(8, "Tanh")])
    seen = {model_digest(folder)}
    for name in ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "sentence_bert_config.json"):
        path = folder / name
        path.write_text(path.read_text() + "\n")
        seen.add(model_digest(folder))
    weights = folder / "2_Dense" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    seen.add(model_digest(folder))
    assert len(seen) == 6


# -- faults


class PoisonedModel:
    """A wrapper of a model, whose steps fail when a text is `poison`, or always."""

    def __init__(self, model: Any, poison: int | None) -> None:
        self.spec = model.spec
        self.num_token_types = model.num_token_types
        self._model = model
        self._poison = poison
        self.batches: list[int] = []

    def pool(self, prompts: Any, mode: Any, skips: Any, types: Any) -> Any:
        self.batches.append(len(prompts))
        if self._poison is None or any(self._poison in prompt for prompt in prompts):
            raise RuntimeError("the device said no")
        return self._model.pool(prompts, mode, skips, types)


def test_a_poison_row_fails_alone(embedding_model: Path, answer: Any) -> None:
    model = LoadedModel.load(embedding_model, name="tiny", config=CONFIG)
    poisoned = PoisonedModel(model.engine.engine.engine._model, 399)
    model.engine.engine.engine._model = poisoned
    bodies: list[Any] = [{"input": [5 + at]} for at in range(20)]
    bodies[7] = {"input": [[5], [399], [6]]}
    rows = answer(model, *bodies)
    assert {at for at, row in rows.items() if row.status is not RowStatus.SUCCEEDED} == {7}
    assert rows[7].error_code == "engine_error"
    assert "the device said no" in rows[7].error_message


def test_an_engine_that_always_fails_is_broken(embedding_model: Path, answer: Any) -> None:
    model = LoadedModel.load(embedding_model, name="tiny", config=CONFIG)
    model.engine.engine.engine._model = PoisonedModel(model.engine.engine.engine._model, None)
    with pytest.raises(BrokenEngineError, match="the device said no"):
        answer(model, {"input": "x"}, {"input": "y"})


# -- on the lane


@pytest.mark.slow
def test_requests_on_the_lane_get_the_same_vectors(embeds: LoadedModel, answer: Any, kit: Any) -> None:
    lane = MemoryLane(SystemClock())
    stop = threading.Event()

    class EndlessSource:
        def take(self, timeout: float, tiers: Any = ()) -> None:
            return None

        def finished(self) -> bool:
            return stop.is_set()

    server = LaneServer(embeds, lane.worker("w"), SystemClock())
    worker = ShardWorker(embeds, EndlessSource(), kit.MemorySink(), SystemClock(), beside=server)
    bodies = {
        "one": {"input": TEXTS[0]}, "many": {"input": TEXTS}, "long": {"input": "x " * 30},
        "other": {"messages": [{"role": "user", "content": "x"}]},
    }  # fmt: skip
    requests = {
        name: LaneRequest(id=name, model=embeds.pin().key, url=URL, body={"model": "tiny", **body})
        for name, body in bodies.items()
    }
    with server.running(stop):
        thread = threading.Thread(target=worker.run, args=(stop,))
        thread.start()
        ends = {name: list(call(lane, request, SystemClock(), CALL))[-1] for name, request in requests.items()}
        stop.set()
        thread.join(HANG_SECONDS)
    rows = answer(embeds, {"input": TEXTS[0]}, {"input": TEXTS})
    for at, name in enumerate(("one", "many")):
        assert isinstance(ends[name], EndEvent)
        want = json.loads(rows[at].response)
        got = dict(ends[name].response)
        for mine, theirs in zip(got.pop("data"), want.pop("data"), strict=True):
            np.testing.assert_allclose(mine.pop("embedding"), theirs.pop("embedding"), atol=1e-6)
            assert mine == theirs
        assert got == want
    assert isinstance(ends["long"], ErrorEvent)
    assert (ends["long"].code, ends["long"].param) == ("context_length_exceeded", "input")
    assert ends["other"].code == "invalid_request"  # there is nothing to embed in it


def test_the_model_has_its_pin_and_embedding_size(embeds: LoadedModel, model_folder: Path) -> None:
    assert embeds.dtype == "float32"
    assert embeds.facts["attention"] == "torch"
    assert embeds.limits.generates is False
    assert embeds.limits.embedding_size == 32
    plain = Engine.load(model_folder, CONFIG)
    limits = ModelLimits(plain.max_model_len, plain.spec.vocab_size, plain.spec.eos_token_ids)
    assert (limits.generates, limits.embedding) == (True, None)
