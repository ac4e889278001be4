"""Draws by radix selection, as a device makes them: bit for bit those of the lists and sorts of a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.request import Request, SamplingParams, as_token_ids
from engine.sampling.radix_select import leading, order_keys
from engine.sampling.sampler import Sampler
from tests.engine.runner.host_sync import ForbidHostSync

VOCAB = 3000
CPU = torch.device("cpu")


def samplers(params: list[SamplingParams]) -> tuple[Sampler, Sampler]:
    """Two samplers: one that synchronizes with the device in between, and one that never does."""
    pair = Sampler(len(params), VOCAB, (), CPU), Sampler(len(params), VOCAB, (), CPU)
    for sampler in pair:
        for row, each in enumerate(params):
            sampler.assign(row, Request(str(row), as_token_ids([1]), each), 0, as_token_ids([1]), 1)
    pair[1]._may_synchronize = False
    return pair


def logits(kind: str, rows: int, rng: np.random.Generator) -> torch.Tensor:
    values = rng.normal(0, 3, (rows, VOCAB)).astype(np.float32)
    if kind == "ties":  # what a head in bfloat16 gives
        values = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    elif kind == "flat":
        values = np.round(values / 20)
    elif kind == "equal":
        values[:] = -0.0
        values[:, ::3] = 0.0
    elif kind == "banned":
        values[rng.random(values.shape) < 0.97] = -np.inf
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "equal", "banned"])
def test_the_same_tokens_as_lists_and_sorts(kind: str) -> None:
    rng = np.random.default_rng(7)
    params = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=int(rng.integers(1 << 40)))
        for temperature in (0.3, 1.0, 40.0)
        for top_k in (0, 1, 7, 200, 900)
        for top_p in (1.0, 1e-9, 0.5, 0.97)
        for min_p in (0.0, 0.1, 1e-7)
    ]  # fmt: skip
    synchronizing, asynchronous = samplers(params)
    rows = np.arange(len(params), dtype=np.int32)
    for position in range(3):
        at, outputs = np.full(len(rows), position, dtype=np.int32), np.zeros(len(rows), dtype=np.int32)
        values = logits(kind, len(rows), rng)
        want = synchronizing.sample(values.clone(), rows, at, outputs)
        got = asynchronous.unpack(asynchronous.draw(values.clone(), rows, at, outputs).numpy(), rows)
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert got.failed.tolist() == want.failed.tolist()


def test_keys_are_ordered_as_the_values_are() -> None:
    values = torch.tensor([-float("inf"), -3.4e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1.5, 3.4e38, float("inf")])
    keys = order_keys(values).tolist()
    assert keys == sorted(keys)
    assert keys[4] == keys[5]
    assert len(set(keys)) == len(keys) - 1
    assert keys[0] >= 0
    assert keys[-1] < 1 << 32


def test_a_prefix_is_cut_inside_a_tie_by_index() -> None:
    keys = order_keys(torch.tensor([[2.0, 5.0, 2.0, 5.0, 2.0, 1.0]]))
    amounts = torch.tensor([[10, 30, 10, 30, 10, 5]])
    retained = {
        wanted: leading(keys, amounts, torch.tensor([[wanted]])).long().tolist()[0] for wanted in (0, 31, 61, 71, 999)
    }
    assert retained == {
        0: [0, 1, 0, 0, 0, 0],
        31: [0, 1, 0, 1, 0, 0],
        61: [1, 1, 0, 1, 0, 0],
        71: [1, 1, 1, 1, 0, 0],
        999: [1, 1, 1, 1, 1, 1],
    }


def test_lines_that_are_not_finite_fail_alone() -> None:
    params = [SamplingParams(top_p=0.9, seed=i) for i in range(3)]
    _, asynchronous = samplers(params)
    values = logits("normal", 3, np.random.default_rng(1))
    values[1, 5] = float("nan")
    rows = np.arange(3, dtype=np.int32)
    packed = asynchronous.draw(values, rows, rows, np.zeros(3, dtype=np.int32)).numpy()
    assert asynchronous.unpack(packed, rows).failed.tolist() == [False, True, False]


def test_the_host_never_waits_for_the_device() -> None:
    rng = np.random.default_rng(3)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=2),
        SamplingParams(temperature=0.8, top_p=0.6, seed=3),
        SamplingParams(temperature=0.8, top_k=5, min_p=0.1, seed=4),
        SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4, stop_token_ids=(7,), logit_bias={3: 1.0}),
    ]
    _, asynchronous = samplers(params * 3)
    rows = np.arange(len(params) * 3, dtype=np.int32)
    values = logits("normal", len(rows), rng)

    with ForbidHostSync():
        asynchronous.draw(values.clone(), rows, rows, np.zeros(len(rows), dtype=np.int32))
    synchronizing, _ = samplers(params * 3)
    with pytest.raises(AssertionError, match="the host waits for"), ForbidHostSync():
        synchronizing.draw(values, rows, rows, np.zeros(len(rows), dtype=np.int32))
