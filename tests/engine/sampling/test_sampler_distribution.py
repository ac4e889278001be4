"""The whole chain against a slow reference written from the definitions: chi-square, supports, exact draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

from engine.request import Request, SamplingParams
from engine.sampling.draw import BLOCK, DrawWorkspace, pick
from engine.sampling.philox import fold_seed, uniforms
from engine.sampling.sampler import Sampler

ROWS = 128
EOS = 2
PROMPT = np.array([1, 4, 4, 9], dtype=np.int32)
OUTPUT = np.array([3, 5, 3, 3, 1], dtype=np.int32)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of small steps: waking a second thread costs more than it gives
    yield
    torch.set_num_threads(threads)


def reference(logits: NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Probability of each token, one token at a time, in float64."""
    score = [float(x) for x in logits]
    for token in range(len(score)):
        if len(output) < params.min_tokens and (
            token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        ):
            score[token] = -math.inf
        score[token] += params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            if score[token] > 0:
                score[token] /= params.repetition_penalty
            else:
                score[token] *= params.repetition_penalty
        score[token] -= params.frequency_penalty * output.count(token)
        score[token] -= params.presence_penalty * (1 if token in output else 0)
    # float32, as the engine holds logits, so that ties are the same ties
    score = [float(np.float32(x)) for x in score]
    order = sorted(range(len(score)), key=lambda token: (-score[token], token))
    if params.temperature == 0:
        return [1.0 if token == order[0] else 0.0 for token in range(len(score))]
    weight = {token: math.exp((score[token] - score[order[0]]) / params.temperature) for token in order}
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        whole = math.fsum(weight[token] for token in order)
        mass, length = 0.0, 0
        while mass < params.top_p * whole * (1 - 1e-9):
            mass += weight[order[length]]
            length += 1
        order = order[:length]
    order = [token for token in order if weight[token] >= params.min_p * weight[order[0]] * (1 - 1e-6)]
    whole = math.fsum(weight[token] for token in order)
    retained = set(order)
    return [weight[token] / whole if token in retained else 0.0 for token in range(len(score))]


def logits_of(vocab: int, seed: int = 0, spread: float = 2.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)


def draw_counts(logits: NDArray[np.float32], params: SamplingParams, calls: int) -> NDArray[np.int64]:
    """How often each token came in ROWS * calls draws from one state; positions and seeds differ, nothing else."""
    sampler = Sampler(ROWS, len(logits), (EOS,), torch.device("cpu"))
    known = np.concatenate((PROMPT, OUTPUT))
    rows = np.arange(ROWS, dtype=np.int32)
    requests = [Request(str(row), PROMPT, replace(params, seed=1000 + row, max_tokens=4096)) for row in range(ROWS)]
    counts = np.zeros(len(logits), dtype=np.int64)
    stateless = params.repetition_penalty == 1 and not params.frequency_penalty and not params.presence_penalty
    batch = torch.from_numpy(np.tile(logits, (ROWS, 1)))
    for call in range(calls):
        if call == 0 or not stateless:
            for row, request in enumerate(requests):
                sampler.assign(row, request, 0, known, len(PROMPT))
        positions = np.full(ROWS, len(known) + call, dtype=np.int32)
        output = sampler.sample(batch.clone(), rows, positions, np.full(ROWS, len(OUTPUT), dtype=np.int32))
        assert not output.failed.any()
        counts += np.bincount(output.token_ids, minlength=len(logits))
    return counts


def p_value(counts: NDArray[np.int64], probabilities: list[float]) -> float:
    """The p-value of the chi-square test; tokens expected fewer than five times share a bin."""
    expected = np.array(probabilities) * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum()).astype(np.float64)
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 5:
        # too little for a bin of its own: it joins the smallest one
        smallest = int(np.argmin(wanted[:-1]))
        observed[smallest] += observed[-1]
        wanted[smallest] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    return float(chisquare(observed, wanted).pvalue) if len(wanted) > 1 else 1.0


GRID = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=3.0),
    "greedy": SamplingParams(temperature=0.0),
    "top_k": SamplingParams(top_k=5),
    "top_k 1": SamplingParams(top_k=1),
    "top_p": SamplingParams(top_p=0.8),
    "top_p tiny": SamplingParams(top_p=1e-6),
    "top_p hot": SamplingParams(top_p=0.95, temperature=2.5),
    "min_p": SamplingParams(min_p=0.1),
    "min_p 1": SamplingParams(min_p=1.0),
    "top_k top_p": SamplingParams(top_k=7, top_p=0.7, temperature=1.3),
    "top_k min_p": SamplingParams(top_k=8, min_p=0.05, temperature=1.5),
    "top_p min_p": SamplingParams(top_p=0.9, min_p=0.08, temperature=1.5),
    "all filters": SamplingParams(top_k=9, top_p=0.95, min_p=0.03, temperature=1.7),
    "repetition": SamplingParams(repetition_penalty=1.6),
    "repetition below 1": SamplingParams(repetition_penalty=0.7),
    "frequency": SamplingParams(frequency_penalty=0.6),
    "presence": SamplingParams(presence_penalty=1.1),
    "negative penalties": SamplingParams(presence_penalty=-0.8, frequency_penalty=-0.4),
    "all penalties": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=-0.5),
    "bias": SamplingParams(logit_bias={0: 3.0, 3: -math.inf, 7: -2.5, 10: 1.0}),
    "min_tokens": SamplingParams(min_tokens=9, max_tokens=50, stop_token_ids=(5, 7)),
    "min_tokens ignore_eos": SamplingParams(min_tokens=9, max_tokens=50, stop_token_ids=(5,), ignore_eos=True),
    "everything": SamplingParams(
        temperature=1.4,
        top_k=9,
        top_p=0.97,
        min_p=0.02,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias={0: 1.5, 6: -1.0},
        min_tokens=9,
        max_tokens=50,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "name"),
    [
        *((389, name) for name in GRID),
        *(
            pytest.param(11, name, marks=() if name in ("plain", "everything") else pytest.mark.exhaustive)
            for name in GRID
        ),
    ],
)
def test_draws_follow_the_reference_distribution(vocab: int, name: str) -> None:
    logits = logits_of(vocab)
    params = GRID[name]
    counts = draw_counts(logits, params, calls=80)
    wanted = reference(logits, params, PROMPT.tolist(), OUTPUT.tolist())
    assert counts[np.array(wanted) == 0].sum() == 0
    assert p_value(counts, wanted) > 1e-4


WRONG = {
    "temperature off by a tenth": (SamplingParams(), SamplingParams(temperature=1.1)),
    "min_p before temperature": (
        SamplingParams(min_p=0.1, temperature=2.0),
        SamplingParams(min_p=0.3, temperature=2.0),
    ),
    "top_p not renormalised after top_k": (
        SamplingParams(top_k=6, top_p=0.8, temperature=1.5),
        SamplingParams(top_k=6, top_p=0.9, temperature=1.5),
    ),
    "presence for frequency": (SamplingParams(frequency_penalty=0.6), SamplingParams(presence_penalty=0.6)),
    "repetition over nothing": (SamplingParams(repetition_penalty=1.3), SamplingParams()),
    "bias forgotten": (SamplingParams(logit_bias={0: 0.3}), SamplingParams()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reference_is_rejected(name: str) -> None:
    params, wrong = WRONG[name]
    logits = logits_of(11)
    counts = draw_counts(logits, params, calls=200)
    wanted = np.array(reference(logits, wrong, PROMPT.tolist(), OUTPUT.tolist()))
    outside = counts[wanted == 0].sum()
    assert outside > 0 or p_value(counts, wanted.tolist()) < 1e-6


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=6, temperature=8.0),
        SamplingParams(top_p=0.6, temperature=8.0),
        SamplingParams(min_p=0.75, temperature=8.0),
        SamplingParams(top_k=9, top_p=0.7, min_p=0.7, temperature=8.0),
    ],
)
def test_exactly_the_retained_tokens_are_drawn_when_logits_tie(params: SamplingParams) -> None:
    # bfloat16 models give many equal logits; the lower ids of a tie are retained first
    logits = np.array([0, 1, 2, 1, 1, 0, 2, 1, 1, 0, 1], dtype=np.float32)
    counts = draw_counts(logits, params, calls=20)
    wanted = np.array(reference(logits, params, PROMPT.tolist(), OUTPUT.tolist()))
    np.testing.assert_array_equal(counts > 0, wanted > 0)


def expected_tokens(probabilities: list[float], u: float) -> set[int]:
    """Tokens whose share of the CDF, in order of token id, holds u; both neighbours when u is at a border."""
    upper = np.cumsum(probabilities)
    lower = upper - np.array(probabilities)
    slack = 1e-5
    inside = (lower - slack <= u) & (u < upper + slack) & (np.array(probabilities) > 0)
    return set(np.flatnonzero(inside).tolist())


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([3, 31, 33, 256, 257, 700, 2500, 5000]),
    spread=st.sampled_from([0.01, 0.5, 2.0, 8.0]),
    step=st.sampled_from([0.0, 0.125, 1.0]),
    seed=st.integers(-(2**70), 2**70),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 60, 511, 600, 4096]),
    top_p=st.sampled_from([1.0, 1e-9, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_each_draw_is_the_inverse_cdf_of_its_uniform(
    vocab: int, spread: float, step: float, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Long and short vocabularies, flat and steep lines, coarse logits (ties): all ways to draw give the same token."""
    logits = logits_of(vocab, seed=abs(seed) % 1000, spread=spread)
    if step:
        logits = (np.round(logits / step) * step).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    sampler = Sampler(8, vocab, (EOS,), torch.device("cpu"))
    rows = np.arange(8, dtype=np.int32)
    for row in range(8):
        sampler.assign(row, Request("r", PROMPT, params), row, PROMPT, len(PROMPT))
    positions = np.arange(4, 12, dtype=np.int32)
    output = sampler.sample(torch.from_numpy(np.tile(logits, (8, 1))), rows, positions, np.zeros(8, dtype=np.int32))
    wanted = reference(logits, params, [], [])
    seeds = np.full(8, fold_seed(seed), dtype=np.uint64)
    u, inner = (uniforms(seeds, np.arange(8), positions.astype(np.int64), lane) for lane in (0, 1))
    for token, where, inside in zip(output.token_ids.tolist(), u.tolist(), inner.tolist(), strict=True):
        if 0 < top_k < vocab or top_p < 1:
            assert token in expected_tokens(wanted, where)
        else:
            blocks = [wanted[at : at + BLOCK] for at in range(0, vocab, BLOCK)]
            assert token // BLOCK in expected_tokens([sum(block) for block in blocks], where)
            block = np.array(blocks[token // BLOCK])
            assert token % BLOCK in expected_tokens((block / block.sum()).tolist(), inside)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_error_in_the_last_digits_changes_hardly_any_draw() -> None:
    """Given logits as another batch shape would give them, when each of 1,500 draws is made again, it is the same: also
    where a token is drawn that is a thousand times less likely than the error of a running sum over the vocabulary."""
    vocab, draws = 50_000, 1500
    logits = logits_of(vocab, seed=4, spread=2.5)
    noise = np.random.default_rng(1).normal(0, 1e-5, (draws, vocab)).astype(np.float32)
    sampler = Sampler(draws, vocab, (EOS,), torch.device("cpu"))
    rows, zeros = np.arange(draws, dtype=np.int32), np.zeros(draws, dtype=np.int32)
    for row in range(draws):
        sampler.assign(row, Request("r", PROMPT, SamplingParams(temperature=1.0, seed=row)), 0, PROMPT, len(PROMPT))
    exact, shaken = (
        sampler.sample(torch.from_numpy(lines), rows, zeros + 4, zeros).token_ids
        for lines in (np.tile(logits, (draws, 1)), logits + noise)
    )
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    assert (probabilities[exact] < 1e-5).sum() > 40, "unlikely tokens are among those drawn"
    assert (exact != shaken).sum() <= 1


def test_picking_walks_the_running_sum_and_never_takes_a_weightless_token() -> None:
    """Given small integer weights, each unit of the total leads to the token that owns it, first and last included."""
    space = DrawWorkspace(700, torch.device("cpu"))
    lines = np.random.default_rng(0).choice([0, 0, 1, 2, 5], size=(40, 700), p=[0.5, 0.2, 0.1, 0.1, 0.1])
    lines[:20] *= np.random.default_rng(1).random((20, 700)) < 0.02  # mostly nothing, whole blocks empty
    weights = torch.from_numpy(lines)
    padded = torch.nn.functional.pad(weights, (0, 768 - 700))
    for at in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53):
        u = torch.full((len(lines),), at, dtype=torch.float64)
        units = [min(int(at * line.sum()), int(line.sum()) - 1) for line in lines]
        owners = [np.repeat(np.arange(700), line)[unit] for line, unit in zip(lines, units, strict=True)]
        assert pick(weights, u).tolist() == owners
        assert space.pick(padded, u).tolist() == owners
