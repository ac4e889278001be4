"""How far ahead of its need the engine gets rows, and when it may choose their order.

While more shards wait, the engine gets as many rows as it needs to go on, in the planner's order, which keeps readers
of a prefix together. Once the last one is open, it gets all that is left, and is told so: then it can see the end of
the run, and starts long answers in time. Should another shard come after all, it is as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from workers.shards.state import OpenShard

MOST_AHEAD: Final = 16
"""Times the running batch that the engine gets of what is left: each row of it is looked at for every checkpoint."""


class Lookahead:
    """How many rows wait in the engine.

    Args:
        max_num_seqs: rows of the running batch.
        watermark: see `WorkerSettings`.
        timed: requests have a deadline from when they are given to the engine: few may wait there.
    """

    def __init__(self, max_num_seqs: int, watermark: int | None, *, timed: bool) -> None:
        self._max_num_seqs = max_num_seqs
        self._watermark = watermark or 2 * max_num_seqs
        self._few = max(1, max_num_seqs // 8) if timed else 2 * max_num_seqs
        self._most = self._few if timed else MOST_AHEAD * max_num_seqs

    def wants_shard(self, shards: Sequence[OpenShard], num_waiting: int) -> bool:
        """Whether another shard should be opened beside these: too few rows are ready (`num_waiting` in the engine), or
        what is left of the shards ends before an answer as long as their longest would, so that such a one in the next
        shard had better start now."""
        ready = sum(len(shard.waiting) for shard in shards) + num_waiting
        left = sum(shard.expected_left for shard in shards)
        longest = max((shard.longest for shard in shards), default=0)
        return ready < self._watermark or left < longest * self._max_num_seqs

    def rows(self, *, last_open: bool) -> int:
        """How many rows may wait in the engine. `last_open`: no other shard is known of."""
        return self._most if last_open else self._few


def engine_has_all(shards: Sequence[OpenShard], *, last_open: bool) -> bool:
    """Whether the engine has all rows that are known of, and may start any of them first: where attempts have died,
    the planner's order tells who was running."""
    return last_open and not any(shard.waiting or shard.work.history.silent for shard in shards)
