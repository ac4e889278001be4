"""Cutting the running order into shards: near a target of tokens, never inside a group of joined requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIRST_SHARE = 64
"""With small first shards, a model's first one aims at the target divided by this."""

LARGEST_UNIT = 4
"""A group stays in one shard up to this multiple of the target; beyond it a lost prefix costs less than a huge
shard."""


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """Limits of a shard: `tokens` is a target; computed `rows` and waiting `copies` are never exceeded.

    Attributes:
        small_first: each model's first shard aims at `tokens` / `FIRST_SHARE`, each next one at twice as many: the
            first ones reveal the cost of the work before much of it has begun. They split groups.
    """

    tokens: int
    rows: int
    copies: int
    small_first: bool = False


def cut(
    tokens: NDArray[np.int64],
    copies: NDArray[np.int64],
    models: NDArray[np.int32],
    joined: NDArray[np.bool_],
    limits: ShardLimits,
) -> list[tuple[int, int]]:
    """Ranges [start, end) of the running order, one a shard, none empty.

    Args (all in running order, [requests]):
        tokens: estimated, prompt and answers.  copies: number of requests that take this one's answer.
        models: a shard has one model.  joined: must stay with the previous request.
    """
    count = len(tokens)
    if count == 0:
        return []
    if limits.small_first:
        joined = joined & ~_in_first_shards(tokens, models, limits)
    begins = _unit_starts(tokens, copies, joined, limits)
    unit_tokens = np.add.reduceat(tokens, begins).tolist()
    unit_copies = np.add.reduceat(copies, begins).tolist()
    unit_models = models[begins].tolist()
    ends = [*begins[1:].tolist(), count]
    shards: list[tuple[int, int]] = []
    start = sum_tokens = sum_copies = 0
    model = unit_models[0]
    first = max(1, limits.tokens // FIRST_SHARE) if limits.small_first else limits.tokens
    aim = first
    for begin, end, more_tokens, more_copies, unit_model in zip(
        begins.tolist(), ends, unit_tokens, unit_copies, unit_models, strict=True
    ):
        full = (
            sum_tokens + more_tokens > aim
            or end - start > limits.rows
            or sum_copies + more_copies > limits.copies
            or unit_model != model
        )
        if full and begin > start:
            shards.append((start, begin))
            aim = min(2 * aim, limits.tokens) if unit_model == model else first
            start, sum_tokens, sum_copies, model = begin, 0, 0, unit_model
        sum_tokens += more_tokens
        sum_copies += more_copies
    shards.append((start, count))
    return shards


def _in_first_shards(tokens: NDArray[np.int64], models: NDArray[np.int32], limits: ShardLimits) -> NDArray[np.bool_]:
    """A mask of the requests before a model's shards reach their full size."""
    starts = np.flatnonzero(np.diff(models, prepend=models[0] - 1))
    before = np.cumsum(tokens) - tokens
    of_model = before - np.repeat(before[starts], np.diff(np.append(starts, len(tokens))))
    return of_model < limits.tokens


def _unit_starts(
    tokens: NDArray[np.int64], copies: NDArray[np.int64], joined: NDArray[np.bool_], limits: ShardLimits
) -> NDArray[np.int64]:
    """Start indices of the runs of joined requests; a run too large for any shard is split into single requests."""
    begins = np.flatnonzero(~joined)
    sizes = np.diff(np.append(begins, len(tokens)))
    too_large = (
        (np.add.reduceat(tokens, begins) > LARGEST_UNIT * limits.tokens)
        | (sizes > limits.rows)
        | (np.add.reduceat(copies, begins) > limits.copies)
    )
    return np.flatnonzero(~joined | np.repeat(too_large, sizes))
