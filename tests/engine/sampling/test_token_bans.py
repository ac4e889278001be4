"""Allowed tokens and bad words: what is sampled is the most probable token that the plain rule leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestRefused
from engine.plan import NO_TOKEN
from engine.request import Request, SamplingParams
from engine.sampling.rows import RowParams
from engine.sampling.sampler import NOTHING_LEFT, Sampler, check_params
from engine.sampling.token_bans import BadWordPrefixes, LongWords
from tests.counting import count_lines
from tests.engine.sampling.test_sampler_rows import AllowMask

VOCAB = 40
PROMPT = np.array([3, 1, 2], dtype=np.int32)
EOS = 2

tokens = st.integers(0, 5)
words = st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=8).map(tuple)
rules = st.fixed_dictionaries(
    {
        "bad_words": words,
        "allowed_token_ids": st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=9).map(tuple),
        "logprobs": st.none() | st.just(0),
    }
)


def left_of(params: SamplingParams, output: list[int], masked: tuple[int, ...] | None) -> list[int]:
    """The tokens that may follow `output`, by the rule as it is said."""
    left = []
    for token in range(VOCAB):
        is_allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        is_bad = any(tuple([*output, token][-len(word) :]) == word for word in params.bad_words)
        if is_allowed and not is_bad and (masked is None or token in masked):
            left.append(token)
    return left


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(rules, st.none() | st.lists(st.integers(0, 9), min_size=1).map(tuple)), min_size=1, max_size=5),
    st.integers(0, 1000),
    st.integers(0, 7),
)
@pytest.mark.slow
def test_each_row_samples_the_best_token_that_its_rules_leave(
    rows: list[tuple[dict[str, Any], tuple[int, ...] | None]], seed: int, moved_at: int
) -> None:
    draw = np.random.default_rng(seed)
    requests = []
    for at, (given_rules, masked) in enumerate(rows):
        params = SamplingParams(max_tokens=8, temperature=0.0, **given_rules)
        mask = None if masked is None else (lambda _, allowed=masked: AllowMask(allowed))
        requests.append(Request(str(at), PROMPT, params, mask=mask))
    sampler = Sampler(len(rows), VOCAB, (EOS,), torch.device("cpu"))
    outputs: list[list[int]] = [[] for _ in rows]
    going = list(range(len(rows)))
    for step in range(8):
        for row in going:
            if step in (0, moved_at):  # as after a preemption: the state is made anew from the known tokens
                known = np.concatenate([PROMPT, np.array(outputs[row], dtype=np.int32)])
                sampler.assign(row, requests[row], 0, known, len(PROMPT))
        logits = draw.normal(0, 2, (len(going), VOCAB)).astype(np.float32)
        logits[:, :10] += 6  # the tokens that the rules name
        found = sampler.sample(
            torch.from_numpy(logits.copy()),
            np.array(going, dtype=np.int32),
            np.full(len(going), len(PROMPT) + step, dtype=np.int32),
            np.full(len(going), step, dtype=np.int32),
        )
        for line, row in enumerate(list(going)):
            masked = rows[row][1]
            left = left_of(requests[row].params, outputs[row], masked)
            token = int(found.token_ids[line])
            if left:
                assert token == max(left, key=lambda each, at=line: float(logits[at, each]))
                outputs[row].append(token)
            else:
                assert token == NO_TOKEN
                assert found.reasons[row] == NOTHING_LEFT
                going.remove(row)
        if not going:
            return


few = st.integers(1, 3)


@given(st.lists(st.lists(few, min_size=2, max_size=7).map(tuple), min_size=1, max_size=12), st.lists(few, max_size=40))
@pytest.mark.slow
def test_the_last_token_of_a_word_is_banned_behind_its_others(words: list[tuple[int, ...]], output: list[int]) -> None:
    long_words = LongWords(words)
    row = BadWordPrefixes(long_words, np.array([], dtype=np.int32))
    for end in range(len(output) + 1):
        expected = {word[-1] for word in words if tuple(output[:end][1 - len(word) :]) == word[:-1]}
        assert set(row.banned()) == expected
        assert set(BadWordPrefixes(long_words, np.array(output[:end], dtype=np.int32)).banned()) == expected
        if end < len(output):
            row.push(output[end])


def test_a_token_costs_the_same_however_many_words_there_are() -> None:
    """Given words of 2 to n and of 2 to 4 n tokens, when a row samples, then a step takes the same work."""
    output = [1, 2, 3, 1, 1, 4] * 50

    def sample(row: BadWordPrefixes) -> int:
        banned = 0
        for token in output:
            banned += len(row.banned())
            row.push(token)
        return banned

    rows = [
        BadWordPrefixes(LongWords([(1,) * length + (5,) for length in range(1, most)]), PROMPT[:0])
        for most in (100, 400)
    ]
    (few_lines, few_banned), (many_lines, many_banned) = [count_lines(lambda row=row: sample(row)) for row in rows]
    assert few_lines == many_lines
    assert few_banned == many_banned > 0


def test_only_words_of_several_tokens_make_the_host_wait_for_each_token() -> None:
    static = Request("a", PROMPT, SamplingParams(allowed_token_ids=(3, 4), bad_words=((3,),)))
    longer = Request("b", PROMPT, SamplingParams(bad_words=((3,), (4, 5))))
    assert (static.awaited, longer.awaited) == (False, True)


def test_what_follows_from_the_lists_is_made_once_for_all_sequences_that_share_them() -> None:
    # Given members of one request, which differ in their seeds, with a choice each
    params = SamplingParams(allowed_token_ids=(3, 4, 5), bad_words=((3,), (4, 5)))
    rows = RowParams(2, VOCAB, (EOS,))
    rows.assign(0, Request("a", PROMPT, params), 0, PROMPT, len(PROMPT))
    rows.assign(1, Request("b", PROMPT, replace(params, seed=7, max_tokens=3)), 0, PROMPT, len(PROMPT))
    assert rows.allowed[0] is rows.allowed[1]
    assert rows.bad_words[0].words is rows.bad_words[1].words
    # Other lists have what follows from them
    other = replace(params, allowed_token_ids=(6,))
    assert other.bans is not None
    with pytest.raises(RequestRefused, match="allowed_token_ids names token 6"):
        check_params(other, 6)
    assert replace(params, allowed_token_ids=None, bad_words=()).bans is None
