"""Hostile requests, and requests with broken masks: each fails alone, with a reason, and no other request does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine import Completion, Engine, EngineConfig, FinishReason, Request, SamplingParams, as_token_ids
from engine.config import CacheConfig, ScheduleConfig
from engine.errors import RequestRefused
from engine.models.base import ModelSpec
from engine.plan import CacheGroup, StepOutput, StepPlan
from engine.runner.null_runner import NullRunner
from tests.engine.oracle import Setting, make_prompts

VOCAB = 257
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(seed=5, count=6, vocab_size=VOCAB, shared=20, longest=40)


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def complete(engine: Engine, *requests: Request) -> dict[str, Completion]:
    done = {completion.request_id: completion for completion in engine.run(requests)}
    engine.scheduler.check_integrity()
    return done


def load(path: Path, **changes: Any) -> Engine:
    return Engine.load(path, Setting(8, 64, 16, True, **changes).config(max_model_len=96))


class AllowAllMask:
    """A mask that allows all, until it meets its end.

    `fails_in` says where it raises once `after` tokens were taken.
    """

    def __init__(self, fails_in: str, after: int) -> None:
        self.fails_in, self.left = fails_in, after
        self._act("make")

    def _act(self, name: str) -> None:
        if name == self.fails_in and self.left <= 0:
            raise RuntimeError("the grammar has no such state")

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        self._act("fill")
        bitmask.fill(-1)

    def advance(self, token_id: int) -> None:
        self.left -= 1
        self._act("advance")


class AllowNoneMask:
    """A mask that allows nothing."""

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        pass

    def advance(self, token_id: int) -> None:
        raise AssertionError("no token was allowed")


@pytest.mark.parametrize("batch", [8, 2])
@pytest.mark.parametrize(("fails_in", "after"), [("make", 0), ("fill", 0), ("fill", 3), ("advance", 1), ("advance", 4)])
def test_a_mask_that_raises_costs_its_own_row(
    fails_in: str, after: int, batch: int, llama: Path, prompts: list[list[int]]
) -> None:
    # Given requests side by side, when the mask of one raises, early or late
    plain = [Request(str(i), as_token_ids(prompt), PARAMS) for i, prompt in enumerate(prompts)]
    want = complete(load(llama), *plain)
    broken = Request("bad", as_token_ids(prompts[0]), PARAMS, mask=lambda _: AllowAllMask(fails_in, after))
    engine = Engine.load(llama, Setting(batch, 64, 16, True).config(max_model_len=96))
    done = complete(engine, *plain[:2], broken, *plain[2:])
    # then it alone ends in an error that says so, with the tokens from before, and its row serves others
    bad = done.pop("bad")
    assert bad.choices[0].finish_reason is FinishReason.ERROR
    assert bad.error == "token mask failed: RuntimeError: the grammar has no such state"
    good = after - (fails_in == "advance")
    assert bad.choices[0].token_ids.tolist() == want["0"].choices[0].token_ids[: max(good, 0)].tolist()
    assert {name: c.choices[0].token_ids.tolist() for name, c in done.items()} == {
        name: c.choices[0].token_ids.tolist() for name, c in want.items()
    }


def test_a_choice_whose_mask_can_not_follow_it_after_preemption_fails_alone(
    llama: Path, prompts: list[list[int]]
) -> None:
    # Given a pool so small that choices are preempted, and masks that can't replay their tokens
    class FreshOnlyMask(AllowAllMask):
        def __init__(self) -> None:
            super().__init__("never", 0)
            self.filled = False

        def fill(self, bitmask: NDArray[np.int32]) -> None:
            self.filled = True
            super().fill(bitmask)

        def advance(self, token_id: int) -> None:
            if not self.filled:
                raise RuntimeError("begun in the middle")

    params = SamplingParams(max_tokens=30, temperature=0.8, ignore_eos=True, n=2)
    requests = [
        Request(str(i), as_token_ids(p), params, expected_tokens=1, mask=(lambda _: FreshOnlyMask()) if i % 2 else None)
        for i, p in enumerate(prompts)
    ]
    engine = Engine.load(llama, Setting(16, 64, 4, True, num_blocks=30).config(max_model_len=96))
    done = complete(engine, *requests)
    hit = [c for c in done.values() if c.error is not None]
    assert hit
    assert all("begun in the middle" in (c.error or "") and int(c.request_id) % 2 and c.preemptions for c in hit)
    assert all(len(choice.token_ids) == 30 for i in (0, 2, 4) for choice in done[str(i)].choices)


@pytest.mark.parametrize(
    "rules",
    [
        {"mask": lambda _: AllowNoneMask()},
        {"params": SamplingParams(max_tokens=4, logit_bias=dict.fromkeys(range(VOCAB), float("-inf")))},
        {"params": SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=tuple(range(VOCAB)))},
        {"params": SamplingParams(max_tokens=4, allowed_token_ids=(7,), bad_words=((7,),))},
    ],
)
def test_a_row_without_a_choice_fails_and_its_prefix_stays_cached(
    rules: Mapping[str, Any], llama: Path, prompts: list[list[int]]
) -> None:
    engine, prompt = load(llama), as_token_ids(max(prompts, key=len))
    hopeless = Request("hopeless", prompt, **{"params": PARAMS, **rules})
    done = complete(engine, hopeless)["hopeless"]
    assert done.choices[0].finish_reason is FinishReason.ERROR
    assert (
        done.error == "mask, allowed_token_ids, bad_words, logit_bias, penalties and min_tokens together leave no token"
    )
    # the values were sound, so what was computed for it can still be read
    after = complete(engine, Request("after", prompt, PARAMS))["after"]
    assert after.cached_tokens > 0


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"logprobs": -1}, "logprobs is -1"),
        ({"prompt_logprobs": -2}, "prompt_logprobs is -2"),
        ({"prompt_logprobs_start": -1}, "prompt_logprobs_start is -1"),
        ({"logprobs": VOCAB + 1}, "logprobs is 258, but the vocabulary has 257"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs is 1000000"),
        ({"stop_token_ids": (3, 2**40)}, "stop_token_ids names token 1099511627776"),
        ({"stop_token_ids": (VOCAB,)}, f"stop_token_ids names token {VOCAB}, but the vocabulary ends at"),
        ({"allowed_token_ids": (3, VOCAB)}, f"allowed_token_ids names token {VOCAB}, but the vocabulary ends at"),
        ({"bad_words": ((3,), (4, VOCAB))}, f"bad_words names token {VOCAB}, but the vocabulary ends at"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is ()"),
        ({"bad_words": ((3,), ())}, "bad_words is"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias names token {VOCAB}, but the vocabulary ends at"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids names token -1"),
        ({"logit_bias": {4: 1e39}}, "logit_bias of token 4"),
        ({"frequency_penalty": 1e39}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
    ],
)
def test_what_would_break_a_step_is_refused_before(
    params: Mapping[str, Any], named: str, llama: Path, prompts: list[list[int]]
) -> None:
    engine = load(llama)
    with pytest.raises(RequestRefused, match=named):
        engine.add(Request("bad", as_token_ids(prompts[0]), SamplingParams(**params)))
    assert complete(engine, Request("good", as_token_ids(prompts[0]), PARAMS))["good"].error is None


def test_all_tokens_of_the_vocabulary_can_be_listed_and_stopped_at(llama: Path, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=4, logprobs=VOCAB, prompt_logprobs=VOCAB, stop_token_ids=tuple(range(VOCAB)))
    done = complete(load(llama), Request("all", as_token_ids(prompts[0]), params))["all"]
    assert done.choices[0].finish_reason is FinishReason.STOP
    assert done.choices[0].token_ids.size == 0
    assert done.generated_tokens == 1
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs.top.shape == (len(prompts[0]), VOCAB)
    np.testing.assert_allclose(np.exp(done.prompt_logprobs.top[1:]).sum(axis=1), 1, atol=1e-4)


def test_an_id_can_be_used_again_as_soon_as_it_is_cancelled(llama: Path, prompts: list[list[int]]) -> None:
    # Given a request with log-probabilities that is cancelled while it runs
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, ignore_eos=True)
    want = complete(load(llama), Request("a", as_token_ids(prompts[1]), params))["a"].choices[0]
    engine = load(llama)
    engine.add(Request("a", as_token_ids(prompts[0]), params))
    for _ in range(3):
        engine.step()
    engine.cancel("a")
    # when its id is used again before the next step, then each answer is that of its own request
    engine.add(Request("a", as_token_ids(prompts[1]), params))
    done = []
    while engine.has_work:
        done += engine.step()
    assert [completion.choices[0].finish_reason.value for completion in done] == ["cancelled", "length"]
    first, second = (completion.choices[0] for completion in done)
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert want.logprobs is not None
    assert len(first.logprobs.chosen) == len(first.token_ids) == 3
    assert second.token_ids.tolist() == want.token_ids.tolist()
    np.testing.assert_allclose(second.logprobs.chosen, want.logprobs.chosen, atol=1e-4)


SPEC = ModelSpec("null", 1, 1, 1, 8, 8, 1000, 4096, (None,), (2,), 0, torch.float32)


class InterruptedRunner(NullRunner):
    """Is interrupted, as by Ctrl-C, in its second step."""

    steps = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        self.steps += 1
        if self.steps == 2:
            raise KeyboardInterrupt
        return super().execute(plan)


def test_an_interrupt_passes_through_and_leaves_an_engine_that_works() -> None:
    config = EngineConfig(cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=4))
    engine = Engine(config, SPEC, (CacheGroup((0,), None, 64),), 1000, lambda s: InterruptedRunner(s.rows, 1000))
    engine.add(Request("a", as_token_ids([5] * 20), PARAMS))
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.add(Request("b", as_token_ids([5] * 20), PARAMS))
    done = {completion.request_id: completion for _ in range(20) if engine.has_work for completion in engine.step()}
    assert done["a"].error == "the step failed: KeyboardInterrupt: "
    assert done["b"].error is None
    engine.scheduler.check_integrity()
