"""Perplexity through the engine's own log-probabilities, checked against transformers; and its differences."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from perplexity import PROSE, PROSE_SHA256, compare, measure, windows
from transformers import AutoModelForCausalLM


def test_given_the_text_when_it_is_hashed_then_it_is_the_one_of_the_published_results() -> None:
    assert hashlib.sha256(PROSE.read_bytes()).hexdigest() == PROSE_SHA256


def test_given_ids_when_they_are_cut_then_windows_are_whole_and_side_by_side() -> None:
    assert windows(range(10), size=3, tokens=100) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert windows(range(10), size=3, tokens=7) == [[0, 1, 2], [3, 4, 5]]
    assert windows(range(2), size=3, tokens=7) == []
    assert windows(range(10), size=3, tokens=100, start=[99]) == [
        [99, 0, 1],
        [99, 2, 3],
        [99, 4, 5],
        [99, 6, 7],
        [99, 8, 9],
    ]


def test_given_scores_when_they_are_compared_then_the_difference_is_that_of_the_perplexities() -> None:
    better = np.array([[-1.0, -1.0], [-2.0, -2.0]])
    worse = better - np.array([[0.1, 0.1], [0.3, 0.1]])

    found = compare(worse, better)

    assert found.relative == pytest.approx(math.exp(0.15) - 1)
    assert found.standard_error == pytest.approx(math.exp(0.15) * 0.05)  # windows differ by 0.1 and 0.2
    assert found.largest_token == pytest.approx(0.3)
    assert compare(better, better).relative == 0.0


def test_given_a_model_when_it_is_measured_then_float32_agrees_with_transformers_and_bf16_differs_a_little(
    tiny_model: Callable[[str], Path],
) -> None:
    folder = tiny_model("llama")
    ids = np.random.default_rng(0).integers(3, 257, 96).tolist()
    prompts = windows(ids, size=32, tokens=96)
    named = [
        ("float32", {"dtype": "float32", "attention": "reference", "threads": 1}),
        ("bf16", {"dtype": "bfloat16", "threads": 1}),
        ("one-by-one", {"dtype": "float32", "threads": 1, "schedule.max_chunk_tokens": 1}),
    ]

    reference, bf16, one_by_one = measure(folder, named, prompts)

    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        losses = [float(oracle(torch.tensor([window]), labels=torch.tensor([window])).loss) for window in prompts]
    assert reference["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert 0 < abs(bf16["against"]["float32"]["relative"]) < 0.1
    assert abs(one_by_one["against"]["float32"]["relative"]) < 1e-4
    assert set(one_by_one["against"]) == {"float32", "bf16"}
