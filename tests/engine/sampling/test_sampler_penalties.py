"""The penalty table against plain counting, over histories of sequences that come, grow and go."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device_transfer import HostTransfer
from engine.sampling.penalties import PenaltyTable

VOCAB = 12
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)


def penalised(
    line: list[float], prompt: list[int], output: list[int], factors: tuple[float, float, float]
) -> list[float]:
    """The penalised logits of one row, from the definitions."""
    repetition, frequency, presence = factors
    counts = Counter(output)
    for token in {*prompt, *output}:
        line[token] = line[token] / repetition if line[token] > 0 else line[token] * repetition
        line[token] -= counts[token] * frequency + (token in counts) * presence
    return line


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_table_counts_like_a_dictionary(data: st.DataObject) -> None:
    """Given sequences that take slots, gain tokens and leave, the penalties are always those of the living ones."""
    table = PenaltyTable()
    living: dict[int, tuple[list[int], list[int]]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["come", "grow", "go"]))
        if action == "come":
            prompt, output = data.draw(tokens), data.draw(tokens)
            slot = table.assign(np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32))
            assert slot not in living
            living[slot] = (prompt, output)
        elif living and action == "grow":
            new = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(living), max_size=len(living)))
            table.add(np.array(list(living), dtype=np.int64), np.array(new, dtype=np.int32))
            for (_, output), token in zip(living.values(), new, strict=True):
                output.append(token)
        elif living:
            slot = data.draw(st.sampled_from(list(living)))
            table.release(slot)
            del living[slot]
    # an unlisted sequence is never asked for repetition penalties: every prompt has a token
    factors = [(1.5 if prompt or output else 1.0, 0.25, 0.75) for prompt, output in living.values()]
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (len(living), VOCAB)).astype(np.float32))
    expected = [
        penalised(line, *sequence, factor)
        for line, sequence, factor in zip(logits.tolist(), living.values(), factors, strict=True)
    ]
    columns = np.array(factors, dtype=np.float32).reshape(-1, 3).T
    table.apply(
        logits, np.arange(len(living)), np.array(list(living), dtype=np.int64),
        *map(np.ascontiguousarray, columns), HostTransfer(),
    )  # fmt: skip
    np.testing.assert_allclose(logits.numpy(), np.array(expected).reshape(-1, VOCAB), rtol=1e-6, atol=1e-6)


def test_slots_and_lists_grow_on_demand() -> None:
    table = PenaltyTable()
    vocab = 1000
    slots = np.array([table.assign(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)) for _ in range(20)])
    for token in range(vocab):
        table.add(slots, np.full(20, token, dtype=np.int32))
    late = table.assign(np.arange(vocab, dtype=np.int32), np.arange(vocab, dtype=np.int32))
    logits = torch.zeros(21, vocab)
    one, zero = np.ones(21, dtype=np.float32), np.zeros(21, dtype=np.float32)
    table.apply(logits, np.arange(21), np.append(slots, late), one, one, zero, HostTransfer())
    assert torch.equal(logits, torch.full((21, vocab), -1.0))
