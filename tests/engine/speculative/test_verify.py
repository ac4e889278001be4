"""Sampling with drafts: every token comes as often as the target's distribution says, whatever was drafted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.plan import NO_TOKEN
from engine.request import Request, SamplingParams
from engine.sampling.sampler import NON_FINITE, Sampler
from engine.speculative.verify import NO_DRAFT_ID, Drafted, Verifier
from tests.engine.sampling.test_sampler_distribution import EOS, OUTPUT, PROMPT, logits_of, p_value, reference

ROWS = 2048
CALLS = 50  # 102,400 draws
VOCAB = 24
KNOWN = np.concatenate((PROMPT, OUTPUT))
NUM_DRAFTS = 2
LEAST = 1e-4
"""Of p-values; some twenty are compared with it, so that a right rule meets it in one of 500 choices of the seeds."""

SETTINGS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=2.5),
    "top_k": SamplingParams(top_k=4),
    "top_p": SamplingParams(temperature=1.3, top_p=0.7),
    "min_p": SamplingParams(min_p=0.1),
    "all filters": SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.4, logit_bias={7: 2}),
    "held-back end": SamplingParams(min_tokens=len(OUTPUT) + 2, max_tokens=50),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Draws = Callable[[Sampler, Drafted, torch.Tensor], tuple[NDArray[np.int32], NDArray[np.int32]]]


def exact_rule(sampler: Sampler, drafted: Drafted, lines: torch.Tensor) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Accepted drafts and the tokens behind them, as the engine decides."""
    out = Verifier(sampler, lambda hidden: hidden, None, max_lines=1 << 20).verify(lines, drafted)
    assert not out.failed.any()
    return out.accepted, out.token_ids


def counts_of(params: SamplingParams, drafts: list[int], rule: Draws) -> list[NDArray[np.int64]]:
    """How often each token came first, and how often each came second where the first draft had stayed."""
    sampler = Sampler(ROWS, VOCAB, (EOS,), torch.device("cpu"))
    rows = np.arange(ROWS, dtype=np.int32)
    lines = torch.from_numpy(np.concatenate([logits_of(VOCAB, seed) for seed in range(NUM_DRAFTS + 1)]))
    lines = lines.reshape(NUM_DRAFTS + 1, VOCAB).repeat(ROWS, 1)
    requests = [
        Request(str(row), PROMPT, replace(params, seed=9000 + row, max_tokens=params.max_tokens + 4000))
        for row in range(ROWS)
    ]
    counts = [np.zeros(VOCAB, dtype=np.int64) for _ in range(2)]
    special = params.repetition_penalty != 1
    for call in range(CALLS):
        if call == 0 or special:
            for row, request in enumerate(requests):
                sampler.assign(row, request, 0, KNOWN, len(PROMPT))
        drafted = Drafted(
            rows,
            np.arange(ROWS) * (NUM_DRAFTS + 1),
            np.tile(np.array(drafts, dtype=np.int32), (ROWS, 1)),
            np.full(ROWS, NUM_DRAFTS, dtype=np.int32),
            np.full(ROWS, len(KNOWN) + call * (NUM_DRAFTS + 1), dtype=np.int32),
            np.full(ROWS, len(OUTPUT), dtype=np.int32),
        )
        accepted, tokens = rule(sampler, drafted, lines.clone())
        first = np.where(accepted > 0, drafts[0], tokens)
        second = np.where(accepted > 1, drafts[1], tokens)[accepted > 0]
        for position, seen in enumerate((first, second)):
            counts[position] += np.bincount(seen, minlength=VOCAB)
    return counts


def likely_and_unlikely(params: SamplingParams) -> list[list[int]]:
    """Drafts that often stay, and drafts that seldom do (or never, where a filter bans them)."""
    first = reference(logits_of(VOCAB, 0), params, PROMPT.tolist(), OUTPUT.tolist())
    order = np.argsort(first)
    second = reference(logits_of(VOCAB, 1), params, PROMPT.tolist(), [*OUTPUT.tolist(), int(order[-1])])
    return [[int(order[-1]), int(np.argsort(second)[-1])], [int(order[-3]), int(np.argsort(second)[-2])]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.exhaustive if each == "penalties" else ()) for each in SETTINGS]
)
def test_given_any_settings_when_drafts_are_checked_then_tokens_come_as_often_as_the_target_says(name: str) -> None:
    params = SETTINGS[name]
    likely, unlikely = likely_and_unlikely(params)
    for drafts in [likely, unlikely] if name == "plain" else [unlikely if name in ("hot", "top_p") else likely]:
        first, second = counts_of(params, drafts, exact_rule)
        context = OUTPUT.tolist()
        assert first.sum() == ROWS * CALLS
        assert p_value(first, reference(logits_of(VOCAB, 0), params, PROMPT.tolist(), context)) > LEAST
        assert second.sum() == first[drafts[0]] > 0
        assert p_value(second, reference(logits_of(VOCAB, 1), params, PROMPT.tolist(), [*context, drafts[0]])) > LEAST


@pytest.mark.slow
def test_given_a_rule_that_does_not_resample_then_the_same_test_sees_it() -> None:
    # Given a rule that accepts rightly, but draws from the whole distribution where it rejects,
    def broken(sampler: Sampler, drafted: Drafted, lines: torch.Tensor) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        accepted, tokens = exact_rule(sampler, drafted, lines.clone())
        _, others = exact_rule(sampler, replace(drafted, at=drafted.at + 100_000), lines)
        return accepted, np.where(accepted == 0, others, tokens)

    params = SETTINGS["plain"]
    drafts = likely_and_unlikely(params)[0]
    first, _ = counts_of(params, drafts, broken)
    # then its drafts come too often.
    assert p_value(first, reference(logits_of(VOCAB, 0), params, PROMPT.tolist(), OUTPUT.tolist())) < 1e-12


@pytest.mark.parametrize("name", ["plain", "penalties"])
def test_given_drafts_then_each_row_gets_what_it_would_have_drawn_without_them(name: str) -> None:
    params = SETTINGS[name]
    sampler = Sampler(64, VOCAB, (EOS,), torch.device("cpu"))
    rows = np.arange(64, dtype=np.int32)

    def assign() -> None:
        for row in range(64):
            request = Request(str(row), PROMPT, replace(params, seed=row, max_tokens=100))
            sampler.assign(row, request, 0, KNOWN, len(PROMPT))

    lines = np.stack([logits_of(VOCAB, seed) for seed in range(4)])
    # Given what each row draws one token at a time,
    assign()
    single = [
        sampler.sample(
            torch.from_numpy(np.tile(lines[position], (64, 1))), rows,
            np.full(64, 40 + position, dtype=np.int32), np.full(64, 5 + position, dtype=np.int32),
        ).token_ids
        for position in range(4)
    ]  # fmt: skip
    # when drafts are right up to a position that differs from row to row, and of different lengths,
    counts, first_wrong = (rows % 4).astype(np.int32), rows // 4 % 4  # 3: all drafts are right
    drafts = np.full((64, 3), NO_DRAFT_ID, dtype=np.int32)
    for row in range(64):
        for position in range(counts[row]):
            drafts[row, position] = (single[position][row] + (first_wrong[row] == position)) % VOCAB
    assign()
    first = np.cumsum(counts + 1) - (counts + 1)
    hidden = torch.from_numpy(np.concatenate([lines[: count + 1] for count in counts]))
    at, outputs = np.full(64, 40, dtype=np.int32), np.full(64, 5, dtype=np.int32)
    out = Verifier(sampler, lambda part: part.clone(), None, max_lines=16).verify(
        hidden, Drafted(rows, first.astype(np.int64), drafts, counts, at, outputs)
    )
    # then the right ones stay, and behind them comes what would have come.
    expected = np.minimum(first_wrong, counts)
    assert out.accepted.tolist() == expected.tolist()
    assert out.token_ids.tolist() == [single[position][row] for row, position in enumerate(expected)]
    assert not out.tainted


@pytest.mark.parametrize("name", ["plain", "penalties", "greedy"])
def test_given_bad_logits_then_only_those_that_are_reached_fail_their_row(name: str) -> None:
    params = SamplingParams(temperature=0.0) if name == "greedy" else SETTINGS[name]
    sampler = Sampler(3, VOCAB, (EOS,), torch.device("cpu"))
    for row in range(3):
        sampler.assign(row, Request(str(row), PROMPT, replace(params, seed=row)), 0, KNOWN, len(PROMPT))
    lines = torch.from_numpy(np.stack([logits_of(VOCAB, seed) for seed in range(3)])).repeat(3, 1)
    lines[3 * 1 + 1] = float("nan")  # behind the first draft of row 1
    lines[3 * 2 + 0] = float("nan")  # before the first draft of row 2
    first = sampler.sample(
        lines[:1].clone(), np.array([1], dtype=np.int32), np.array([40], dtype=np.int32), np.array([5], dtype=np.int32)
    ).token_ids[0]
    for right in (True, False):
        for row in range(3):
            sampler.assign(row, Request(str(row), PROMPT, replace(params, seed=row)), 0, KNOWN, len(PROMPT))
        drafts = np.full((3, 2), (first + (not right)) % VOCAB, dtype=np.int32)
        out = Verifier(sampler, lambda part: part.clone(), None).verify(
            lines,
            Drafted(
                np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int64) * 3, drafts, np.full(3, 2, dtype=np.int32),
                np.full(3, 40, dtype=np.int32), np.full(3, 5, dtype=np.int32),
            ),
        )  # fmt: skip
        assert out.failed.tolist() == [False, right, True]
        assert (out.token_ids == NO_TOKEN).tolist() == [False, right, True]
        assert out.accepted[1:].tolist() == [int(right), 0]
        # A rejected draft that led to bad values fails nothing, but its row's cache is to be made anew.
        assert (1 in out.tainted) == (not right)
        assert 0 not in out.tainted
        assert out.reasons == dict.fromkeys([1, 2] if right else [2], NON_FINITE)
