"""Rows of a batch: independent of each other bit for bit, reassigned without a trace, failed alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.errors import RequestRefused
from engine.plan import NO_TOKEN
from engine.request import Request, SamplingParams
from engine.sampling.rows import NO_SLOT, RowParams
from engine.sampling.sampler import SampleOutput, Sampler, check_params, prompt_logprobs

CPU = torch.device("cpu")
EOS = 2
PROMPT = np.array([1, 4, 4, 9], dtype=np.int32)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class ParityMask:
    """A real mask with state: after an even token only odd ones may come, and the other way round."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.parity = 0

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        for token in range(self.parity, self.vocab, 2):
            bitmask.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))

    def advance(self, token_id: int) -> None:
        assert token_id % 2 == self.parity
        self.parity = 1 - self.parity


class AllowMask:
    """Allows exactly these tokens."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        for token in self.tokens:
            bitmask.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))

    def advance(self, token_id: int) -> None:
        assert token_id in self.tokens


def logits_of(lines: int, vocab: int, seed: int = 0, step: float = 0.0) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(0, 2, (lines, vocab))
    return torch.from_numpy((np.round(values / step) * step if step else values).astype(np.float32))


def sampler_of(requests: list[Request], vocab: int) -> Sampler:
    sampler = Sampler(len(requests), vocab, (EOS,), CPU)
    for row, request in enumerate(requests):
        sampler.assign(row, request, 0, request.prompt_token_ids, len(request.prompt_token_ids))
    return sampler


def sample(
    sampler: Sampler, logits: torch.Tensor, rows: list[int] | None = None, position: int = 4, num_outputs: int = 0
) -> SampleOutput:
    lines = len(logits)
    index = np.arange(lines, dtype=np.int32) if rows is None else np.array(rows, dtype=np.int32)
    return sampler.sample(
        logits.clone(),
        index,
        np.full(lines, position, dtype=np.int32),
        np.full(lines, num_outputs, dtype=np.int32),
    )


def mixed_requests(count: int, vocab: int) -> list[Request]:
    """Every kind of row, in turn."""
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.5, top_p=0.999),
        SamplingParams(top_k=50),
        SamplingParams(top_k=600, top_p=0.95),
        SamplingParams(min_p=0.05),
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=0, frequency_penalty=0.7),
        SamplingParams(logit_bias={0: 5.0, vocab - 1: -math.inf}, top_p=0.8),
        SamplingParams(min_tokens=5, logprobs=3),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(top_p=0.7, top_k=20, min_p=0.1, logprobs=5),
    ]
    masks = [None, None, None, None, lambda _: ParityMask(vocab)]
    requests = []
    for i in range(count):
        params = kinds[i % len(kinds)]
        values = {name: getattr(params, name) for name in params.__slots__} | {"seed": i}
        requests.append(Request(str(i), PROMPT, SamplingParams(**values), mask=masks[i % len(masks)]))
    return requests


@pytest.mark.parametrize(
    ("vocab", "step", "threads"), [(5003, 0.25, 1), (5003, 0.0, 2), (20011, 0.0, 2), (200, 0.5, 1)]
)
@pytest.mark.slow
def test_a_row_gives_the_same_token_and_logprobs_alone_and_in_any_batch(vocab: int, step: float, threads: int) -> None:
    """Given 64 different rows, when they are sampled together, shuffled and one by one, nothing differs in any bit."""
    torch.set_num_threads(threads)
    requests = mixed_requests(64, vocab)
    logits = logits_of(64, vocab, step=step)
    together = sample(sampler_of(requests, vocab), logits)
    assert not together.failed.any()
    assert len(set(together.token_ids.tolist())) > 20
    order = np.random.default_rng(1).permutation(64)
    shuffled = sample(sampler_of(requests, vocab), logits[order], rows=order.tolist())
    np.testing.assert_array_equal(shuffled.token_ids, together.token_ids[order])
    alone = sampler_of(requests, vocab)
    for row in range(64):
        one = sample(alone, logits[row : row + 1], rows=[row])
        assert one.token_ids[0] == together.token_ids[row]
        for other in (one, shuffled):
            assert (row in other.logprobs) == (row in together.logprobs)
            if row in together.logprobs:
                for mine, theirs in zip(together.logprobs[row], other.logprobs[row], strict=True):
                    np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_rows_fail_alone(bad: float) -> None:
    """Given NaN or +inf at one token, or -inf everywhere, those rows fail and the others do not change in any bit."""
    requests = mixed_requests(64, 5003)
    logits = logits_of(64, 5003)
    sound = sample(sampler_of(requests, 5003), logits)
    broken = logits.clone()
    lines = list(range(0, 64, 3))
    for line in lines:
        broken[line, slice(None) if bad == -math.inf else (line * 211) % 5003] = bad
    output = sample(sampler_of(requests, 5003), broken)
    expected = np.zeros(64, dtype=bool)
    expected[lines] = True
    np.testing.assert_array_equal(output.failed, expected)
    assert (output.token_ids[expected] == NO_TOKEN).all()
    assert all("not finite" in output.reasons[line] for line in lines)
    assert set(output.reasons) == set(lines)
    np.testing.assert_array_equal(output.token_ids[~expected], sound.token_ids[~expected])
    assert set(output.logprobs) == {row for row in sound.logprobs if row not in lines}


@pytest.mark.parametrize("token", [0, 255, 256, 511, 512, 513])
def test_a_single_nan_is_seen_wherever_it_stands(token: int) -> None:
    logits = logits_of(2, 514)
    logits[0, token] = math.nan
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5)):
        output = sample(sampler_of([Request("a", PROMPT, params)] * 2, 514), logits)
        assert output.failed.tolist() == [True, False]


def test_single_tokens_at_minus_infinity_are_never_drawn_and_fail_nothing() -> None:
    logits = logits_of(1, 40)
    logits[0, torch.arange(40) != 17] = -math.inf
    for params in (SamplingParams(), SamplingParams(top_k=30), SamplingParams(top_p=0.99), SamplingParams(min_p=0.1)):
        assert sample(sampler_of([Request("a", PROMPT, params)], 40), logits).token_ids.tolist() == [17]


def test_bad_logits_behind_a_mask_or_bias_still_fail_the_row() -> None:
    logits = logits_of(1, 100)
    logits[0, 50] = math.nan
    banned = Request("a", PROMPT, SamplingParams(logit_bias={50: -math.inf}), mask=lambda _: AllowMask((1, 2, 3)))
    output = sample(sampler_of([banned], 100), logits)
    assert output.failed.tolist() == [True]
    assert "not finite" in output.reasons[0]


def test_a_row_that_is_left_without_tokens_fails_with_another_reason() -> None:
    requests = [
        Request("a", PROMPT, mask=lambda _: AllowMask(())),
        Request("b", PROMPT, SamplingParams(min_tokens=3), mask=lambda _: AllowMask((EOS,))),
        Request("c", PROMPT, SamplingParams(temperature=0), mask=lambda _: AllowMask((EOS,))),
    ]
    output = sample(sampler_of(requests, 100), logits_of(3, 100))
    assert output.failed.tolist() == [True, True, False]
    assert output.token_ids.tolist() == [NO_TOKEN, NO_TOKEN, EOS]
    assert "no token" in output.reasons[0]
    assert "no token" in output.reasons[1]


@settings(max_examples=40, deadline=None)
@given(vocab=st.integers(3, 700), step=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 1000))
def test_greedy_is_the_lowest_argmax(vocab: int, step: float, seed: int) -> None:
    logits = logits_of(5, vocab, seed, step)
    requests = [Request(str(i), PROMPT, SamplingParams(temperature=0)) for i in range(5)]
    output = sample(sampler_of(requests, vocab), logits)
    np.testing.assert_array_equal(output.token_ids, np.argmax(logits.numpy(), axis=1))


def test_greedy_rows_in_a_mixed_batch_leave_the_logits_untouched() -> None:
    logits = logits_of(4, 300)
    before = logits.clone()
    requests = [Request(str(i), PROMPT, SamplingParams(temperature=i % 2, top_p=0.9)) for i in range(4)]
    sampler_of(requests, 300).sample(
        logits, np.arange(4, dtype=np.int32), np.full(4, 4, dtype=np.int32), np.zeros(4, dtype=np.int32)
    )
    assert torch.equal(logits, before)


def run(requests: list[Request], vocab: int, steps: int, preempt_every: int | None) -> NDArray[np.int32]:
    """Decode `steps` tokens per row; now and then all sequences lose their rows and come back on others."""
    sampler = Sampler(len(requests), vocab, (EOS,), CPU)
    known = [request.prompt_token_ids for request in requests]
    rows = np.arange(len(requests), dtype=np.int32)
    for step in range(steps):
        if step == 0 or (preempt_every and step % preempt_every == 0):
            rows = np.roll(rows, 1) if step else rows
            for row, request, tokens in zip(rows.tolist(), requests, known, strict=True):
                sampler.assign(row, request, 1, tokens, len(request.prompt_token_ids))
        positions = np.array([len(tokens) for tokens in known], dtype=np.int32)
        logits = logits_of(len(requests), vocab, seed=step, step=0.5)
        outputs = np.full(len(requests), step, dtype=np.int32)
        output = sampler.sample(logits, rows, positions, outputs)
        assert not output.failed.any()
        known = [np.append(tokens, token) for tokens, token in zip(known, output.token_ids, strict=True)]
    return np.stack([tokens[-steps:] for tokens in known])


@pytest.mark.slow
def test_a_sequence_that_lost_its_row_goes_on_as_if_nothing_had_happened() -> None:
    """Penalty counts, masks and randomness after reassignment equal those of an uninterrupted run."""
    requests = mixed_requests(26, 97)
    uninterrupted = run(requests, 97, steps=40, preempt_every=None)
    np.testing.assert_array_equal(run(requests, 97, steps=40, preempt_every=7), uninterrupted)
    np.testing.assert_array_equal(run(requests, 97, steps=40, preempt_every=1), uninterrupted)


def test_penalties_follow_the_tokens_of_a_long_run() -> None:
    """Given a strong presence penalty and greedy choice on equal logits, every token comes once before any repeats."""
    vocab = 150
    params = SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=1.0, max_tokens=1000)
    sampler = sampler_of([Request("a", PROMPT, params)], vocab)
    drawn = [int(sample(sampler, torch.zeros(1, vocab), num_outputs=i).token_ids[0]) for i in range(2 * vocab)]
    assert drawn == [*range(vocab), *range(vocab)]


def test_a_released_row_leaves_nothing_to_its_next_sequence() -> None:
    heavy = SamplingParams(
        repetition_penalty=9, presence_penalty=2, logit_bias={3: 50.0}, min_tokens=5, logprobs=2, top_k=1, seed=5
    )
    plain = Request("b", PROMPT, SamplingParams(seed=5))
    logits = logits_of(1, 120)
    fresh = sample(sampler_of([plain], 120), logits)
    used = sampler_of([Request("a", PROMPT, heavy, mask=lambda _: AllowMask((3,)))], 120)
    sample(used, logits)
    used.release(0)
    used.assign(0, plain, 0, PROMPT, len(PROMPT))
    again = sample(used, logits)
    np.testing.assert_array_equal(again.token_ids, fresh.token_ids)
    assert again.logprobs == {}


def test_penalty_slots_are_reused() -> None:
    """Given many sequences that come and go, the penalty table holds as many slots as ran at once."""
    params = RowParams(4, 100, (EOS,))
    request = Request("a", PROMPT, SamplingParams(presence_penalty=1.0))
    slots = set()
    for turn in range(100):
        params.assign(turn % 4, request, 0, PROMPT, 4)
        slots.add(int(params.penalty_slot[turn % 4]))
    assert len(slots) == 4
    params.assign(0, Request("b", PROMPT), 0, PROMPT, 4)
    assert params.penalty_slot[0] == NO_SLOT


def test_choices_seeds_and_positions_draw_differently() -> None:
    sampler = Sampler(3, 5000, (EOS,), CPU)
    for row, (seed, choice) in enumerate([(0, 0), (0, 1), (1, 0)]):
        sampler.assign(row, Request("a", PROMPT, SamplingParams(seed=seed, temperature=20.0)), choice, PROMPT, 4)
    line = logits_of(1, 5000)
    tokens = [sample(sampler, line.repeat(3, 1), position=p).token_ids.tolist() for p in range(4, 14)]
    assert len({token for step in tokens for token in step}) > 25


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_tokens_are_held_back_until_min_tokens(ignore_eos: bool) -> None:
    logits = torch.zeros(1, 60)
    logits[0, [EOS, 11]] = torch.tensor([9.0, 8.0])
    logits[0, 30] = 1.0
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(11, 10_000), ignore_eos=ignore_eos)
    sampler = sampler_of([Request("a", PROMPT, params)], 60)
    held = [int(sample(sampler, logits, num_outputs=n).token_ids[0]) for n in range(5)]
    # with ignore_eos the model's end token is a token like any other
    assert held == [EOS if ignore_eos else 30] * 3 + [EOS] * 2


@pytest.mark.parametrize("vocab", [31, 32, 33, 64, 100, 257])
def test_masks_reach_the_first_and_last_token(vocab: int) -> None:
    for allowed in ((0,), (vocab - 1,), (0, vocab - 1), (vocab // 2,)):
        requests = [
            Request("a", PROMPT, SamplingParams(temperature=t), mask=lambda _, a=allowed: AllowMask(a))
            for t in (0.0, 9.0)
        ]
        sampler = sampler_of(requests, vocab)
        drawn = {token for p in range(30) for token in sample(sampler, logits_of(2, vocab, p), position=p).token_ids}
        assert drawn == set(allowed)


def test_logprobs_are_of_the_model_and_not_of_the_chain() -> None:
    """Given rows whose logits the chain changes heavily, the log-probabilities equal log_softmax of the raw logits."""
    vocab = 3001
    logits = logits_of(4, vocab, step=0.5)
    params = SamplingParams(
        temperature=0.5, top_k=3, repetition_penalty=2.0, logit_bias={17: 30.0}, min_tokens=4, logprobs=6
    )
    requests = [Request("a", PROMPT, params), Request("b", PROMPT), Request("c", PROMPT, SamplingParams(logprobs=0))]
    requests.append(Request("d", PROMPT, SamplingParams(temperature=0, logprobs=20)))
    output = sample(sampler_of(requests, vocab), logits)
    expected = torch.log_softmax(logits.double(), -1).numpy()
    assert set(output.logprobs) == {0, 2, 3}
    assert output.token_ids[0] == 17
    for row, k in ((0, 6), (2, 0), (3, 20)):
        chosen, ids, top = output.logprobs[row]
        assert chosen == pytest.approx(expected[row, output.token_ids[row]], abs=1e-5)
        assert (ids.dtype, top.dtype, ids.shape, top.shape) == (np.int32, np.float32, (k,), (k,))
        np.testing.assert_array_equal(ids, np.lexsort((np.arange(vocab), -logits[row].numpy()))[:k])
        np.testing.assert_allclose(top, expected[row, ids], atol=1e-5)


@pytest.mark.parametrize("k", [0, 1, 5, 40])
@pytest.mark.parametrize("vocab", [17, 5003])
def test_prompt_logprobs_equal_log_softmax(k: int, vocab: int) -> None:
    lines = 2 * (1 << 19) // 5003 + 7  # more than one chunk
    logits = logits_of(lines, vocab, step=0.25)
    logits[3, 5] = -math.inf
    logits[4, 5] = math.nan
    before = logits.clone()
    targets = np.random.default_rng(0).integers(0, vocab, lines).astype(np.int32)
    chosen, ids, top = prompt_logprobs(logits, targets, k)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    good = np.arange(lines) != 4
    expected = torch.log_softmax(logits.double(), -1).numpy()
    assert (chosen.dtype, ids.dtype, top.dtype) == (np.float32, np.int32, np.float32)
    assert ids.shape == top.shape == (lines, min(k, vocab))
    assert math.isnan(chosen[4])
    np.testing.assert_allclose(chosen[good], expected[good, targets[good]], atol=2e-5)
    order = np.lexsort((np.broadcast_to(np.arange(vocab), logits.shape), -logits.numpy()))[:, :k]
    np.testing.assert_array_equal(ids[good], order[good])
    np.testing.assert_allclose(top[good], np.take_along_axis(expected, ids, 1)[good], atol=2e-5)


def test_what_no_vocabulary_can_satisfy_is_refused() -> None:
    check_params(SamplingParams(logit_bias={9: -math.inf, 0: 100.0}), vocab_size=10)
    for params, said in (
        (SamplingParams(logit_bias={10: 1.0}), "token 10"),
        (SamplingParams(logit_bias={-1: 1.0}), "token -1"),
        (SamplingParams(logit_bias={1: math.nan}), "token 1"),
        (SamplingParams(logit_bias={1: math.inf}), "token 1"),
        (SamplingParams(frequency_penalty=math.nan), "frequency_penalty"),
        (SamplingParams(presence_penalty=math.inf), "presence_penalty"),
    ):
        with pytest.raises(RequestRefused, match=said):
            check_params(params, vocab_size=10)


def test_an_empty_step_is_fine() -> None:
    output = sample(sampler_of([Request("a", PROMPT)], 10), torch.zeros(0, 10), rows=[])
    assert output.token_ids.shape == output.failed.shape == (0,)


@pytest.mark.parametrize("temperature", [1e-300, 1e-20, 1e20, 1e300])
def test_extreme_temperatures_neither_fail_nor_draw_banned_tokens(temperature: float) -> None:
    logits = logits_of(1, 50)
    logits[0, ::2] = -math.inf
    for more in ({}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.2}):
        sampler = sampler_of([Request("a", PROMPT, SamplingParams(temperature=temperature, **more))], 50)
        drawn = {int(sample(sampler, logits, position=p).token_ids[0]) for p in range(60)}
        assert all(token % 2 for token in drawn)
        assert drawn == {int(logits.argmax())} if temperature < 1 else len(drawn) > 1


class BatchFiller:
    """Fills `BatchMask` masks in one call; those of a broken token fail."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def fill(self, masks: Sequence[Any], bitmasks: NDArray[np.int32]) -> dict[int, Exception]:
        self.calls.append(len(masks))
        assert bitmasks.flags.c_contiguous
        assert not bitmasks.any()
        for mask, line in zip(masks, bitmasks, strict=True):
            line.view(np.uint32)[mask.token // 32] |= np.uint32(1 << (mask.token % 32))
        if any(mask.token == 66 for mask in masks):
            raise RuntimeError("none of them")
        return {at: ValueError("this one") for at, mask in enumerate(masks) if mask.token == 77}


class BatchMask:
    """Allows one token; filled with others of its kind."""

    def __init__(self, token: int, filler: BatchFiller) -> None:
        self.token = token
        self.filler = filler

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        raise AssertionError("it has a filler")

    def advance(self, token_id: int) -> None:
        assert token_id == self.token


def test_masks_with_one_filler_are_filled_in_one_call() -> None:
    """Given rows with masks of two fillers, a mask of its own and none, each gets what its mask allows."""
    one, other = BatchFiller(), BatchFiller()
    masks: list[Any] = [
        BatchMask(5, one),
        None,
        BatchMask(9, other),
        AllowMask((3,)),
        BatchMask(70, one),
        BatchMask(77, one),
    ]
    requests = [
        Request(str(i), PROMPT, SamplingParams(temperature=0), mask=None if m is None else lambda _, m=m: m)
        for i, m in enumerate(masks)
    ]
    sampler, rows = sampler_of(requests, 120), np.arange(6, dtype=np.int32)
    output = sampler.sample(logits_of(6, 120), rows, rows + 4, rows * 0)
    assert output.token_ids[[0, 2, 3, 4]].tolist() == [5, 9, 3, 70]
    assert output.failed.tolist() == [False] * 5 + [True]
    assert output.reasons[5] == "token mask failed: ValueError: this one"
    assert (one.calls, other.calls) == ([3], [1])
    # and the next step goes on without the one that failed
    again = sampler.sample(logits_of(5, 120), rows[:5], rows[:5] + 5, rows[:5] * 0 + 1)
    assert again.token_ids[[0, 2, 3, 4]].tolist() == [5, 9, 3, 70]
    assert one.calls == [3, 2]


def test_a_filler_that_raises_fails_the_rows_that_it_filled() -> None:
    one, other = BatchFiller(), BatchFiller()
    masks = [BatchMask(66, one), BatchMask(5, one), BatchMask(7, other)]
    requests = [Request(str(i), PROMPT, mask=lambda _, m=m: m) for i, m in enumerate(masks)]
    sampler, rows = sampler_of(requests, 120), np.arange(3, dtype=np.int32)
    output = sampler.sample(logits_of(3, 120), rows, rows + 4, rows * 0)
    assert output.failed.tolist() == [True, True, False]
    assert output.token_ids[2] == 7
