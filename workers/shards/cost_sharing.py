"""Whose a step of the engine is: what jobs pay for when a worker computes several shards and the lane at once."""

from __future__ import annotations

from collections.abc import Sequence

from engine.embedding.embedder import StepEngine
from workers.shards.state import OpenShard


def shares_of_step(
    engine: StepEngine, shards: Sequence[OpenShard], rows: int, most: int
) -> list[tuple[OpenShard, float]]:
    """The shards' shares of the step that comes; together 1, or less where the lane has rows in it.

    A step's time is shared by rows. The engine doesn't say whose rows have a slot: the lane's go first, then those of
    the shards in the order in which they were given to it, which is close to what it does.

    Args:
        rows: of the shards, that the engine has.  most: rows that it computes at once.
    """
    given = engine.num_running + engine.num_waiting
    left = slots = max(1, min(given, most))
    left -= max(0, given - rows)  # the lane's
    found = []
    for shard in shards:
        if left <= 0:
            break
        if taken := min(shard.in_engine, left):
            found.append((shard, taken / slots))
            left -= taken
    return found
