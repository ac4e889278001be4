"""The delta rule's operator computes the recurrence, however a sequence is cut into segments and steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.delta import DeltaRule, DeltaSpec
from engine.states import NO_SLOT, Segments, empty_states

SPEC = DeltaSpec((True,), num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=5, kernel_size=4)
SLOTS = 24


def make_rule(spec: DeltaSpec = SPEC) -> DeltaRule:
    generator = torch.Generator().manual_seed(3)
    conv = torch.randn(sum(spec.sizes), spec.kernel_size, generator=generator)
    decay_log = torch.rand(spec.num_value_heads, generator=generator) * 2 - 3  # some heads remember for long
    return DeltaRule(spec, conv, decay_log, torch.randn(spec.num_value_heads, generator=generator))


def make_inputs(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, sum(SPEC.sizes), generator=generator).to(dtype)
    return qkv, torch.randn(tokens, 2 * SPEC.num_value_heads, generator=generator)


def by_recurrence(rule: DeltaRule, qkv: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
    """The paper's equation 10, token by token in float64."""
    spec = rule.spec
    padded = torch.cat((torch.zeros(spec.kernel_size - 1, qkv.shape[1]), qkv.float())).double()
    taps = padded.unfold(0, spec.kernel_size, 1) * rule.conv.double().t()
    q, k, v = torch.nn.functional.silu(taps.sum(-1)).split(spec.sizes, dim=1)
    q, k = (x.view(-1, spec.num_key_heads, spec.key_dim) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(spec.num_value_heads // spec.num_key_heads, dim=1) for x in (q, k))
    v = v.view(-1, spec.num_value_heads, spec.value_dim)
    b, a = ba.double().chunk(2, dim=1)
    rate = b.sigmoid()
    decay = (torch.nn.functional.softplus(a + rule.decay_bias.double()) * rule.decay_scale.double()).exp()
    state, out = torch.zeros(spec.num_value_heads, spec.key_dim, spec.value_dim, dtype=torch.float64), []
    for t in range(len(qkv)):
        state = state * decay[t, :, None, None]
        correction = rate[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t, :, :, None] * correction[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * spec.key_dim**-0.5)
    return torch.stack(out).float()


class Sequences:
    """Sequences whose tokens are computed step by step; each one's state moves on to another slot now and then."""

    def __init__(self, rule: DeltaRule, inputs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.rule, self.inputs = rule, inputs
        self.wanted = [by_recurrence(rule, *of_sequence) for of_sequence in inputs]
        self.states = empty_states(rule.spec.state(inputs[0][0].dtype), SLOTS, torch.device("cpu"))
        self.slots, self.done = [NO_SLOT] * len(inputs), [0] * len(inputs)
        self.free = list(range(1, SLOTS))

    def step(self, cuts: dict[int, list[int]], drafts: int = 0) -> None:
        """Compute segments of these lengths, per sequence; and of each one that many tokens without storing them."""
        rows, tokens, single, rest = [], 0, [], []
        for sequence, lengths in cuts.items():
            begin = at = self.done[sequence]
            for index, length in enumerate([*lengths, drafts] if drafts else lengths):
                length = min(length, len(self.inputs[sequence][0]) - at)
                if not length:
                    continue
                is_draft = index == len(lengths)
                write = NO_SLOT if is_draft else self.moved(sequence)
                segment = (tokens + at - begin, length, self.slots[sequence], write)
                (single if length == 1 and len(cuts[sequence]) == 1 and not drafts else rest).append(segment)
                at += length
                if not is_draft:
                    self.slots[sequence], self.done[sequence] = write, at
            rows.append((sequence, begin, at))
            tokens += at - begin
        columns = np.array([*single, *rest], dtype=np.int64).reshape(-1, 4).T
        parts = [
            torch.cat([self.inputs[sequence][which][begin:end] for sequence, begin, end in rows]) for which in (0, 1)
        ]
        got = self.rule(self.states, Segments(*columns, len(single)), *parts)
        for (sequence, begin, end), out in zip(rows, got.split([end - begin for _, begin, end in rows]), strict=True):
            torch.testing.assert_close(out, self.wanted[sequence][begin:end], rtol=1e-4, atol=1e-5)

    def moved(self, sequence: int) -> int:
        if self.slots[sequence] != NO_SLOT and self.done[sequence] % 3:
            return self.slots[sequence]  # overwritten
        return self.free.pop()


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 90), min_size=1, max_size=3), st.lists(st.integers(1, 5), min_size=1, max_size=2),
            st.sampled_from([0, 0, 2]),
        ),
        min_size=1, max_size=4,
    )
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_any_segments_give_the_recurrence(plan: list[tuple[list[int], list[int], int]]) -> None:
    # Given two sequences
    sequences = Sequences(make_rule(), [make_inputs(150, 1), make_inputs(60, 2)])
    # When each step computes some segments of both, and perhaps drafts that are thrown away
    for first, second, drafts in plan:
        sequences.step({0: first, 1: second}, drafts)
    # (Then each token's output is that of the recurrence: `Sequences.step`)


def test_single_tokens_give_the_recurrence() -> None:
    # Given more rows than are computed at once, one of them behind a longer run
    sequences = Sequences(make_rule(), [make_inputs(6, seed) for seed in range(SLOTS - 5)])
    sequences.step({0: [3]})
    for _ in range(2):
        sequences.step({row: [1] for row in range(SLOTS - 5)})


def test_a_state_that_is_not_stored_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given single tokens of which one is not to be stored, and rows in parts
    monkeypatch.setattr("engine.models.delta._ROWS_AT_ONCE", 2)
    rule, inputs = make_rule(), make_inputs(3, 5)
    states = empty_states(SPEC.state(torch.float32), 4, torch.device("cpu"))
    ids = np.arange(3)
    zeros = np.zeros(3, dtype=np.int64)
    # When they are computed
    rule(states, Segments(ids, np.ones(3, dtype=np.int64), zeros, np.array([1, NO_SLOT, 2]), 3), *inputs)
    # Then the zeros that sequences begin with are still zeros, and only two slots are written
    for state in states:
        assert [bool(slot.any()) for slot in state] == [False, True, True, False]


def test_a_broken_sequence_leaves_the_others_alone() -> None:
    # Given a chunk in which one sequence is not a number, and padding behind the shorter ones
    rule, inputs = make_rule(), make_inputs(100, 4)
    inputs[0][:3] = torch.nan
    states = empty_states(SPEC.state(torch.float32), 4, torch.device("cpu"))
    segments = Segments(*np.array([[0, 3, 0, 1], [3, 27, 0, 2], [30, 70, 0, 3]]).T, 0)
    out = rule(states, segments, *inputs)
    # Then only its own outputs and state are broken
    assert out[:3].isnan().all()
    assert out[3:].isfinite().all()
    assert states[1][2:].isfinite().all()


def test_inputs_are_remembered_in_their_dtype() -> None:
    # Given bfloat16 inputs, when a sequence is computed in parts
    inputs = make_inputs(40, 6, torch.bfloat16)
    sequences = Sequences(make_rule(), [inputs])
    for length in (17, 2, 1, 20):
        sequences.step({0: [length]})
    # (Then the outputs are those of float32 arithmetic on the same inputs: `Sequences.step`)
    assert sequences.states[0].dtype == torch.bfloat16
