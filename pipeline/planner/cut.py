"""Where the running order is cut into shards: near a target of tokens, never inside what must stay together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST_UNIT = 4
"""A group is kept whole up to so many times the target; beyond that a lost prefix costs less than a huge shard."""


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """What a shard may hold: `tokens` is aimed at; `rows` computed and `copies` waiting are never exceeded."""

    tokens: int
    rows: int
    copies: int


def cut(
    tokens: NDArray[np.int64],
    copies: NDArray[np.int64],
    models: NDArray[np.int32],
    joined: NDArray[np.bool_],
    limits: ShardLimits,
) -> list[tuple[int, int]]:
    """Ranges [start, end) of the running order, one a shard, none empty.

    Args (all in running order, [requests]):
        tokens: estimated, prompt and answers.  copies: requests that take this one's answer.
        models: a shard has one model.  joined: must stay with the request before it.
    """
    count = len(tokens)
    if count == 0:
        return []
    begins = _unit_starts(tokens, copies, joined, limits)
    unit_tokens = np.add.reduceat(tokens, begins).tolist()
    unit_copies = np.add.reduceat(copies, begins).tolist()
    unit_models = models[begins].tolist()
    ends = [*begins[1:].tolist(), count]
    shards: list[tuple[int, int]] = []
    start = sum_tokens = sum_copies = 0
    model = unit_models[0]
    for begin, end, more_tokens, more_copies, unit_model in zip(
        begins.tolist(), ends, unit_tokens, unit_copies, unit_models, strict=True
    ):
        full = (
            sum_tokens + more_tokens > limits.tokens
            or end - start > limits.rows
            or sum_copies + more_copies > limits.copies
            or unit_model != model
        )
        if full and begin > start:
            shards.append((start, begin))
            start, sum_tokens, sum_copies, model = begin, 0, 0, unit_model
        sum_tokens += more_tokens
        sum_copies += more_copies
    shards.append((start, count))
    return shards


def _unit_starts(
    tokens: NDArray[np.int64], copies: NDArray[np.int64], joined: NDArray[np.bool_], limits: ShardLimits
) -> NDArray[np.int64]:
    """Where the runs of joined requests begin; a run too large for any shard falls apart into single requests."""
    begins = np.flatnonzero(~joined)
    sizes = np.diff(np.append(begins, len(tokens)))
    too_large = (
        (np.add.reduceat(tokens, begins) > LARGEST_UNIT * limits.tokens)
        | (sizes > limits.rows)
        | (np.add.reduceat(copies, begins) > limits.copies)
    )
    return np.flatnonzero(~joined | np.repeat(too_large, sizes))
