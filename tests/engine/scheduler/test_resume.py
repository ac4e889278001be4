"""Requests that are interrupted, again and again, and go on elsewhere: the answers are those of an unbroken run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import Engine, FinishReason, PartialChoice, Request, SamplingParams, TokenLogprobs, as_token_ids
from engine.errors import RequestRefused
from engine.request import Completion
from tests.engine.oracle import Setting, make_prompts

TinyModel = Callable[[str], Path]

BAD_WORDS = ((4,), *((a, b) for a in range(5, 12) for b in range(5, 12) if (a + b) % 3 == 0), (5, 11, 9), (9, 9, 9))
KINDS = [
    SamplingParams(max_tokens=24, temperature=0.0),
    SamplingParams(max_tokens=24, temperature=0.9, seed=11, logprobs=3),
    SamplingParams(max_tokens=24, temperature=1.3, top_p=0.8, seed=-5, n=3, logprobs=0),
    SamplingParams(max_tokens=24, temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.6, seed=4, n=2),
    SamplingParams(max_tokens=24, temperature=0.0, presence_penalty=0.7, min_tokens=9, logit_bias={9: 3.0}),
    SamplingParams(max_tokens=24, temperature=1.0, seed=8, stop_token_ids=tuple(range(40)), n=4, logprobs=1),
    SamplingParams(max_tokens=24, seed=3, n=3, allowed_token_ids=tuple(range(4, 12)), bad_words=BAD_WORDS),
]


class PairWatcher:
    """Ends a choice once two of its tokens in a row add up to a multiple of 17: it depends on every token."""

    def __init__(self) -> None:
        self._last = 0

    def push(self, token_id: int) -> bool:
        done = (self._last + token_id) % 17 == 0 and self._last != 0
        self._last = token_id
        return done


class OddMask:
    """Allows tokens by the parity of how many came before."""

    def __init__(self) -> None:
        self._count = 0

    def fill(self, bitmask: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        bitmask[:] = 0x55555555 if self._count % 2 else -0x55555556

    def advance(self, token_id: int) -> None:
        self._count += 1


def requests_of() -> list[Request]:
    prompts = make_prompts(seed=5, count=24, vocab_size=257, shared=20, longest=60)
    made = []
    for i, prompt in enumerate(prompts):
        request = Request(str(i), as_token_ids(prompt), KINDS[i % len(KINDS)])
        if i % 4 == 1:
            request = replace(request, watcher=lambda _: PairWatcher())
        if i % 4 == 2:
            request = replace(request, mask=lambda _: OddMask())
        made.append(request)
    return made


def load(path: Path) -> Engine:
    return Engine.load(path, Setting(8, 64, 16, True).config(max_model_len=128))


def joined(known: tuple[PartialChoice, ...], new: tuple[PartialChoice, ...]) -> tuple[PartialChoice, ...]:
    """The known tokens of a request, joined with the new ones."""
    found = {partial.index: partial for partial in known}
    for more in new:
        old = found.get(more.index)
        if old is not None:
            logprobs = None
            if more.logprobs is not None and old.logprobs is not None:
                pairs = [(getattr(old.logprobs, k), getattr(more.logprobs, k)) for k in ("chosen", "top_ids", "top")]
                logprobs = TokenLogprobs(*(np.concatenate(pair) for pair in pairs))
            more = replace(more, token_ids=np.concatenate([old.token_ids, more.token_ids]), logprobs=logprobs)
        found[more.index] = more
    return tuple(found.values())


def run_with_interruptions(path: Path, requests: list[Request], steps: list[int]) -> tuple[dict[str, Completion], int]:
    """Run, and drop the engine after each of these many steps; logs are stored as deltas, one every third step."""
    done: dict[str, Completion] = {}
    logs: dict[str, tuple[PartialChoice, ...]] = {}
    for limit in [*steps, 10_000]:
        engine = load(path)
        left = [replace(r, partial=logs.get(r.request_id, ())) for r in requests if r.request_id not in done]
        for request in left:
            engine.add(request)
        for step in range(limit):
            if not engine.has_work:
                break
            done |= {completion.request_id: completion for completion in engine.step()}
            if step % 3 == 2:
                for request in left:
                    if request.request_id not in done:
                        known = logs.get(request.request_id, ())
                        given = {partial.index: len(partial.token_ids) for partial in known}
                        logs[request.request_id] = joined(known, engine.partial(request, given))
        engine.scheduler.check_integrity()
    return done, sum(len(partial.token_ids) for known in logs.values() for partial in known)


def visible(completion: Completion) -> list[Any]:
    """The fields of a completion that a user sees and that are exact."""
    choices = []
    for choice in completion.choices:
        fields = [choice.token_ids.tolist(), choice.finish_reason, choice.stop_token_id]
        if choice.logprobs is not None:
            fields += [len(choice.logprobs.chosen), choice.logprobs.top_ids.tolist()]
        choices.append(fields)
    return [choices, completion.generated_tokens, completion.prompt_tokens]


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_given_interruptions_when_requests_go_on_then_answers_are_those_of_an_unbroken_run(
    family: str, tiny_model: TinyModel
) -> None:
    path, requests = tiny_model(family), requests_of()
    whole = {completion.request_id: completion for completion in load(path).run(requests)}
    assert {choice.finish_reason for c in whole.values() for choice in c.choices} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }

    chance = random.Random(1)
    done, logged = run_with_interruptions(path, requests, [chance.randrange(4, 30) for _ in range(5)])

    assert logged > 100
    assert sum(completion.resumed_tokens for completion in done.values()) > 50
    assert {name: visible(c) for name, c in done.items()} == {name: visible(c) for name, c in whole.items()}
    for name, completion in whole.items():
        for ours, theirs in zip(done[name].choices, completion.choices, strict=True):
            if ours.logprobs is not None and theirs.logprobs is not None:
                np.testing.assert_allclose(ours.logprobs.chosen, theirs.logprobs.chosen, atol=1e-4)
                np.testing.assert_allclose(ours.logprobs.top, theirs.logprobs.top, atol=1e-4)


def test_given_a_whole_answer_when_resumed_then_nothing_is_computed(tiny_model: TinyModel) -> None:
    engine = load(tiny_model("llama"))
    params = SamplingParams(max_tokens=3, n=2)
    partial = (
        PartialChoice(0, as_token_ids([5, 6, 7])),
        PartialChoice(1, as_token_ids([8]), finish_reason=FinishReason.STOP, stop_token_id=2),
    )
    (completion,) = engine.run([Request("a", as_token_ids([1, 2]), params, partial=partial)])

    assert engine.stats().computed == 0
    assert [c.finish_reason for c in completion.choices] == [FinishReason.LENGTH, FinishReason.STOP]
    assert (completion.generated_tokens, completion.resumed_tokens) == (5, 5)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("partial", "why"),
    [
        (PartialChoice(1, as_token_ids([5])), "one of the 1 choices"),
        (PartialChoice(0, as_token_ids([5] * 9)), "more than max_tokens"),
        (PartialChoice(0, as_token_ids([999])), "leaves the vocabulary"),
        (PartialChoice(0, np.array([5], dtype=np.int64)), "must be int32"),
        (PartialChoice(0, as_token_ids([5]), finish_reason=FinishReason.ERROR), "not an answer"),
        (PartialChoice(0, as_token_ids([5]), stop_token_id=2), "did not end with one"),
    ],
)
def test_given_an_invalid_partial_choice_then_the_request_is_refused(
    partial: PartialChoice, why: str, tiny_model: TinyModel
) -> None:
    engine = load(tiny_model("llama"))
    with pytest.raises(RequestRefused, match=why):
        engine.add(Request("a", as_token_ids([1, 2]), SamplingParams(max_tokens=8), partial=(partial,)))
    assert not engine.has_work


def test_given_no_logprobs_when_they_are_requested_then_resumption_is_refused(tiny_model: TinyModel) -> None:
    engine = load(tiny_model("llama"))
    partial = (PartialChoice(0, as_token_ids([5])),)
    with pytest.raises(RequestRefused, match="must go along 1 tokens, 2 each"):
        engine.add(Request("a", as_token_ids([1]), SamplingParams(max_tokens=8, logprobs=2), partial=partial))


def test_given_tokens_that_came_with_the_request_then_no_first_token_is_timed_but_the_wait_for_the_next_one_is(
    tiny_model: TinyModel,
) -> None:
    engine = load(tiny_model("llama"))
    params = SamplingParams(max_tokens=4, temperature=0.0, min_tokens=4)
    partial = (PartialChoice(0, as_token_ids([5])),)
    list(engine.run([Request("resumed", as_token_ids([1, 2]), params, partial=partial)]))
    (timed,) = [one for one in engine.classes() if sum(one.between_tokens.counts)]
    assert (sum(timed.first_token.counts), sum(timed.between_tokens.counts)) == (0, 3)
    list(engine.run([Request("whole", as_token_ids([1, 2]), params)]))
    (timed,) = [one for one in engine.classes() if sum(one.between_tokens.counts)]
    assert (sum(timed.first_token.counts), sum(timed.between_tokens.counts)) == (1, 6)
