"""Experts are placed by their counted rows, so that no rank computes many more than the others."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.parallel.expert_placement import balanced_placement, check_expert_counts, read_expert_counts


def sums(counts: list[int], placed: tuple[int, ...], ranks: int) -> list[int]:
    return [sum(n for n, rank in zip(counts, placed, strict=True) if rank == one) for one in range(ranks)]


def test_busy_experts_are_on_different_ranks() -> None:
    counts = [90, 80, 10, 20, 5, 5, 1, 1]  # neighbours: 200 and 12
    placed = balanced_placement(counts, 2)
    assert placed == (0, 1, 0, 1, 0, 1, 0, 1)
    assert sums(counts, placed, 2) == [106, 106]


def test_equal_counts_are_placed_in_order() -> None:
    assert balanced_placement([0] * 6, 3) == (0, 0, 1, 1, 2, 2)


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_ranks_have_equally_many_experts_and_sums_that_differ_by_one_expert_at_most(
    ranks: int, each: int, data: st.DataObject
) -> None:
    counts = data.draw(st.lists(st.integers(0, 2**62), min_size=ranks * each, max_size=ranks * each))
    placed = balanced_placement(counts, ranks)
    assert Counter(placed) == dict.fromkeys(range(ranks), each)
    found = sums(counts, placed, ranks)
    assert max(found) - min(found) <= max(counts)


@given(st.lists(st.integers(0, 50), min_size=6, max_size=6))
def test_two_ranks_are_near_the_best_placement(counts: list[int]) -> None:
    best = min(
        max(sum(counts[i] for i in half), sum(counts) - sum(counts[i] for i in half))
        for half in combinations(range(6), 3)
    )
    assert max(sums(counts, balanced_placement(counts, 2), 2)) <= best * 4 / 3


def test_counts_are_read_as_they_were_saved(tmp_path: Path) -> None:
    counts = np.arange(12, dtype=np.int64).reshape(3, 4)
    np.save(tmp_path / "counts.npy", counts)
    read = read_expert_counts(tmp_path / "counts.npy")
    assert np.array_equal(read, counts)
    check_expert_counts(read, 3, 4)


def npy(header: str) -> bytes:
    """A file of numpy's format, version 1, with this header and no data."""
    return b"\x93NUMPY\x01\x00" + len(header + "\n").to_bytes(2, "little") + header.encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"counts.npy can't be read: .*No such file"),
        (b"", r"counts.npy can't be read"),
        (b"1,2\n3,4\n", r"counts.npy can't be read"),
        (np.ones((3, 4)), r"counts.npy is not an int64 array \[layers, experts\]; give a file with"),
        (np.ones(4, dtype=np.int64), "is not an int64 array"),
        (np.array([[{}]]), r"counts.npy can't be read"),
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (9223372036854775808, 1), }"), "can't be read"),
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1, "), "can't be read"),
    ],
)
def test_other_files_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "counts.npy"
    if isinstance(content, np.ndarray):
        np.save(path, content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineError, match=message):
        read_expert_counts(path)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.ones((4, 3), dtype=np.int64), r"has shape \[4, 3\], but the model has 3 layers with 4 experts"),
        (np.full((3, 4), -1, dtype=np.int64), "has a negative number"),
    ],
)
def test_counts_of_another_model_are_refused(counts: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check_expert_counts(counts, 3, 4)
