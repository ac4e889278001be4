"""Speculation changes when a token is known, never which one it is: every answer is that of a run without it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import (
    CacheConfig,
    Completion,
    Engine,
    EngineConfig,
    FinishReason,
    PartialChoice,
    Request,
    SamplingParams,
    ScheduleConfig,
    SpeculationConfig,
    as_token_ids,
)
from engine.errors import UnsupportedModel
from engine.speculative.base import Draft, DraftRequest
from engine.speculative.draft_lengths import FixedLengths
from tests.engine.native.test_native_engine import PRECISIONS
from tests.engine.scheduler.test_resume import BAD_WORDS, OddMask, PairWatcher, joined, visible

TinyModel = Callable[[str], Path]

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

KINDS = [
    GREEDY,
    SamplingParams(max_tokens=40, temperature=0.0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=33, temperature=0.0, min_tokens=9, stop_token_ids=tuple(range(60)), ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.3, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.6, top_p=0.8, min_p=0.02, seed=-5, n=3, logprobs=0),
    SamplingParams(max_tokens=40, temperature=0.4, top_k=5, repetition_penalty=1.1, frequency_penalty=0.2, seed=4),
    SamplingParams(max_tokens=40, temperature=0.0, presence_penalty=0.3, logit_bias={9: 3.0}),
]


def repeating_prompts(count: int) -> list[list[int]]:
    """Prompts in which a run of tokens comes again and again, so that there is something to copy."""
    chance = random.Random(5)
    prompts = []
    for i in range(count):
        phrase = [chance.randrange(3, 257) for _ in range(7)]
        prompts.append([*range(3, 23), *(phrase * 3)[: 12 + 2 * i]])
    return prompts


def requests_of(count: int = 21) -> list[Request]:
    made = []
    for i, prompt in enumerate(repeating_prompts(count)):
        request = Request(str(i), as_token_ids(prompt), KINDS[i % len(KINDS)])
        if i % 5 == 1:
            request = replace(request, watcher=lambda _: PairWatcher())
        if i % 5 == 2:
            request = replace(request, mask=lambda _: OddMask())
        made.append(request)
    return made


def load(path: Path, method: Any, **changes: Any) -> Engine:
    config = EngineConfig(
        dtype="float32",
        max_model_len=256,
        cache=CacheConfig(block_size=16, num_blocks=400),
        schedule=ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=256),
        speculation=SpeculationConfig(method),
    )
    return Engine.load(path, replace(config, **changes))


def run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    done = {completion.request_id: completion for completion in engine.run(requests)}
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert (stats.free_blocks, stats.running) == (stats.total_blocks, 0)
    return done


def assert_same(ours: dict[str, Completion], theirs: dict[str, Completion]) -> None:
    assert {name: visible(c) for name, c in ours.items()} == {name: visible(c) for name, c in theirs.items()}
    for name, completion in theirs.items():
        for one, other in zip(ours[name].choices, completion.choices, strict=True):
            if other.logprobs is not None:
                assert one.logprobs is not None
                np.testing.assert_allclose(one.logprobs.chosen, other.logprobs.chosen, atol=1e-4)
                np.testing.assert_allclose(one.logprobs.top, other.logprobs.top, atol=1e-4)


class ReplayProposer:
    """Drafts the answers of a run without speculation, with a wrong token here and there."""

    def __init__(self, engine: Engine, answers: dict[str, Completion]) -> None:
        self._rows = engine.scheduler.rows
        self._answers = answers

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [Draft(self._draft_tokens(request), "replay") for request in requests]

    def learn(self, request: Request, token_ids: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        pass

    def _draft_tokens(self, request: DraftRequest) -> np.ndarray[Any, np.dtype[np.int32]]:
        choice = self._answers[request.request.request_id].choices[request.choice]
        done = int(self._rows.num_known[request.row]) - len(request.request.prompt_token_ids)
        ending = [] if choice.stop_token_id is None else [choice.stop_token_id]
        most = request.max_drafts
        drafts = as_token_ids([*choice.token_ids, *ending, *[7] * most])[done : done + most].copy()
        drafts[(np.arange(len(drafts)) + done) % 6 == 5] += 1
        return drafts % 257


def replaying(path: Path, answers: dict[str, Completion], longest: int = 8, **changes: Any) -> Engine:
    engine = load(path, "off", **changes)
    engine.scheduler.speculate(ReplayProposer(engine, answers), FixedLengths(longest))
    return engine


SMALL: dict[str, Any] = {
    "cache": CacheConfig(block_size=8, num_blocks=26),
    "schedule": ScheduleConfig(max_num_seqs=5, max_num_batched_tokens=16),
    "max_model_len": 128,
}
"""So few blocks that sequences are preempted, and chunks of 16 tokens."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "paged-sdpa"),
        ("gemma3", "native"),
        ("qwen2-moe", "native"),
        ("qwen3.5", "native"),
        ("deepseek-v2", "native"),
        pytest.param("granite4-mamba", "native", marks=pytest.mark.exhaustive),
        pytest.param("nemotron-h", "native", marks=pytest.mark.exhaustive),
        pytest.param("deepseek-v3", "paged-sdpa", marks=pytest.mark.exhaustive),
        pytest.param("glm4-moe-grouped", "paged-sdpa", marks=pytest.mark.exhaustive),
        pytest.param("llama", "native", marks=pytest.mark.exhaustive),
        pytest.param("gemma3", "paged-sdpa", marks=pytest.mark.exhaustive),
        pytest.param("phi", "auto", marks=pytest.mark.exhaustive),
        pytest.param("olmo2", "native", marks=pytest.mark.exhaustive),
        pytest.param("cohere2", "native", marks=pytest.mark.exhaustive),
        pytest.param("ministral3", "native", marks=pytest.mark.exhaustive),
    ],
)
def test_given_any_kind_of_request_when_tokens_are_drafted_then_answers_are_those_without(
    family: str, attention: str, tiny_model: TinyModel
) -> None:
    path, requests = tiny_model(family), requests_of()
    plain = run(load(path, "off", attention=attention), requests)
    assert {choice.finish_reason for c in plain.values() for choice in c.choices} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    engine = replaying(path, plain, attention=attention)
    speculated = run(engine, requests)

    assert_same(speculated, plain)
    stats = engine.stats()
    # Where drafts are right a step gives several tokens, and what was sampled behind an end is not counted.
    assert stats.generated == sum(c.generated_tokens for c in plain.values())
    assert stats.generated > stats.speculation.accepted > 0.6 * stats.generated
    assert stats.speculation.drafted > stats.speculation.accepted
    drafted, accepted = stats.speculation.sources["replay"].drafted, stats.speculation.sources["replay"].accepted
    assert len(drafted) == len(accepted) == 8
    assert all(tokens >= stayed > 0 for tokens, stayed in zip(drafted[:5], accepted[:5], strict=True))
    assert sum(c.drafted_tokens for c in speculated.values()) == stats.speculation.drafted
    assert sum(c.accepted_tokens for c in speculated.values()) == stats.speculation.accepted


@pytest.mark.slow
@pytest.mark.parametrize("longest", [pytest.param(1, marks=pytest.mark.exhaustive), 5])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_given_few_blocks_when_tokens_are_drafted_then_answers_are_those_without(
    longest: int, prefix_caching: bool, tiny_model: TinyModel
) -> None:
    path, requests = tiny_model("gemma3"), requests_of()
    small = {**SMALL, "cache": replace(SMALL["cache"], prefix_caching=prefix_caching)}
    plain = run(load(path, "off"), requests)
    engine = replaying(path, plain, longest, **small)
    # Given urgent requests that come while others run, and take their rows,
    done: dict[str, Completion] = {}
    for request in requests[0::3] + requests[1::3]:
        engine.add(request)
    for _ in range(14):
        done |= {completion.request_id: completion for completion in engine.step()}
    done |= run(engine, [replace(urgent, priority=0) for urgent in requests[2::3]])

    assert_same(done, plain)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.speculation.accepted > 100
    assert (stats.cached > 0) == prefix_caching


@pytest.mark.parametrize("method", ["replay", "ngram"])
@pytest.mark.slow
def test_given_allowed_tokens_and_bad_words_when_tokens_are_drafted_then_no_answer_holds_others(
    method: str, tiny_model: TinyModel
) -> None:
    path = tiny_model("llama")
    kinds = [
        SamplingParams(max_tokens=40, seed=3, n=2, allowed_token_ids=tuple(range(4, 12)), bad_words=BAD_WORDS),
        SamplingParams(max_tokens=40, temperature=0.0, allowed_token_ids=(5, 6, 7), bad_words=((5, 5), (6, 6), (7, 6))),
        SamplingParams(max_tokens=40, temperature=0.0, allowed_token_ids=tuple(range(3, 200)), bad_words=((9,),)),
        SamplingParams(max_tokens=40, temperature=0.3, seed=8, bad_words=BAD_WORDS, logprobs=1),
    ]
    requests = [
        replace(request, params=kinds[at % 4], mask=request.mask if at % 4 != 1 else None, watcher=None)
        for at, request in enumerate(requests_of(16))
    ]
    plain = run(load(path, "off"), requests)
    engine = replaying(path, plain, **SMALL) if method == "replay" else load(path, "ngram", **SMALL)
    speculated = run(engine, requests)

    assert_same(speculated, plain)
    assert engine.stats().speculation.accepted > (100 if method == "replay" else 0)
    for request in requests:
        for choice in speculated[request.request_id].choices:
            output, params = choice.token_ids.tolist(), request.params
            assert choice.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            assert set(output) <= set(params.allowed_token_ids or range(257))
            for word in params.bad_words:
                assert all(tuple(output[at : at + len(word)]) != word for at in range(len(output)))


TOKENS = st.integers(4, 9)
RULES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7]),
        "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
        "allowed_token_ids": st.none() | st.lists(TOKENS, min_size=1, max_size=6).map(tuple),
    }
)


@pytest.mark.slow
def test_given_any_allowed_tokens_and_bad_words_when_tokens_are_drafted_then_answers_are_those_without(
    tiny_model: TinyModel,
) -> None:
    path, answers = tiny_model("llama"), dict[str, Completion]()
    without, drafting = load(path, "off"), replaying(path, answers)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(RULES, min_size=1, max_size=6))
    def check(rules: list[dict[str, Any]]) -> None:
        prompts = repeating_prompts(len(rules))
        requests = [
            Request(str(at), as_token_ids(prompt), SamplingParams(max_tokens=16, seed=at, ignore_eos=True, **each))
            for at, (prompt, each) in enumerate(zip(prompts, rules, strict=True))
        ]
        answers.clear()
        answers.update(run(without, requests))
        found = run(drafting, requests)
        assert_same(found, answers)
        assert {name: c.error for name, c in found.items()} == {name: c.error for name, c in answers.items()}
        for request in requests:
            output = found[request.request_id].choices[0].token_ids.tolist()
            assert set(output) <= set(request.params.allowed_token_ids or range(257))
            for word in request.params.bad_words:
                assert all(tuple(output[at : at + len(word)]) != word for at in range(len(output)))

    check()
    assert drafting.stats().speculation.accepted > 100


@pytest.mark.slow
def test_given_interruptions_when_requests_resume_with_drafts_then_answers_are_those_of_an_unbroken_run(
    tiny_model: TinyModel,
) -> None:
    path, requests = tiny_model("llama"), requests_of()
    plain = run(load(path, "off"), requests)
    done: dict[str, Completion] = {}
    logs: dict[str, tuple[PartialChoice, ...]] = {}
    resumed = 0
    for limit in (5, 9, 4, 1000):
        engine = replaying(path, plain)
        left = [replace(r, partial=logs.get(r.request_id, ())) for r in requests if r.request_id not in done]
        for request in left:
            engine.add(request)
        for _ in range(limit):
            done |= {completion.request_id: completion for completion in engine.step()}
        for request in left:
            if request.request_id not in done:
                known = logs.get(request.request_id, ())
                logs[request.request_id] = joined(known, engine.partial(request, given_of(known)))
    resumed = sum(completion.resumed_tokens for completion in done.values())

    assert resumed > 50
    assert_same(done, plain)


def given_of(known: tuple[PartialChoice, ...]) -> dict[int, int]:
    return {partial.index: len(partial.token_ids) for partial in known}


@pytest.mark.slow
def test_given_a_cancelled_request_when_it_has_drafts_in_flight_then_only_known_tokens_are_returned(
    tiny_model: TinyModel,
) -> None:
    path = tiny_model("llama")
    requests = [Request(str(i), as_token_ids(p), GREEDY) for i, p in enumerate(repeating_prompts(4))]
    plain = run(load(path, "off"), requests)
    engine = replaying(path, plain)
    for request in requests:
        engine.add(request)
    engine.step()
    engine.step()

    # Given a step that is planned and not yet updated, so that there are drafts behind the known tokens,
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None
    assert plan.drafts is not None
    assert (plan.drafts > 0).all()
    before = {choice: ids.tolist() for choice, ids in engine.scheduler.sampled("1")}
    # when one of its requests is cancelled,
    assert engine.cancel("1")
    output = engine._runner.execute(plan)
    engine._ready += engine._end(
        engine.scheduler.update(
            plan, output.token_ids, output.failed, 0.0, output.reasons, output.accepted, output.tainted
        )
    )
    done = {completion.request_id: completion for _ in range(40) for completion in engine.step()}
    # then it has what was known, and the others have their whole answers.
    assert done["1"].choices[0].finish_reason is FinishReason.CANCELLED
    assert done["1"].choices[0].token_ids.tolist() == before[0]
    assert_same({k: v for k, v in done.items() if k != "1"}, {k: v for k, v in plain.items() if k != "1"})
    engine.scheduler.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("ngram", marks=pytest.mark.exhaustive), "auto"])
def test_given_answers_that_repeat_ended_ones_when_ngrams_are_drafted_then_they_are_copied(
    method: str, tiny_model: TinyModel
) -> None:
    path, requests = tiny_model("llama"), requests_of()
    plain = run(load(path, "off"), requests)
    engine = load(path, method)
    run(engine, requests)
    first = engine.stats()
    again = [replace(request, request_id=f"again {request.request_id}") for request in requests]
    second = run(engine, again)

    assert_same({name.removeprefix("again "): c for name, c in second.items()}, plain)
    copied = engine.stats().speculation.accepted - first.speculation.accepted
    if method == "ngram":
        assert copied > 0.3 * first.generated
        assert engine.stats().steps - first.steps < 0.7 * first.steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("llama", "bf16"),
        ("gemma3", "bf16, int8 cache"),
        ("gemma3", "int8"),
        ("llama", "int8 weights"),
        pytest.param("gemma3", "bf16", marks=pytest.mark.exhaustive),
        pytest.param("llama", "bf16, int8 cache", marks=pytest.mark.exhaustive),
        pytest.param("llama", "int8", marks=pytest.mark.exhaustive),
        pytest.param("gemma3", "int8 weights", marks=pytest.mark.exhaustive),
    ],
)
def test_given_native_kernels_when_tokens_are_drafted_then_answers_are_the_same_at_any_precision(
    family: str, precision: str, tiny_model: TinyModel
) -> None:
    path, requests = tiny_model(family), requests_of(14)
    how = {"attention": "native", **PRECISIONS[precision]}
    plain = run(load(path, "off", **how), requests)
    engine = replaying(path, plain, **how)
    speculated = run(engine, requests)

    assert engine.stats().speculation.accepted > 100

    assert_same(speculated, plain)


def with_draft(path: Path, draft: Path, **changes: Any) -> Engine:
    return load(path, "off", speculation=SpeculationConfig("draft", str(draft), longest=5), **changes)


@pytest.mark.parametrize(
    ("family", "attention"),
    [pytest.param("llama", "native", marks=pytest.mark.exhaustive), ("llama", "paged-sdpa"), ("gemma3", "native")],
)
@pytest.mark.slow
def test_given_the_model_itself_as_its_draft_then_nearly_all_drafts_are_accepted_sampled_ones_too(
    family: str, attention: str, tiny_model: TinyModel
) -> None:
    path = tiny_model(family)
    requests = [r for r in requests_of() if r.mask is None and not r.params.logit_bias and r.params.min_tokens == 0]
    requests = [r for r in requests if r.params.repetition_penalty == 1]
    plain = run(load(path, "off", attention=attention), requests)
    engine = with_draft(path, path, attention=attention)

    assert_same(run(engine, requests), plain)
    stats = engine.stats().speculation
    assert stats.accepted > 200
    # Drafts behind an answer's end are rejected; all others are what the model generates.
    source = stats.sources["draft"]
    assert source.accepted[0] > 0.97 * source.drafted[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "family"),
    [("llama", "gemma3"), ("gemma3", "llama"), ("llama", "llama"), ("gemma3", "gemma3")],
)
@pytest.mark.exhaustive
def test_given_a_draft_model_when_there_is_little_room_then_answers_are_those_without(
    family: str, draft: str, tiny_model: TinyModel
) -> None:
    path, requests = tiny_model(family), requests_of()
    plain = run(load(path, "off"), requests)
    engine = with_draft(path, tiny_model(draft), **SMALL)
    done: dict[str, Completion] = {}
    for request in requests[0::3] + requests[1::3]:
        engine.add(request)
    for _ in range(14):
        done |= {completion.request_id: completion for completion in engine.step()}
    assert engine.cancel(requests[0].request_id) or requests[0].request_id in done
    done |= run(engine, [replace(urgent, priority=0) for urgent in requests[2::3]])

    first = requests[0].request_id
    assert_same({k: v for k, v in done.items() if k != first}, {k: v for k, v in plain.items() if k != first})
    stats = engine.stats()
    assert stats.recomputed + stats.cached > 0
    assert stats.speculation.drafted > 100
    if family == draft:
        assert stats.speculation.accepted > 0.3 * stats.speculation.drafted


def test_given_drafts_that_are_turned_off_and_on_again_then_answers_are_those_without(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    requests = [Request(str(i), as_token_ids(prompt), GREEDY) for i, prompt in enumerate(repeating_prompts(6))]
    plain = run(load(path, "off"), requests)
    engine = with_draft(path, path)
    for request in requests:
        engine.add(request)
    done: dict[str, Completion] = {}
    drafted = [0]
    for enabled in (True, False, True):
        assert engine.set_drafting(enabled=enabled)
        for _ in range(4):
            done |= {completion.request_id: completion for completion in engine.step()}
        drafted.append(engine.stats().speculation.drafted)
    done |= run(engine, [])
    assert_same(done, plain)
    assert drafted[0] < drafted[1] == drafted[2] < drafted[3]


def test_given_a_draft_model_of_another_vocabulary_then_it_is_refused_by_name(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model("llama"), other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    with pytest.raises(UnsupportedModel, match=r"other has a vocabulary of 300 tokens, but the model has 257"):
        with_draft(tiny_model("llama"), other)
    with pytest.raises(UnsupportedModel, match="needs one; name it"):
        load(tiny_model("llama"), "draft")


def test_given_a_model_that_keeps_no_whole_sequence_then_a_draft_model_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(UnsupportedModel, match="all layers of the model have sliding windows"):
        with_draft(tiny_model("mistral"), tiny_model("llama"))
