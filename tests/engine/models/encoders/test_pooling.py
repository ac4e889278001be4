"""Pooling stays where the hidden states are: a device's tensors meet none of the host's."""

from __future__ import annotations

import pytest
import torch

from engine.models.encoders.pooling import Pooling, _Row, pool_padded

ELSEWHERE = torch.device("meta")
MODES: tuple[Pooling, ...] = ("cls", "last", "max", "mean", "weightedmean", "mean_sqrt_len")


@pytest.mark.parametrize("mode", MODES)
def test_given_states_on_a_device_when_a_prompt_is_pooled_in_chunks_then_its_vector_is_there(mode: Pooling) -> None:
    row = _Row(mode, skip=2)
    for start in (0, 5):
        row.add(torch.empty(5, 8, device=ELSEWHERE, dtype=torch.bfloat16), start)

    vector = row.vector(10)

    assert (vector.device, vector.shape, vector.dtype) == (ELSEWHERE, (8,), torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_given_states_on_a_device_when_a_batch_is_pooled_then_its_vectors_are_there(mode: Pooling) -> None:
    pooled = pool_padded(torch.empty(3, 7, 8, device=ELSEWHERE), [7, 2, 5], mode, [1, 0, 2])

    assert (pooled.device, pooled.shape, pooled.dtype) == (ELSEWHERE, (3, 8), torch.float32)
