"""Several requests that one completion answers: the choices are those of the same requests, each by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.errors import ContextLengthExceeded, EngineError, RequestRefused
from engine.groups import GroupEngine
from engine.plan import StepOutput, StepPlan
from engine.request import Completion, FinishReason

CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=128,
    cache=CacheConfig(block_size=16, num_blocks=64),
    schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64),
)
PROMPTS = [as_token_ids([3 + at % 40 for at in range(size)]) for size in (20, 5, 33, 12, 7)]


@pytest.fixture
def make(tiny_model: Callable[[str], Path]) -> Callable[..., GroupEngine]:
    def make(**cache: Any) -> GroupEngine:
        return GroupEngine(Engine.load(tiny_model("llama"), replace(CONFIG, cache=replace(CONFIG.cache, **cache))))

    return make


def group(name: str = "g", prompts: list[Any] = PROMPTS, **params: Any) -> Request:
    first, *more = alone(prompts, **params)
    return replace(first, request_id=name, more=tuple(more))


def alone(prompts: list[Any] = PROMPTS, **params: Any) -> list[Request]:
    """Requests of different seeds and lengths."""
    given = {"temperature": 0.9, "ignore_eos": True, "n": 2, "logprobs": 1} | params
    return [
        Request(str(number), prompt, SamplingParams(**{"max_tokens": 10 + number, "seed": number} | given))
        for number, prompt in enumerate(prompts)
    ]


def complete(engine: GroupEngine, *requests: Request) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    done: dict[str, Completion] = {}
    while engine.has_work:
        for completion in engine.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
    return done


def tokens(completion: Completion) -> list[list[int]]:
    return [choice.token_ids.tolist() for choice in completion.choices]


def test_choices_are_those_of_the_members_alone(make: Callable[..., GroupEngine]) -> None:
    expected = complete(make(), *alone())
    found = complete(make(), group(), replace(group("other"), priority=1))
    assert sorted(found) == ["g", "other"]
    for completion in found.values():
        assert [choice.index for choice in completion.choices] == list(range(10))
        assert tokens(completion) == [ids for number in range(5) for ids in tokens(expected[str(number)])]
        assert completion.prompt_tokens == sum(map(len, PROMPTS))
        assert completion.generated_tokens == 2 * sum(10 + number for number in range(5))
        assert len(completion.members) == 5


@pytest.mark.slow
def test_members_that_preempt_each_other_give_the_same_answers(make: Callable[..., GroupEngine]) -> None:
    whole = complete(make(), group(max_tokens=60))["g"]
    engine = make(num_blocks=8, prefix_caching=False)
    request = group(max_tokens=60)
    members = tuple(replace(member, expected_tokens=1) for member in request.more)
    request = replace(request, expected_tokens=1, more=members)
    engine.add(request)
    ended: list[Completion] = []
    while not ended:
        ended = engine.step()
        growing = engine.growing().get("g", ())  # a preempted choice has tokens, too
        assert set(growing) >= {one.index for one in engine.partial(request) if one.finish_reason is None}
    (found,) = ended
    assert engine.stats().preemptions
    assert found.preemptions == engine.stats().preemptions
    assert tokens(found) == tokens(whole)


def test_each_prompt_is_scored(make: Callable[..., GroupEngine]) -> None:
    params = {"max_tokens": 0, "n": 1, "logprobs": None, "prompt_logprobs": 2}
    expected = complete(make(), *alone(**params))
    found = complete(make(), group(**params))["g"]
    for number, member in enumerate(found.members):
        scored, single = member.prompt_logprobs, expected[str(number)].prompt_logprobs
        assert scored is not None
        assert single is not None
        np.testing.assert_allclose(scored.chosen, single.chosen, atol=1e-5)


@pytest.mark.parametrize("steps", [2, 9, 16, 22])
def test_it_goes_on_from_its_logged_tokens(make: Callable[..., GroupEngine], steps: int) -> None:
    whole = complete(make(), group())["g"]
    engine = make()
    engine.add(group())
    for _ in range(steps):
        engine.step()
    known = engine.partial(group())
    assert known
    again = complete(make(), replace(group(), partial=known))["g"]
    assert tokens(again) == tokens(whole)
    assert again.resumed_tokens == sum(len(choice.token_ids) for choice in known)
    given = {choice.index: len(choice.token_ids) for choice in known}
    assert not [choice for choice in engine.partial(group(), given) if len(choice.token_ids)]


def test_members_that_wait_are_not_asked_for_tokens(
    make: Callable[..., GroupEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a request with more prompts than rows, when its new tokens are asked for, then no waiting prompt is."""
    engine, asked = make(), []
    partial = Engine.partial

    def counted(engine: Engine, request: Request, *more: Any) -> Any:
        asked.append(request.request_id)
        return partial(engine, request, *more)

    monkeypatch.setattr(Engine, "partial", counted)
    request = group(prompts=PROMPTS * 10)
    engine.add(request)
    for _ in range(8):
        engine.step()
        asked.clear()
        new = engine.partial(request, {}, engine.growing()["g"])
        assert len(asked) <= CONFIG.schedule.max_num_seqs
    assert new


def test_a_choice_is_cancelled_by_its_index(make: Callable[..., GroupEngine]) -> None:
    engine = make()
    engine.add(group())
    while not engine.partial(group()):
        engine.step()
    assert engine.cancel("g", 3)
    assert not engine.cancel("g", 10)
    reasons = [choice.finish_reason for choice in complete(engine)["g"].choices]
    assert reasons == [FinishReason.CANCELLED if index == 3 else FinishReason.LENGTH for index in range(10)]


def test_when_it_is_cancelled_its_id_is_free_again(make: Callable[..., GroupEngine]) -> None:
    engine = make()
    engine.add(group())
    with pytest.raises(RequestRefused, match="already running"):
        engine.add(group())
    engine.step()
    assert engine.cancel("g")
    engine.add(group())
    ended: list[Completion] = []
    while engine.has_work:
        ended += engine.step()
    reasons = [{choice.finish_reason for choice in completion.choices} for completion in ended]
    assert reasons == [{FinishReason.CANCELLED}, {FinishReason.LENGTH}]
    assert engine.num_running == engine.num_waiting == 0


@pytest.mark.parametrize(
    ("third", "error"),
    [(list(range(3, 126)), ContextLengthExceeded), ([100_000], RequestRefused)],
)
def test_a_member_that_is_refused_is_named_and_no_other_is_queued(
    make: Callable[..., GroupEngine], third: list[int], error: type[Exception]
) -> None:
    engine = make()
    with pytest.raises(error, match=r"^prompt\[2\]: "):
        engine.add(group(prompts=[*PROMPTS[:2], as_token_ids(third), *PROMPTS[3:]]))
    assert not complete(engine)
    assert tokens(complete(engine, group())["g"])


@pytest.mark.slow
def test_a_member_that_fails_fails_the_request_at_once(
    make: Callable[..., GroupEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    inner: Any = engine.engine
    whole = tokens(complete(make(), group())["g"])
    engine.add(group())
    for _ in range(4):
        engine.step()
    execute = inner._runner.execute

    def fail(plan: StepPlan) -> StepOutput:
        raise RuntimeError("broken")

    monkeypatch.setattr(inner._runner, "execute", fail)
    with pytest.raises(EngineError):
        engine.step()
    (failed,) = engine.take_ended()
    assert {choice.finish_reason for choice in failed.choices} == {FinishReason.ERROR}
    assert failed.error is not None
    assert not engine.has_work
    monkeypatch.setattr(inner._runner, "execute", execute)
    assert tokens(complete(engine, group())["g"]) == whole


def test_it_is_late_as_a_whole(make: Callable[..., GroupEngine]) -> None:
    engine = make()
    late = complete(engine, replace(group(), deadline=engine.clock() - 1.0))["g"]
    assert {choice.finish_reason for choice in late.choices} == {FinishReason.TIMEOUT}


def test_an_engine_alone_refuses_it(make: Callable[..., GroupEngine]) -> None:
    with pytest.raises(RequestRefused, match="give it to a GroupEngine"):
        make().engine.add(group())
