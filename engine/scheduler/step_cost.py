"""The attention cost of one step: keys and values that it reads, and (query, key) pairs that it computes.

Both follow from the plan and the block tables alone, so they can be counted without a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.plan import StepPlan


@dataclass(frozen=True, slots=True)
class GroupWork:
    """Attention of one cache group (layers with the same window) in a step.

    Attributes:
        read_tokens: cached tokens that the step's queries see, those in shared blocks counted once.
        pairs: (query, key) pairs, the step's own tokens as keys included.
        logits_pairs: of them, those of positions whose logits are needed.
    """

    read_tokens: int
    pairs: int
    logits_pairs: int


def cache_windows(windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Return the windows of an engine's cache groups, in its order: full attention first, then by size."""
    return tuple(sorted(set(windows), key=lambda window: (window is not None, window or 0)))


def count_group_work(
    plan: StepPlan, table: NDArray[np.int32], window: int | None, block_size: int, seen: NDArray[np.bool_]
) -> GroupWork:
    """Count the attention work of the plan's rows in one cache group.

    Args:
        table: int32 [R, blocks], the group's block tables.
        seen: bool [at least the group's blocks], all False; scratch, restored before return.
    """
    starts, counts = plan.starts.astype(np.int64), plan.counts.astype(np.int64)
    first = np.zeros_like(starts) if window is None else np.maximum(starts - window + 1, 0)
    first = np.minimum(first, starts)
    read = int((starts - first).sum())
    blocks = np.arange(-(-int(starts.max()) // block_size))
    held = (blocks >= (first // block_size)[:, None]) & (blocks < -(-starts // block_size)[:, None])
    ids = table[plan.rows][:, : len(blocks)][held]
    seen[ids] = True
    repeats = len(ids) - int(np.count_nonzero(seen))
    seen[ids] = False
    whole = counts if window is None else np.clip(window - starts, 0, counts)
    pairs = whole * starts + whole * (whole + 1) // 2
    if window is not None:
        pairs += (counts - whole) * window
    keys = starts + counts if window is None else np.minimum(starts + counts, window)
    last = int(keys[plan.samples].sum())
    scored = int(plan.num_logits.sum()) > int(plan.samples.sum())  # then more than last positions have logits
    return GroupWork(max(0, read - repeats * block_size), int(pairs.sum()), int(pairs.sum()) if scored else last)
