"""Members that are only scored share sequences: the numbers are those of scoring each member by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.errors import RequestRefused
from engine.groups import GroupEngine
from engine.request import Completion, FinishReason
from engine.shared_scores import share_scores

CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=128,
    cache=CacheConfig(block_size=4, num_blocks=64),
    schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=32),
)
PROMPT = [3 + at % 40 for at in range(21)]
ENDS = [[5], [5, 6, 7], [9] * 6, [9] * 6, [5, 6], [11, 12], [5, 8]]


def scored(*parts: tuple[list[int], list[list[int]]], name: str = "g", **params: Any) -> Request:
    """Each prompt with each of its ends."""
    first, *more = [
        Request(
            name,
            as_token_ids([*prompt, *end]),
            SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=len(prompt), **params),
        )
        for prompt, ends in parts
        for end in ends
    ]
    return replace(first, more=tuple(more))


def complete(engine: GroupEngine, *requests: Request) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {one.request_id: one for one in engine.step()}
    return done


def test_a_leaf_is_a_sequence_and_each_token_is_read_once() -> None:
    # Given ends of which the first tokens make a tree
    shared = share_scores(scored((PROMPT, ENDS), (PROMPT[1:], [[5], [6]])).members)
    assert shared is not None
    # Then the paths to [5, 6], five times 9 and [11] are sequences, and the other prompt by itself
    tokens = [one.prompt_token_ids.tolist() for one in shared.requests]
    assert tokens == [[*PROMPT, 5, 6], [*PROMPT, 9, 9, 9, 9, 9], [*PROMPT, 11], PROMPT[1:]]
    targets = [one.params.prompt_targets for one in shared.requests]
    assert targets[0] == ((21, 5), (22, 6), (23, 7), (21, 9), (21, 11), (22, 8))
    assert targets[1:] == [tuple((at, 9) for at in range(22, 27)), ((22, 12),), ((20, 5), (20, 6))]
    assert shared.made_of == (1, 2, 5, 7)


@pytest.mark.parametrize("params", [{"n": 2}, {"prompt_logprobs": 1}, {"prompt_logprobs_start": 0}, {"max_tokens": 1}])
def test_members_with_more_to_compute_do_not_share(params: dict[str, Any]) -> None:
    request = scored((PROMPT, [[5], [6]]))
    (second,) = request.more
    assert share_scores(request.members) is not None
    assert share_scores((request, replace(second, params=replace(second.params, **params)))) is None


@pytest.mark.parametrize("num_blocks", [64, 20])
def test_scores_are_those_of_each_member_by_itself(tiny_model: Callable[[str], Path], num_blocks: int) -> None:
    # Given answers beside them, which need the blocks where there are few
    config = replace(CONFIG, cache=replace(CONFIG.cache, num_blocks=num_blocks))
    talk = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    talks = [Request(f"talk-{at}", as_token_ids(PROMPT[at:]), talk, expected_tokens=1) for at in range(4)]
    found = []
    for has_targets in (True, False):
        engine = GroupEngine(Engine.load(tiny_model("llama"), config), has_targets=has_targets)
        requests = scored((PROMPT, ENDS), (PROMPT[:7], ENDS), name="a"), scored((PROMPT[2:], ENDS), name="b")
        found.append(complete(engine, *talks[:2], *requests, *talks[2:]))
        if num_blocks == 20:
            assert engine.stats().preemptions > 0
    shared, alone = found
    for name in ("a", "b"):
        assert shared[name].prompt_tokens == alone[name].prompt_tokens
        assert [choice.index for choice in shared[name].choices] == [choice.index for choice in alone[name].choices]
        assert {choice.finish_reason for choice in shared[name].choices} == {FinishReason.LENGTH}
        for one, other in zip(shared[name].members, alone[name].members, strict=True):
            assert one.prompt_logprobs is not None
            assert other.prompt_logprobs is not None
            np.testing.assert_allclose(one.prompt_logprobs.chosen, other.prompt_logprobs.chosen, atol=1e-5)
            assert np.isfinite(one.prompt_logprobs.chosen[-1])


def test_ends_of_one_token_are_read_behind_the_prompt(tiny_model: Callable[[str], Path]) -> None:
    engine = GroupEngine(Engine.load(tiny_model("llama"), CONFIG))
    done = complete(engine, scored((PROMPT, [[at] for at in range(5, 15)])))["g"]
    assert engine.stats().prompt == len(PROMPT) == done.prompt_tokens - done.cached_tokens
    assert done.prompt_tokens == 10 * (len(PROMPT) + 1)
    # A prompt that the cache has is computed from its last block border on
    complete(engine, scored((PROMPT, [[5], [6]])))
    assert engine.stats().prompt == len(PROMPT) + 1


def test_scores_are_no_tokens(tiny_model: Callable[[str], Path]) -> None:
    slow = replace(CONFIG, schedule=ScheduleConfig(max_num_seqs=2, max_num_batched_tokens=4))
    engine = GroupEngine(Engine.load(tiny_model("llama"), slow))
    engine.add(scored((PROMPT, ENDS)))
    ended = engine.step()
    assert not ended
    assert engine.num_running
    assert not engine.growing()


def test_a_cancelled_request_and_one_that_fails_end_as_a_whole(tiny_model: Callable[[str], Path]) -> None:
    engine = GroupEngine(Engine.load(tiny_model("llama"), CONFIG))
    request = scored((PROMPT, ENDS))
    engine.add(request)
    assert not engine.cancel("g", 1)
    assert [choice.index for choice in engine.partial(request)] == list(range(len(ENDS)))
    assert engine.cancel("g")
    (done,) = engine.take_ended()
    assert [choice.finish_reason for choice in done.choices] == [FinishReason.CANCELLED] * len(ENDS)
    engine.add(replace(request, deadline=engine.clock() - 1))
    ended = [one for _ in range(3) for one in engine.step()]
    assert [choice.finish_reason for choice in ended[0].choices] == [FinishReason.TIMEOUT] * len(ENDS)
    assert not engine.has_work
    with pytest.raises(RequestRefused, match="prompt_targets names token 99999"):
        engine.add(scored((PROMPT, [*ENDS[:5], [99_999, 12, 13]])))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"prompt_targets": ((1, 5),), "max_tokens": 1}, "with max_tokens 0"),
        ({"prompt_targets": ((1, 5),), "prompt_logprobs": 0}, "without prompt_logprobs"),
        ({"prompt_targets": ((0, 5),)}, "index of 1 or more"),
        ({"prompt_targets": ((5, 5),)}, "beyond its 4 tokens"),
        ({"prompt_targets": ((4, 99_999),)}, "prompt_targets names token 99999"),
    ],
)
def test_targets_that_cannot_be_are_refused(
    params: dict[str, Any], message: str, tiny_model: Callable[[str], Path]
) -> None:
    engine = Engine.load(tiny_model("llama"), CONFIG)
    with pytest.raises(RequestRefused, match=message):
        engine.add(Request("r", as_token_ids([5, 6, 7, 8]), SamplingParams(**{"max_tokens": 0} | params)))
