"""Sequences that share a part of a block answer as those that compute it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.cache.tables import CacheTables
from engine.config import SpeculationConfig
from engine.groups import GroupEngine
from engine.plan import BlockCopy
from engine.request import Completion
from tests.engine.test_shared_scores import scored

TinyModel = Callable[[str], Path]
PROMPT = [3 + at % 40 for at in range(30)]
SAMPLING = (
    SamplingParams(max_tokens=14, temperature=0.0, n=3, ignore_eos=True),
    SamplingParams(max_tokens=14, temperature=0.7, seed=3, n=4, logprobs=2),
    SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
)


def config(block_size: int = 16, tokens: int = 64, num_blocks: int = 200, **changes: Any) -> EngineConfig:
    caching = changes.pop("prefix_caching", True)
    return EngineConfig(
        **{"dtype": "float32", "max_model_len": 128} | changes,
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks, prefix_caching=caching),
        schedule=ScheduleConfig(max_num_seqs=6, max_num_batched_tokens=tokens),
    )


def requests() -> list[Request]:
    ends = ([], [5], [5, 6], [9] * 7, [11, 12, 13])
    return [
        Request(f"{at}-{kind}", as_token_ids([*PROMPT, *end]), params, expected_tokens=1)
        for at, end in enumerate(ends)
        for kind, params in enumerate(SAMPLING)
    ]


def answers(engine: Engine) -> dict[str, Completion]:
    return {done.request_id: done for done in engine.run(requests())}


def check_same(got: dict[str, Completion], wanted: dict[str, Completion]) -> None:
    assert got.keys() == wanted.keys()
    for name, one in wanted.items():
        for left, right in zip(one.choices, got[name].choices, strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist()
            if left.logprobs is not None:
                assert right.logprobs is not None
                np.testing.assert_allclose(left.logprobs.chosen, right.logprobs.chosen, atol=1e-4)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[BlockCopy]:
    """The copies that any engine makes."""
    copied: list[BlockCopy] = []
    take = CacheTables.take_copies

    def record(tables: CacheTables) -> tuple[BlockCopy, ...]:
        copied.extend(copies := take(tables))
        return copies

    monkeypatch.setattr(CacheTables, "take_copies", record)
    return copied


@pytest.fixture(scope="module")
def computed(tiny_model: TinyModel) -> dict[str, dict[str, Completion]]:
    """The answers by family, all prompts computed as a whole."""
    plain = config(prefix_caching=False)
    return {family: answers(Engine.load(tiny_model(family), plain)) for family in ("llama", "gemma3")}


@pytest.mark.parametrize(
    ("family", "block_size", "tokens", "num_blocks", "ahead"),
    [
        pytest.param("llama", 16, 64, 200, False, marks=pytest.mark.slow),
        ("llama", 4, 24, 200, True),
        ("llama", 4, 64, 20, False),
        ("gemma3", 4, 24, 200, False),
        pytest.param("gemma3", 16, 24, 12, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_answers_are_those_without_a_cache(
    family: str,
    block_size: int,
    tokens: int,
    num_blocks: int,
    ahead: bool,
    tiny_model: TinyModel,
    computed: dict[str, dict[str, Completion]],
    copied: list[BlockCopy],
) -> None:
    engine = Engine.load(tiny_model(family), config(block_size, tokens, num_blocks, async_scheduling=ahead))
    check_same(answers(engine), computed[family])
    stats = engine.stats()
    assert copied
    assert stats.preemptions > 0 or num_blocks == 200
    assert stats.free_blocks == stats.total_blocks


@pytest.mark.parametrize("attention", ["paged-sdpa", "native"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_four_choices_compute_their_prompt_once(
    attention: str, dtype: str, kv_dtype: str, tiny_model: TinyModel
) -> None:
    if kv_dtype == "int8" and attention != "native":
        pytest.skip("only the native kernels have an int8 cache")
    engine = Engine.load(tiny_model("llama"), config(dtype=dtype, attention=attention, kv_dtype=kv_dtype))
    params = SamplingParams(max_tokens=8, temperature=0.0, n=4, ignore_eos=True)
    (done,) = engine.run([Request("r", as_token_ids(PROMPT), params)])
    assert engine.stats().prompt == len(PROMPT) + 3
    assert len({tuple(choice.token_ids.tolist()) for choice in done.choices}) == 1


@pytest.mark.slow
def test_drafts_change_no_answer(
    tiny_model: TinyModel, computed: dict[str, dict[str, Completion]], copied: list[BlockCopy]
) -> None:
    path = tiny_model("llama")
    for speculation in (SpeculationConfig("ngram"), SpeculationConfig("draft", draft_model=str(path))):
        engine = Engine.load(path, config(speculation=speculation))
        check_same(answers(engine), computed["llama"])
        assert copied
        copied.clear()
        assert sum(source.num_accepted for source in engine.stats().speculation.sources.values()) > 0


@pytest.mark.parametrize(("block_size", "ahead"), [(16, False), (16, True), (32, False)])
def test_scored_ends_compute_their_prompt_once(block_size: int, ahead: bool, tiny_model: TinyModel) -> None:
    # Given four ends of three tokens, of which the last is only read,
    ends = [[5 + at, 6, 7] for at in range(4)]
    request = scored((PROMPT, ends))
    numbers = []
    for caching in (True, False):
        settings = config(block_size, prefix_caching=caching, async_scheduling=ahead)
        engine = GroupEngine(Engine.load(tiny_model("llama"), settings))
        engine.add(request)
        done = [one for _ in range(9) for one in engine.step()]
        # then the prompt is computed once, and two tokens of each end behind it.
        assert engine.stats().computed == (30 + 8 if caching else 4 * 32)
        numbers.append([member.prompt_logprobs.chosen[30:] for member in done[0].members if member.prompt_logprobs])
    assert len(numbers[0]) == 4
    np.testing.assert_allclose(np.array(numbers[0]), np.array(numbers[1]), atol=1e-5)


def test_a_later_request_copies_from_one_that_still_runs(tiny_model: TinyModel) -> None:
    engine = Engine.load(tiny_model("llama"), config())
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    engine.add(Request("first", as_token_ids(PROMPT), params))
    engine.step()
    engine.add(Request("second", as_token_ids(PROMPT), params))
    done = [one for _ in range(30) for one in engine.step()]
    assert [one.cached_tokens for one in done] == [0, 29]
    assert done[0].choices[0].token_ids.tolist() == done[1].choices[0].token_ids.tolist()
