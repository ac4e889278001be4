"""Rows that are classified by choices, on the real engine: their numbers are those of scoring each choice in full."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from pipeline.worker_client.ports import ShardWork
from schemas.jobs.results import RowStatus
from schemas.requests.errors import RowError
from schemas.workers.lane import LaneRequest
from workers.lane.requests import LaneReader, LaneRules
from workers.model.loaded_model import LoadedModel
from workers.policies.policy import Policies
from workers.policies.rules import Rules
from workers.shards.worker import ShardWorker
from workers.text.tokenizer import Tokenizer

URL = "/v1/classify"
CHOICES = [" a", " fox jumps", " the lazy dog", "0"]
TEXTS = ["The quick brown fox jumps over the lazy dog. What is a river?", "0123456789 a stream", "query: passage"]


def config(num_blocks: int = 200, tokens: int = 64) -> EngineConfig:
    return EngineConfig(
        dtype="float32", threads=1, max_model_len=128, cache=CacheConfig(block_size=4, num_blocks=num_blocks),
        schedule=ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=tokens),
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(model_folder: Path) -> LoadedModel:
    return LoadedModel.load(model_folder, name="tiny", config=config())


@pytest.fixture
def answer(kit: Any) -> Callable[..., dict[int, Any]]:
    """The results of these bodies, each by its row, from one shard."""

    def answer(model: LoadedModel, *bodies: Any, **settings: Any) -> dict[int, Any]:
        sink = kit.MemorySink()
        urls = [URL if "choices" in body else "/v1/completions" for body in bodies]
        named = [(url, {"model": "tiny", **body}) for url, body in zip(urls, bodies, strict=True)]
        work: ShardWork = kit.make_work(named, job=kit.make_job(**settings))
        ShardWorker(model, kit.ListSource([work]), sink, kit.FakeClock(), helper=kit.InlineExecutor()).run()
        rows: dict[int, Any] = sink.rows
        return rows

    return answer


def scored(folder: Path, model: LoadedModel, prompt: Any, choices: list[str]) -> list[list[float]]:
    """The log-probabilities of each choice's tokens behind the prompt's ids, by transformers."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for ids in model.tokenizer.encode_batch(choices, add_special_tokens=False):
        whole = torch.tensor([[*prompt, *ids.tolist()]])
        with torch.inference_mode():
            logprobs = reference(whole).logits[0].log_softmax(-1)
        at = torch.arange(len(prompt) - 1, whole.shape[1] - 1)
        found.append(logprobs[at, whole[0, len(prompt) :]].tolist())
    return found


@pytest.mark.parametrize("num_blocks", [200, 36])
@pytest.mark.parametrize("normalize", ["sum", "mean"])
def test_labels_are_those_of_full_scoring(normalize: str, num_blocks: int, model_folder: Path, answer: Any) -> None:
    # Given rows of one text and of several, beside answers that take blocks from them where there are few
    model = LoadedModel.load(model_folder, name="tiny", config=config(num_blocks))
    how = {"choices": CHOICES, "normalize": normalize}
    talk = {"prompt": "a river", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    rows = answer(
        model, *[talk] * 2, *({"input": text, **how} for text in TEXTS), {"prompt": TEXTS, **how}, *[talk] * 2
    )
    several = json.loads(rows[5].response)["data"]
    assert rows[5].text is None
    for at, text in enumerate(TEXTS):
        (prompt,) = model.tokenizer.encode_batch([text], add_special_tokens=True)
        logprobs = scored(model_folder, model, prompt.tolist(), CHOICES)
        sums = np.array([sum(each) for each in logprobs])
        numbers = sums if normalize == "sum" else sums / [len(each) for each in logprobs]
        row = rows[2 + at]
        assert row.status is RowStatus.SUCCEEDED, row.error_message
        (data,) = json.loads(row.response)["data"]
        np.testing.assert_allclose([choice["logprob"] for choice in data["choices"]], sums, atol=1e-4)
        assert [choice["num_tokens"] for choice in data["choices"]] == [len(each) for each in logprobs]
        assert [choice["text"] for choice in data["choices"]] == CHOICES
        want = np.exp(numbers - np.logaddexp.reduce(numbers))
        np.testing.assert_allclose(data["probs"], want, atol=1e-4)
        assert data["label"] == row.text == CHOICES[int(numbers.argmax())]
        np.testing.assert_allclose(several[at]["probs"], data["probs"], atol=1e-5)
        assert (several[at]["index"], data["num_classes"], row.completion_tokens) == (at, 4, 0)
    if num_blocks == 36:
        assert model.engine.stats().preemptions > 0


def test_the_prompt_is_computed_once(model: LoadedModel, answer: Any) -> None:
    text = "a river? The quick brown fox jumps over the lazy dog. " * 2
    (ids,) = model.tokenizer.encode_batch([text], add_special_tokens=True)
    lengths = [len(each) for each in model.tokenizer.encode_batch(CHOICES, add_special_tokens=False)]
    before = model.engine.stats().prompt
    (row,) = answer(model, {"input": text, "choices": CHOICES}).values()
    computed = model.engine.stats().prompt - before
    assert row.prompt_tokens == 4 * len(ids) + sum(lengths)
    assert row.prompt_tokens - row.cached_tokens == computed
    assert computed <= len(ids) + sum(lengths) + 4 * 4  # of the others, a block each


def test_a_conversation_is_classified_behind_its_template(
    model: LoadedModel, model_folder: Path, answer: Any, kit: Any
) -> None:
    messages = [{"role": "system", "content": "Say yes or no."}, {"role": "user", "content": "Is a fox a dog?"}]
    body = kit.parse({"model": "tiny", "messages": messages})
    rendered = model.tokenizer.render_chat(body.messages)
    (prompt,) = model.tokenizer.encode_chats([rendered])
    (row,) = answer(model, {"messages": messages, "choices": ["yes", "no"]}).values()
    sums = [sum(each) for each in scored(model_folder, model, prompt.tolist(), ["yes", "no"])]
    (data,) = json.loads(row.response)["data"]
    np.testing.assert_allclose([choice["logprob"] for choice in data["choices"]], sums, atol=1e-4)
    assert row.text == ["yes", "no"][int(np.argmax(sums))]


def test_what_does_not_fit_is_refused(model: LoadedModel, embedding_model: Path, answer: Any) -> None:
    rows = answer(
        model,
        {"input": [[5] * 126], "choices": ["a", " fox jumps over"]},
        {"input": [[5, 100_000]], "choices": ["a"]},
        {"input": "fine", "choices": ["a", "b"]},
        limits={"max_embedding_tokens": 200},
    )
    assert rows[0].error_code == "context_length_exceeded"
    assert "input has 126 tokens and the longest choice" in rows[0].error_message
    assert "holds token 100000" in rows[1].error_message
    assert rows[2].status is RowStatus.SUCCEEDED
    (row,) = answer(model, {"input": TEXTS, "choices": CHOICES}, limits={"max_embedding_tokens": 20}).values()
    assert "but at most 20 are allowed" in row.error_message
    encoded: list[str] = []
    encode = Tokenizer.encode_batch

    def record(tokenizer: Tokenizer, texts: list[str], **how: bool) -> Any:
        encoded.extend(texts)
        return encode(tokenizer, texts, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "encode_batch", record)
        (row,) = answer(model, {"input": [[5]], "choices": ["a", " fox" * 500]}).values()
    assert row.error_code == "context_length_exceeded"
    assert re.search(r"choices\[1\] has \d+ tokens at least, but the context holds 127", row.error_message)
    assert " fox" * 500 not in encoded
    encoder = LoadedModel.load(embedding_model, name="tiny", config=EngineConfig(threads=1))
    (row,) = answer(encoder, {"input": "a", "choices": ["a", "b"]}).values()
    assert row.error_code == "unsupported_url"


def test_policies_judge_prompt_and_choices(model: LoadedModel, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\nname = 'secrets'\nkeywords = ['secret']\n")
    reader = LaneReader(model, LaneRules(policies=Policies((("rules", Rules(rules)),))))
    bodies: list[Any] = [
        {"input": ["a", "a secret"], "choices": ["b", "c"]},
        {"input": "a", "choices": ["b", "secret"]},
        {"messages": [{"role": "user", "content": "secret"}], "choices": ["b"]},
    ]
    for body in bodies:
        with pytest.raises(RowError) as refused:
            reader.prepare(LaneRequest(id="r", model="tiny", url=URL, body={"model": "tiny", **body}))
        assert refused.value.code == "content_filter"
    row = reader.prepare(LaneRequest(id="r", model="tiny", url=URL, body={"model": "tiny", **bodies[0], "input": "a"}))
    assert len(row.request.members) == 2


def test_labels_of_one_token_are_those_of_greedy_decoding(model: LoadedModel, answer: Any) -> None:
    # Given labels that no other tokens spell
    labels = list("abcdefg")
    assert all(len(ids) == 1 for ids in model.tokenizer.encode_batch(labels, add_special_tokens=False))
    bodies = [{"input": text, "choices": labels} for text in (*TEXTS, *CHOICES)]
    how = {"max_tokens": 4, "temperature": 0, "structured_outputs": {"choice": labels}}
    decoded = [{"prompt": body["input"], **how} for body in bodies]
    rows = answer(model, *bodies, *decoded)
    texts = [rows[at].text for at in range(len(rows))]
    assert texts[: len(bodies)] == texts[len(bodies) :]
    assert len(set(texts)) > 1
