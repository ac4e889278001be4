"""Divides an engine step's time among the open shards, so that each job pays for its rows only."""

from __future__ import annotations

from collections.abc import Sequence

from engine.step_engine import StepEngine
from workers.shards.open_shard import OpenShard


def shares_of_step(engine: StepEngine, shards: Sequence[OpenShard], max_rows: int) -> list[tuple[OpenShard, float]]:
    """Each shard's share of the next step. The shares add up to 1, or less when the step has rows of the lane.

    A step's time is divided by rows of the batch, one for each choice. The engine doesn't report which choices have
    one. The shares assume the lane's first, then those of the shards in the order in which they were added, which is
    close to the engine's order.

    Args:
        max_rows: rows that the engine computes at once.
    """
    total = engine.num_running + engine.num_waiting
    left = slots = max(1, min(total, max_rows))
    left -= max(0, total - sum(shard.num_in_engine for shard in shards))  # the lane's
    found = []
    for shard in shards:
        if left <= 0:
            break
        if taken := min(shard.num_in_engine, left):
            found.append((shard, taken / slots))
            left -= taken
    return found
