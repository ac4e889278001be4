"""Draws by the Triton kernel: bit for bit those of torch's operators, in few passes over the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.request import Request, SamplingParams, as_token_ids
from engine.sampling.sampler import NON_FINITE, NOTHING_LEFT, SampleOutput, Sampler

pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")

from triton.runtime import interpreter

from engine.triton_kernels import draws

VOCAB = 3000
"""Not a multiple of a block."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of a short row, lists that some settings overflow, and torch's exp2 in the interpreter: numpy's
    has other last bits, as a GPU's has, and there would be a draw in a million on which they differ."""
    monkeypatch.setattr(draws, "BLOCK", 1024)
    monkeypatch.setattr(draws, "BINS", 128)
    monkeypatch.setattr(draws, "DEPTH", 2)

    def exp2(self: Any, of: Any) -> Any:
        return self.unary_op(of, lambda values: torch.exp2(torch.as_tensor(np.asarray(values))).numpy())

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_exp2", exp2)


def samplers(params: list[SamplingParams], device: torch.device, vocab: int = VOCAB) -> tuple[Sampler, Sampler]:
    """Two samplers: by torch's operators, and by the kernel."""
    pair = Sampler(len(params), vocab, (), device), Sampler(len(params), vocab, (), device)
    for sampler, draw_rows in zip(pair, (None, draws.draw_rows), strict=True):
        sampler._draw_rows = draw_rows
        for row, each in enumerate(params):
            sampler.assign(row, Request(str(row), as_token_ids([1]), each), 0, as_token_ids([1]), 1)
    return pair


def sample(sampler: Sampler, values: Tensor, position: int = 1) -> SampleOutput:
    rows = np.arange(len(values), dtype=np.int32)
    return sampler.sample(values.clone(), rows, np.full_like(rows, position), np.zeros_like(rows))


def logits(kind: str, rows: int, rng: np.random.Generator, vocab: int = VOCAB) -> Tensor:
    values = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    if kind == "ties":  # what a head in bfloat16 gives
        values = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    elif kind == "flat":
        values = np.round(values / 20)
    elif kind == "equal":
        values[:] = -0.0
        values[:, ::3] = 0.0
    elif kind == "banned":
        values[rng.random(values.shape) < 0.97] = -np.inf
    elif kind == "cluster":  # most of the vocabulary in one interval of the histogram, by outliers
        values *= 1e-3
        values[:, 17] = 30
        values[:, 18] = -3e38
    elif kind == "steep":
        values *= 30
    return torch.from_numpy(values.astype(np.float32))


KINDS = ("normal", "ties", "flat", "equal", "banned", "cluster", "steep")


def settings(rng: np.random.Generator) -> list[SamplingParams]:
    """Temperatures and filters of all sizes, on and off, in every combination; and greedy rows among them."""
    return [SamplingParams(temperature=0.0)] * 4 + [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=int(rng.integers(1 << 40)))
        for temperature in (0.3, 1.0, 40.0)
        for top_k in (0, 1, 7, 200, 900, VOCAB - 1, VOCAB + 5)
        for top_p in (1.0, 1e-9, 0.5, 0.97)
        for min_p in (0.0, 0.1, 1e-7)
    ]  # fmt: skip


def check(kind: str, params: list[SamplingParams], device: torch.device, seed: int, vocab: int = VOCAB) -> None:
    rng = np.random.default_rng(seed)
    reference, sampler = samplers(params, device, vocab)
    values = logits(kind, len(params), rng, vocab).to(device)
    position = int(rng.integers(1, 1000))
    want, got = sample(reference, values, position), sample(sampler, values, position)
    different = np.flatnonzero(got.token_ids != want.token_ids)
    assert [(params[i], got.token_ids[i], want.token_ids[i]) for i in different] == []
    assert got.failed.tolist() == want.failed.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_the_tokens_are_those_of_torchs_operators(kind: str, device: torch.device) -> None:
    seed = KINDS.index(kind)
    rng = np.random.default_rng(seed)
    params = settings(rng)
    always = [SamplingParams(temperature=0.0), SamplingParams(seed=seed), SamplingParams(min_p=0.01, seed=seed)]
    check(kind, always + [params[i] for i in rng.permutation(len(params))[:6]], device, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "rounds"), [(VOCAB, 1), (900, 5)])  # times 256 settings and 7 kinds
def test_ten_thousand_tokens_are_those_of_torchs_operators(
    kind: str, vocab: int, rounds: int, device: torch.device
) -> None:
    for seed in range(rounds):
        check(kind, settings(np.random.default_rng(seed)), device, seed, vocab)


@pytest.mark.slow
def test_a_threshold_between_two_units_retains_one_more_token(device: torch.device) -> None:
    """Given four equal tokens, when top_p is a little more than a half, then three are drawn from."""
    params = [SamplingParams(top_p=0.5 + 1e-15, seed=seed) for seed in range(8)]
    reference, sampler = samplers(params, device)
    values = torch.full((8, VOCAB), float("-inf"), device=device)
    values[:, [5, 900, 1700, 2999]] = 1.0
    want, got = sample(reference, values), sample(sampler, values)
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert set(got.token_ids.tolist()) == {5, 900, 1700}


def test_rows_without_a_token_to_choose_fail_alone(device: torch.device) -> None:
    params = [SamplingParams(top_p=0.9, seed=i) for i in range(8)] + [SamplingParams(temperature=0.0)] * 4
    values = logits("normal", len(params), np.random.default_rng(1))
    values[1, 2999] = float("nan")
    values[2, 1500] = float("inf")
    values[3, :] = float("-inf")
    values[4, :] = float("nan")
    values[5, 1:] = float("-inf")
    values[9, 0] = float("nan")
    values[10, 5] = float("inf")
    values[10, 6] = float("nan")
    reference, sampler = samplers(params, device)
    want, got = sample(reference, values.to(device)), sample(sampler, values.to(device))
    assert got.failed.tolist() == [row in (1, 2, 3, 4, 9, 10) for row in range(len(params))]
    assert got.reasons == dict.fromkeys((1, 2, 3, 4, 9, 10), NON_FINITE) == want.reasons
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert got.token_ids[5] == 0


def test_the_chain_modifies_the_logits_before(device: torch.device) -> None:
    params = [
        SamplingParams(logit_bias={7: 90.0}, top_k=3),
        SamplingParams(repetition_penalty=1.4, top_p=0.8, seed=3),
        SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), float("-inf")), top_p=0.5),
        SamplingParams(top_k=9, logprobs=2, seed=4),
        SamplingParams(temperature=0.0, min_tokens=5, max_tokens=9, stop_token_ids=(11,)),
        SamplingParams(seed=5),
    ]
    reference, sampler = samplers(params, device)
    values = logits("normal", len(params), np.random.default_rng(2)).to(device)
    values[4, 11] = 99
    want, got = sample(reference, values), sample(sampler, values)
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert got.token_ids[0] == 7
    assert got.token_ids[4] != 11
    assert got.reasons == {2: NOTHING_LEFT}
    assert got.logprobs[3][0] == want.logprobs[3][0]


@pytest.mark.slow
def test_a_row_is_read_at_most_five_times(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the one block of the drawn token, which is read again."""
    if device.type == "cuda":
        pytest.skip("the interpreter counts what is read")
    read = 0
    values = logits("normal", 1, np.random.default_rng(5))
    load = interpreter.InterpreterBuilder.create_masked_load

    def counting(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        nonlocal read
        begin = values.data_ptr()
        read += int(np.count_nonzero(mask.data & (ptrs.data >= begin) & (ptrs.data < begin + values.nbytes)))
        return load(self, ptrs, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counting)
    budgets = [
        (1, SamplingParams(temperature=0.0)),
        (2, SamplingParams()),
        (2, SamplingParams(min_p=0.2)),
        (4, SamplingParams(top_k=50)),
        (4, SamplingParams(top_k=2000)),
        (4, SamplingParams(top_p=0.9)),
        (4, SamplingParams(top_k=50, top_p=0.9, min_p=0.01)),
        (5, SamplingParams(top_k=2000, top_p=0.9)),
    ]
    for passes, params in budgets:
        _, sampler = samplers([params], device)
        sampler._transfer.up = lambda *arrays: tuple(map(torch.from_numpy, arrays))  # type: ignore[method-assign]
        rows, read = np.zeros(1, dtype=np.int32), 0
        sampler.draw(values, rows, rows, rows)
        again = 0 if params.greedy else draws.BLOCK
        assert passes * VOCAB <= read <= passes * VOCAB + again, params
