"""The operators of gated linear recurrences compute them, however a sequence is cut into segments and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.models.state_layers.gates import GatedNorm, Gates
from engine.models.state_layers.native_recurrence import NativeGatedNorm, NativeRecurrence, RecurrenceRoom
from engine.models.state_layers.recurrence import Recurrence, RecurrenceShape, _Chunks
from engine.native.build import INSTRUCTION_SETS
from engine.states import NO_SLOT, Segments, StateOperator, empty_states
from tests.native_paths import native_path

DELTA = RecurrenceShape(num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=5, kernel_size=4)
WIDE = RecurrenceShape(num_key_heads=1, num_value_heads=2, key_dim=19, value_dim=131, kernel_size=2)
MAMBA = RecurrenceShape(2, 4, key_dim=8, value_dim=5, kernel_size=4, values_first=True, delta_rule=False)
SLOTS = 24

Make = Callable[[Recurrence], StateOperator]


def weights(shape: RecurrenceShape) -> Recurrence:
    generator = torch.Generator().manual_seed(3)
    conv = torch.randn(sum(shape.sizes), shape.kernel_size, generator=generator)
    # Some heads remember for long.
    scale = -torch.logspace(-3, 0.5, shape.num_value_heads)
    if shape.delta_rule:
        return Recurrence(shape, Gates(scale, has_rates=True), conv)
    bias = torch.randn(sum(shape.sizes), generator=generator)
    gates = Gates(scale, has_rates=False, steps=(0.1, 1.0))
    return Recurrence(shape, gates, conv, bias, torch.randn(shape.num_value_heads, generator=generator))


def make_inputs(shape: RecurrenceShape, tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(tokens, sum(shape.sizes), generator=generator).to(dtype)
    return [features, torch.randn(tokens, shape.num_value_heads * (1 + shape.delta_rule), generator=generator)]


def by_definition(of: Recurrence, features: Tensor, gates: Tensor) -> Tensor:
    """The recurrence, token by token in float64."""
    shape = of.shape
    padded = torch.cat((torch.zeros(shape.kernel_size - 1, features.shape[1]), features.float())).double()
    mixed = (padded.unfold(0, shape.kernel_size, 1) * of.conv.double().t()).sum(-1)
    mixed = torch.nn.functional.silu(mixed if of.bias is None else mixed + of.bias)
    parts = mixed.split([shape.sizes[2], *shape.sizes[:2]] if shape.values_first else shape.sizes, dim=1)
    v, k, q = parts if shape.values_first else parts[::-1]
    q, k = (x.view(-1, shape.num_key_heads, shape.key_dim) for x in (q, k))
    if shape.delta_rule:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q = q * shape.key_dim**-0.5
    q, k = (x.repeat_interleave(shape.num_value_heads // shape.num_key_heads, dim=1) for x in (q, k))
    v = v.view(-1, shape.num_value_heads, shape.value_dim)
    steps = torch.nn.functional.softplus(gates[:, -shape.num_value_heads :].double()).clamp(*of.gates.steps)
    rate = gates[:, : shape.num_value_heads].double().sigmoid() if shape.delta_rule else steps
    decay = steps * of.gates.decay_scale
    state, out = torch.zeros(shape.num_value_heads, shape.key_dim, shape.value_dim, dtype=torch.float64), []
    for t in range(len(features)):
        state = state * decay[t, :, None, None].exp()
        wrong = v[t] - torch.einsum("hkv,hk->hv", state, k[t]) if shape.delta_rule else v[t]
        state = state + k[t, :, :, None] * (rate[t, :, None] * wrong)[:, None]
        made = torch.einsum("hkv,hk->hv", state, q[t])
        out.append(made if of.skip is None else made + v[t] * of.skip[:, None])
    return torch.stack(out).float()


class Sequences:
    """Sequences whose tokens are computed step by step; each one's state moves on to another slot now and then."""

    def __init__(self, make: Make, shape: RecurrenceShape, inputs: list[list[Tensor]]) -> None:
        of = weights(shape)
        self.operator, self.inputs = make(of), inputs
        self.wanted = [by_definition(of, *of_sequence) for of_sequence in inputs]
        self.states = empty_states(shape.state(inputs[0][0].dtype), SLOTS, torch.device("cpu"))
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
        parts = [torch.cat([self.inputs[sequence][i][begin:end] for sequence, begin, end in rows]) for i in (0, 1)]
        got = self.operator(self.states, Segments(*columns, len(single)), *parts)
        for (sequence, begin, end), out in zip(rows, got.split([end - begin for _, begin, end in rows]), strict=True):
            torch.testing.assert_close(out, self.wanted[sequence][begin:end], rtol=1e-4, atol=2e-5)

    def moved(self, sequence: int) -> int:
        if self.slots[sequence] != NO_SLOT and self.done[sequence] % 3:
            return self.slots[sequence]  # overwritten
        return self.free.pop()


@pytest.fixture(params=["torch", *INSTRUCTION_SETS], scope="module")
def make(request: pytest.FixtureRequest) -> Make:
    """A function weights -> the operator, of torch's operators or of an instruction set."""
    if request.param == "torch":
        return lambda of: of
    library = native_path(request.param, 1)  # or skip
    return lambda of: NativeRecurrence(library, of, RecurrenceRoom())


@pytest.mark.parametrize("shape", [DELTA, MAMBA])
@pytest.mark.slow
def test_any_segments_give_the_recurrence(make: Make, shape: RecurrenceShape) -> None:
    inputs = [make_inputs(shape, 150, 1), make_inputs(shape, 60, 2)]

    @given(
        st.lists(
            st.tuples(
                st.lists(st.integers(1, 90), min_size=1, max_size=3), st.lists(st.integers(1, 5), max_size=2),
                st.sampled_from([0, 0, 2]),
            ),
            min_size=1, max_size=4,
        )
    )  # fmt: skip
    @settings(max_examples=8, deadline=None)
    def steps(plan: list[tuple[list[int], list[int], int]]) -> None:
        # Given two sequences
        sequences = Sequences(make, shape, inputs)
        # When each step computes some segments of both, and perhaps drafts that are thrown away
        for first, second, drafts in plan:
            sequences.step({0: first, 1: second} if second else {0: first}, drafts)
        # (Then each token's output is that of the recurrence: `Sequences.step`)

    steps()


@pytest.mark.parametrize("shape", [DELTA, WIDE, MAMBA])
def test_single_tokens_give_the_recurrence(make: Make, shape: RecurrenceShape, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given more rows than are computed at once, one of them behind a longer run
    monkeypatch.setattr("engine.models.state_layers.recurrence._ROWS_AT_ONCE", 5)
    sequences = Sequences(make, shape, [make_inputs(shape, 40, seed) for seed in range(8)])
    sequences.step({0: [35]})
    for _ in range(3):
        sequences.step({row: [1] for row in range(8)})


def test_threads_share_a_layer() -> None:
    # Given several threads, more features than one of them moves and more heads than there are threads
    library = native_path("avx2", 3)  # or skip
    sequences = Sequences(
        lambda of: NativeRecurrence(library, of, RecurrenceRoom()),
        WIDE,
        [make_inputs(WIDE, 9, seed) for seed in (1, 2)],
    )
    # When prompts and then tokens are computed, then the outputs are those of one: `Sequences.step`
    for lengths in ([5], [1], [3]):
        sequences.step({0: lengths, 1: lengths})


def test_short_runs_are_not_padded_to_the_length_of_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given drafts of many sequences, each behind a token, around a chunk of a prompt
    lengths = [*[1, 3] * 20, 64, *[1, 2] * 20]
    first = np.cumsum([0, *lengths[:-1]])
    read, write = np.zeros_like(first), np.zeros_like(first)
    inputs = make_inputs(DELTA, sum(lengths), 8)
    padded: list[int] = []
    cut = _Chunks.of

    def counted(*parts: Any) -> _Chunks:
        chunks = cut(*parts)
        padded.append(chunks.tokens.size)
        return chunks

    monkeypatch.setattr(_Chunks, "of", counted)
    states = empty_states(DELTA.state(torch.float32), 2, torch.device("cpu"))
    # When they are computed
    weights(DELTA)(states, Segments(first, np.array(lengths), read, write, 0), *inputs)
    # Then a group is as wide as its longest
    assert padded == [40 * 3, 64, 40 * 2]


def test_a_state_that_is_not_stored_stays(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given single tokens of which one is not to be stored, and rows in parts
    monkeypatch.setattr("engine.models.state_layers.recurrence._ROWS_AT_ONCE", 2)
    states = empty_states(DELTA.state(torch.float32), 4, torch.device("cpu"))
    zeros, ones = np.zeros(3, dtype=np.int64), np.ones(3, dtype=np.int64)
    # When they are computed
    segments = Segments(np.arange(3), ones, zeros, np.array([1, NO_SLOT, 2]), 3)
    make(weights(DELTA))(states, segments, *make_inputs(DELTA, 3, 5))
    # Then the zeros that sequences begin with are still zeros, and only two slots are written
    for state in states:
        assert [bool(slot.any()) for slot in state] == [False, True, True, False]


def test_a_broken_sequence_leaves_the_others_alone(make: Make) -> None:
    # Given a chunk in which one sequence is not a number, and padding behind the shorter ones
    inputs = make_inputs(DELTA, 100, 4)
    inputs[0][:3] = torch.nan
    states = empty_states(DELTA.state(torch.float32), 4, torch.device("cpu"))
    segments = Segments(*np.array([[0, 3, 0, 1], [3, 27, 0, 2], [30, 70, 0, 3]]).T, 0)
    out = make(weights(DELTA))(states, segments, *inputs)
    # Then only its own outputs and state are broken
    assert out[:3].isnan().all()
    assert out[3:].isfinite().all()
    assert states[1][2:].isfinite().all()


def test_inputs_are_remembered_in_their_dtype(make: Make) -> None:
    # Given bfloat16 inputs, when a sequence is computed in parts
    sequences = Sequences(make, DELTA, [make_inputs(DELTA, 40, 6, torch.bfloat16)])
    for length in (17, 2, 1, 20):
        sequences.step({0: [length]})
    # (Then the outputs are those of float32 arithmetic on the same inputs: `Sequences.step`)
    assert sequences.states[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "gates_first"), [(5, True), (45, False), (16, True)])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_gated_norms_of_the_kernels_are_those_of_torch(
    instruction_set: str, group: int, gates_first: bool, dtype: torch.dtype
) -> None:
    # Given groups that are no whole vectors, a row that is broken, and gates that are a part of wider rows
    generator, features = torch.Generator().manual_seed(1), 3 * group
    norm = GatedNorm(torch.randn(features, generator=generator), group, gates_first)
    x = torch.randn(9, features, generator=generator)
    x[4, 1] = torch.nan
    z = torch.randn(9, features + 2, generator=generator).to(dtype)[:, 1:-1]
    wanted = norm(x.clone(), z, 1e-5)
    # When the kernels compute them, all at once and one row by itself
    native = NativeGatedNorm(native_path(instruction_set, 2), norm)
    got = native(x.clone(), z, 1e-5)
    # Then they are torch's, and have the same bits
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(got, wanted, equal_nan=True, **tolerance)
    assert got[5:].isfinite().all()
    assert torch.equal(native(x[7:8].clone(), z[7:8], 1e-5)[0], got[7])
