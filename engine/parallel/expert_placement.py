"""Placement of a mixture's experts on ranks: neighbours, or balanced by counted rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError


def balanced_placement(counts: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Place a layer's experts so that the ranks' sums of `counts` are nearly equal and their numbers of experts are.

    Longest first (Graham 1969, section 5), each on the rank with the smallest sum that has room left, as in
    DeepSeek-AI's EPLB (`balanced_packing`). Equal sums go to the lowest rank.

    Args:
        counts: rows of each expert; their number is divisible by `ranks`.

    Returns:
        each expert's rank.
    """
    sums, free = [0] * ranks, [len(counts) // ranks] * ranks
    placed = [0] * len(counts)
    for expert in sorted(range(len(counts)), key=lambda expert: -counts[expert]):
        rank = min((rank for rank in range(ranks) if free[rank]), key=sums.__getitem__)
        placed[expert] = rank
        sums[rank] += counts[expert]
        free[rank] -= 1
    return tuple(placed)


def read_expert_counts(path: str | Path) -> NDArray[np.int64]:
    """Read int64 [layers, experts] that `numpy.save` has written.

    Raises:
        EngineError: the file is not there, or is not that.
    """
    fix = "give a file with Engine.expert_load().rows that numpy.save has written, or leave it out"
    try:
        counts = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header raises anything: numpy evaluates it as Python's literals
        raise EngineError(f"expert_counts {path} can't be read: {error}; {fix}") from error
    if not isinstance(counts, np.ndarray) or counts.dtype != np.int64 or counts.ndim != 2:
        raise EngineError(f"expert_counts {path} is not an int64 array [layers, experts]; {fix}")
    return counts


def check_expert_counts(counts: NDArray[np.int64], layers: int, experts: int) -> None:
    """Check that they are of a model with so many layers, and experts in each.

    Raises:
        EngineError: they are not.
    """
    if counts.shape != (layers, experts):
        raise EngineError(
            f"expert_counts has shape {list(counts.shape)}, but the model has {layers} layers with {experts} experts; "
            "give the counts of this model"
        )
    if (counts < 0).any():
        raise EngineError("expert_counts has a negative number; give counts of rows, 0 or more")
