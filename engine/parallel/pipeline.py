"""Pipeline parallelism (Huang et al. 2019, GPipe, section 2.3): stages of layers, and the micro-batches of a step.

A step is divided into M micro-batches of whole rows. Each of S stages computes its layers for one micro-batch after the
other, and sends the hidden states to the next stage, which computes them while this one computes the next micro-batch.
So a step takes M + S - 1 turns, and a stage has nothing to compute in S - 1 of them (the bubble). The last stage's
hidden states return to the first stage, which has embedding and head: so the leader samples from logits of its own
stage, and a head that is the embedding has no second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention import AttentionBackend, AttentionBatch, AttentionStep
from engine.config import CacheConfig, ScheduleConfig
from engine.models.base import Attend, ModelSpec
from engine.plan import CacheGroup
from engine.runner.memory import plan_cache

BALANCE_TOKENS: Final = {"cuda": 256, "cpu": 25}
"""Tokens that take as long to compute as the weights take to read, by kind of device. On an H100 990 TFLOP/s of
products in 16 bits stand against 3.35 TB/s: 296 tokens. On a CPU: as `benchmarks/stages.py` measures it, in float32."""


def divide_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Return the layers of each stage: equally many, or one more in some of the later ones, because the first one has
    embedding and head."""
    borders = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return tuple(map(range, borders, borders[1:]))


def stage_specs(spec: ModelSpec, num_stages: int) -> tuple[ModelSpec, ...]:
    """Return the model as the ranks of each stage have it: the cache is of the stage's own layers, and only the first
    stage has a head."""
    found = []
    for stage, layers in enumerate(divide_layers(spec.num_layers, num_stages)):
        others = [layer for layer in range(spec.num_layers) if layer not in layers or layer in spec.uncached_layers]
        found.append(replace(spec, generates=spec.generates and stage == 0, uncached_layers=tuple(others)))
    return tuple(found)


def held_groups(spec: ModelSpec, groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """Return the groups of the whole cache with those of their layers that a rank with `spec` stores, perhaps none."""
    held = {*spec.attending_layers}
    return tuple(replace(group, layers=tuple(layer for layer in group.layers if layer in held)) for group in groups)


def plan_stages(
    whole: ModelSpec,
    specs: Sequence[ModelSpec],
    caches: Sequence[CacheConfig],
    schedule: ScheduleConfig,
    limit: int,
    device: torch.device,
) -> tuple[CacheGroup, ...]:
    """Plan the cache of a model whose stages have `specs`, with the memory of `caches` for a rank of each. Block tables
    are the same in all stages, so a pool has as many blocks as the stage with the fewest can store.

    Args:
        whole: the model without stages.  limit: maximum tokens of a sequence.

    Raises:
        OutOfMemory: as `plan_cache`.
    """
    counts: dict[int | None, int] = {}
    for spec, cache in zip(specs, caches, strict=True):
        for group in plan_cache(spec, cache, schedule, limit, device):
            counts[group.window] = min(group.num_blocks, counts.get(group.window, group.num_blocks))
    return tuple(CacheGroup(layers, window, counts[window]) for window, layers in whole.window_layers.items())


def divide_step(
    batch: AttentionBatch, count: int | None, *, num_stages: int, block_size: int, device: str
) -> NDArray[np.int32]:
    """Divide a step into micro-batches of whole sequences with about as many tokens in each.

    A sequence may read a block that another one writes in the same step (a prefix that both have). It is never in an
    earlier micro-batch than that one, so there may be fewer micro-batches than wanted.

    Args:
        count: micro-batches; None: as many as pay.  block_size: tokens.  device: its kind.

    Returns:
        int32 [M], ascending: the sequence before which each micro-batch ends.
    """
    sequences = len(batch.starts)
    whole = np.array([sequences], dtype=np.int32)
    if num_stages == 1:
        return whole
    ends = np.cumsum(batch.counts)
    count = min(sequences, count or best_count(int(ends[-1]), num_stages, device))
    if count == 1:
        return whole
    borders = np.flatnonzero(_needed(batch, block_size)[:-1] <= np.arange(sequences - 1)) + 1
    if not len(borders):
        return whole
    wanted = ends[-1] * np.arange(1, count) / count
    nearest = np.abs(ends[borders - 1] - wanted[:, None]).argmin(axis=1)
    return np.concatenate((np.unique(borders[nearest]).astype(np.int32), whole))


def best_count(tokens: int, num_stages: int, device: str) -> int:
    """Return the number of micro-batches with which a step of so many tokens takes the shortest time.

    A turn takes w + c T / M: w to read the weights, and c for each of T tokens. So a step takes
    (M + S - 1) (w + c T / M), which is least at M = sqrt((S - 1) T c / w); w / c are `BALANCE_TOKENS`.
    """
    return max(1, round(sqrt((num_stages - 1) * tokens / BALANCE_TOKENS[device])))


def _needed(batch: AttentionBatch, block_size: int) -> NDArray[np.int64]:
    """Return int64 [B], ascending: the last sequence that writes what this one, or one before it, reads."""
    needed = np.arange(len(batch.starts))
    writer = np.repeat(needed, batch.counts)
    for slots, table in zip(batch.slot_mapping, batch.block_tables, strict=True):
        blocks = slots // block_size
        last = np.full(max(int(blocks.max()), int(table.max())) + 1, -1)
        last[blocks] = writer  # ascending, and the last assignment to a block stays
        needed = np.maximum(needed, last[table].max(axis=1))
    return np.maximum.accumulate(needed)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of a step.

    Attributes:
        tokens: of the step.
        wanted: as of `AttentionBatch`, among these tokens.
        prepare: prepares its attention.
    """

    tokens: slice
    wanted: NDArray[np.int32] | None
    prepare: Callable[[], Attend]


def micro_batches(
    batch: AttentionBatch, ends: NDArray[np.int32], attention: AttentionBackend, adapters: NDArray[np.int32] | None
) -> list[MicroBatch]:
    """Divide a step as `divide_step` says. `adapters`: as of `AttentionStep`, of the whole step."""
    found, first, token = [], 0, 0
    for end in ends.tolist():
        part = batch.rows(first, end)
        tokens = slice(token, token + int(part.counts.sum()))
        own = None if adapters is None else adapters[tokens]
        found.append(MicroBatch(tokens, part.wanted, partial(_attend, attention, part, own)))
        first, token = end, tokens.stop
    return found


def _attend(attention: AttentionBackend, batch: AttentionBatch, adapters: NDArray[np.int32] | None) -> Attend:
    return AttentionStep(attention, attention.prepare(batch), batch=batch, adapters=adapters)
