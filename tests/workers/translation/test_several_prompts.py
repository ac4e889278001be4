"""Several prompts in one completions row: the choices are those of the same prompts, each in a row of its own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from pipeline.adapters.system_clock import SystemClock
from schemas.jobs.results import ResultRow, RowStatus
from schemas.requests.errors import RowErrorCode
from schemas.requests.parsing import COMPLETIONS_URL, CompletionBody, parse_body
from workers.model.loaded_model import LoadedModel
from workers.shards.worker import ShardWorker
from workers.translation.requests import JobRules, RowHints, Translator

CLOCK = SystemClock()
CONFIG = EngineConfig(
    dtype="float32", threads=1, max_model_len=128, cache=CacheConfig(block_size=16, num_blocks=200),
    schedule=ScheduleConfig(max_num_seqs=8),
)  # fmt: skip
PROMPTS: list[Any] = ["The quick brown", [5, 6, 7, 8, 9], "naïve 日本語", "x", "The quick fox"]


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> LoadedModel:
    return LoadedModel.load(model_folder, name="tiny", config=CONFIG)


def compute(kit: Any, model: LoadedModel, bodies: list[dict[str, Any]]) -> list[ResultRow]:
    sink = kit.MemorySink()
    ShardWorker(model, kit.ListSource([kit.make_work(bodies)]), sink, CLOCK).run()
    return list(sink.parts[1])


def choices(row: ResultRow) -> list[dict[str, Any]]:
    assert row.response is not None, row.error_message
    found: list[dict[str, Any]] = json.loads(row.response)["choices"]
    return found


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0, "max_tokens": 20},
        {"temperature": 1.1, "seed": 7, "max_tokens": 20, "n": 3},
        {"temperature": 0.8, "seed": 7, "max_tokens": 30, "n": 2, "stop": ["e", "th", "q"], "logprobs": 2},
        {"temperature": 0, "max_tokens": 0, "echo": True, "logprobs": 1},
        {"temperature": 0, "max_tokens": 5, "echo": True, "logprobs": 3},
        {"temperature": 0, "echo": True, "max_tokens": 10},
        {"temperature": 0},
        {"temperature": 0.9, "seed": 2, "max_tokens": 9, "n": 2, "return_token_ids": True, "bad_words": ["e"]},
        {"temperature": 0.9, "seed": 1, "max_tokens": 12, "structured_outputs": {"regex": "[a-f]{3,9}"}, "n": 2},
    ],
)
def test_each_prompt_is_answered_as_if_it_were_sent_alone(loaded: LoadedModel, kit: Any, body: dict[str, Any]) -> None:
    n = body.get("n", 1)
    whole, *single = compute(kit, loaded, [kit.completion(prompt, **body) for prompt in (PROMPTS, *PROMPTS)])
    found = choices(whole)
    assert [choice["index"] for choice in found] == list(range(len(PROMPTS) * n))
    expected = [
        choice | {"index": number * n + choice["index"]} for number in range(5) for choice in choices(single[number])
    ]
    assert found == kit.rounded(expected)
    assert whole.text == found[0]["text"]
    assert whole.prompt_tokens == sum(row.prompt_tokens or 0 for row in single)
    assert whole.completion_tokens == sum(row.completion_tokens or 0 for row in single)
    usage = json.loads(whole.response or "")["usage"]
    assert usage["total_tokens"] == (whole.prompt_tokens or 0) + (whole.completion_tokens or 0)


def test_without_a_seed_equal_prompts_are_answered_differently_and_the_same_again(
    loaded: LoadedModel, kit: Any
) -> None:
    body = kit.completion(["The quick"] * 6, temperature=1.5, max_tokens=20)
    (first,), (again,) = compute(kit, loaded, [body]), compute(kit, loaded, [body])
    texts = [choice["text"] for choice in choices(first)]
    assert len(set(texts)) == 6
    assert [choice["text"] for choice in choices(again)] == texts
    (alone,) = compute(kit, loaded, [kit.completion("The quick", temperature=1.5, max_tokens=20)])
    assert alone.text == texts[0]


@pytest.mark.parametrize(
    ("prompts", "body", "code", "message"),
    [
        (["a", "b", "long " * 60, "c"], {}, RowErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt[2] of "),
        (["a", [3] * 120], {"max_tokens": 9}, RowErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt[1] of 120 tokens and"),
        (["a", "x" * 9_999], {}, RowErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt[1] of at least"),
        (["a", [3, 99_999]], {}, RowErrorCode.INVALID_REQUEST, "prompt[1] holds token 99999"),
    ],
)
def test_one_bad_prompt_fails_the_row_by_its_name(
    loaded: LoadedModel, kit: Any, prompts: list[Any], body: dict[str, Any], code: RowErrorCode, message: str
) -> None:
    good = kit.completion(["a", "b"], temperature=0, max_tokens=4)
    bad = kit.completion(prompts, **body)
    failed, answered = compute(kit, loaded, [bad, good])
    assert (failed.status, failed.error_code) == (RowStatus.FAILED, code)
    assert message in (failed.error_message or "")
    assert len(choices(answered)) == 2


@pytest.mark.parametrize(("most", "kept"), [(6, 6), (-1, 118), (500, 118)])
def test_the_beginning_of_a_long_prompt_is_cut_off(loaded: LoadedModel, kit: Any, most: int, kept: int) -> None:
    long = [5 + at % 90 for at in range(118 if most == 500 else 300)]
    body = {"temperature": 0, "max_tokens": 10, "echo": True, "logprobs": 0}
    cut, expected, chat = compute(
        kit,
        loaded,
        [
            kit.completion([long, [7, 8]], truncate_prompt_tokens=most, **body),
            kit.completion([long[-kept:], [7, 8]], **body),
            kit.chat("many words " * 90, truncate_prompt_tokens=most, temperature=0, max_tokens=10),
        ],
    )
    assert choices(cut) == kit.rounded(choices(expected))
    usage = json.loads(cut.response or "")["usage"]
    assert usage["prompt_tokens"] == kept + 2
    assert usage["prompt_tokens_details"].get("truncated_tokens", 0) == len(long) - kept
    if most == 500:
        assert (chat.status, chat.error_code) == (RowStatus.FAILED, RowErrorCode.CONTEXT_LENGTH_EXCEEDED)
    else:
        assert chat.prompt_tokens == kept


def test_prompt_logprobs_are_those_of_an_echo(loaded: LoadedModel, kit: Any) -> None:
    body = {"temperature": 0, "max_tokens": 3}
    text = loaded.tokenizer.render_chat(kit.parse(kit.chat("Hello")).messages, ())
    (ids,) = loaded.tokenizer.encode_chats([text])
    asked, echoed, chat, as_ids = compute(
        kit,
        loaded,
        [
            kit.completion(PROMPTS, prompt_logprobs=2, n=2, **body),
            kit.completion(PROMPTS, echo=True, logprobs=2, max_tokens=0),
            kit.chat("Hello", prompt_logprobs=1, **body),
            kit.completion(ids.tolist(), prompt_logprobs=1, **body),
        ],
    )
    for at, choice in enumerate(choices(asked)):
        expected = choices(echoed)[at // 2]["logprobs"]
        first, *scores = choice["prompt_logprobs"]
        assert first is None
        assert len(scores) == len(expected["tokens"]) - 1
        for entry, token, value in zip(scores, expected["tokens"][1:], expected["token_logprobs"][1:], strict=True):
            own = [one for one in entry.values() if one["decoded_token"] == token]
            assert max(one["logprob"] for one in own) == pytest.approx(value, abs=1e-4)
            assert sorted(one["rank"] for one in entry.values() if one["rank"]) == [1, 2]
    of_chat = json.loads(chat.response or "")["prompt_logprobs"]
    assert of_chat == kit.rounded(choices(as_ids)[0]["prompt_logprobs"])
    assert list(of_chat[1]) != [str(ids[0])]


@pytest.mark.slow
def test_in_a_small_pool_the_answers_are_the_same(model_folder: Path, loaded: LoadedModel, kit: Any) -> None:
    bodies = [kit.completion(PROMPTS, n=2, seed=at, temperature=1.0, max_tokens=70, ignore_eos=True) for at in (1, 2)]
    small = LoadedModel.load(
        model_folder, name="tiny", config=replace(CONFIG, cache=CacheConfig(block_size=16, num_blocks=9))
    )
    found = compute(kit, small, bodies)
    assert small.engine.stats().preemptions
    assert [choices(row) for row in found] == [choices(row) for row in compute(kit, loaded, bodies)]


def test_the_prompts_share_the_lists_of_tokens_that_are_allowed_and_banned(loaded: LoadedModel, kit: Any) -> None:
    body = parse_body(COMPLETIONS_URL, kit.completion(["a", "b", "c"], allowed_token_ids=[5, 6], bad_words=["fox"]))
    assert isinstance(body, CompletionBody)
    translator = Translator(loaded.tokenizer, loaded.limits, JobRules())
    prompts = [np.array([5, 6], dtype=np.int32)] * 3
    request = translator.request("r", body, prompts, RowHints(row=0))
    first, *others = (member.params for member in request.members)
    assert first.bans is not None
    assert all(other.bans is first.bans and other.seed != first.seed for other in others)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"max_tokens": 0}, None),
        ({"max_tokens": 0, "echo": True, "logprobs": 1}, None),
        ({"prompt_logprobs": 4}, None),  # 3 prompts of 4 tokens, 5 of each: 60
        ({"prompt_logprobs": 5}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "n": 2}, "prompt_logprobs"),
        ({"max_tokens": 0, "echo": True, "logprobs": 5, "prompt_logprobs": 0}, "logprobs"),
        ({"max_tokens": 0, "logprobs": 5}, None),  # of the answer only
        ({"prompt": [[5, 6, 7, 8, 9]] * 3}, "prompt"),
        ({"prompt": [[5] * 13]}, None),  # alone: the context is its limit
    ],
)
def test_the_totals_of_a_request_are_bounded(
    loaded: LoadedModel, kit: Any, fields: dict[str, Any], refused: str | None
) -> None:
    given = {"prompt": [[5, 6, 7, 8]] * 3, **fields}
    sink = kit.MemorySink()
    job = kit.make_job(limits={"max_prompt_logprobs": 60, "max_prompt_tokens": 12})
    ShardWorker(loaded, kit.ListSource([kit.make_work([kit.completion(**given)], job=job)]), sink, CLOCK).run()
    (row,) = sink.parts[1]
    if refused is None:
        assert row.status is RowStatus.SUCCEEDED, row.error_message
        return
    assert row.error_code is RowErrorCode.INVALID_REQUEST
    assert re.search(rf": {refused} (is|holds) .* but at most (60|12) are allowed.*; ", row.error_message or "")


def test_batches_of_an_evaluation_are_within_the_totals(loaded: LoadedModel, kit: Any) -> None:
    given = kit.completion([[5, 6]] * 64, max_tokens=0, echo=True, logprobs=1)
    body = parse_body(COMPLETIONS_URL, given)
    assert isinstance(body, CompletionBody)
    translator = Translator(loaded.tokenizer, replace(loaded.limits, max_model_len=8_192), JobRules())
    prompts = [np.full(8_192, 5, dtype=np.int32)] * 64
    assert len(translator.request("r", body, prompts, RowHints(row=0)).members) == 64
