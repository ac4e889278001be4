"""How many rows the engine gets ahead of need, and when the scheduler may choose their order.

While more shards follow, the engine gets a few rows ahead, in the planner's order, which groups rows with a common
prefix. Once the last shard is open, the engine gets all remaining rows, and the scheduler may reorder them: it then
starts long answers early enough for the end of the run. If another shard follows all the same, the first rule holds
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from workers.shards.open_shard import OpenShard

MAX_BATCHES_AHEAD: Final = 16
"""Limit of the remaining rows that the engine gets, in running batches: a checkpoint visits each row in the engine."""


class Lookahead:
    """Decides how many rows may wait in the engine.

    Args:
        max_num_seqs: rows of the running batch.
        watermark: see `WorkerSettings`.
        timed: requests have a deadline that counts from when the engine gets them, so only a few may wait there.
    """

    def __init__(self, max_num_seqs: int, watermark: int | None, *, timed: bool) -> None:
        self._max_num_seqs = max_num_seqs
        self._watermark = watermark or 2 * max_num_seqs
        self._min_ahead = max(1, max_num_seqs // 8) if timed else 2 * max_num_seqs
        self._max_ahead = self._min_ahead if timed else MAX_BATCHES_AHEAD * max_num_seqs

    def wants_shard(self, shards: Sequence[OpenShard], num_waiting: int) -> bool:
        """Whether another shard should be opened: too few rows are ready (`num_waiting` of them in the engine), or the
        remaining rows of these shards end before an answer as long as their longest one would. A long answer of the
        next shard should then start now."""
        ready = sum(len(shard.waiting) for shard in shards) + num_waiting
        left = sum(shard.expected_tokens_left for shard in shards)
        longest = max((shard.longest_tokens for shard in shards), default=0)
        return ready < self._watermark or left < longest * self._max_num_seqs

    def rows(self, *, last_open: bool) -> int:
        """How many rows may wait in the engine. `last_open`: the source has no other shard."""
        return self._max_ahead if last_open else self._min_ahead


def engine_has_all(shards: Sequence[OpenShard], *, last_open: bool) -> bool:
    """Whether the engine has all known rows and may start any of them first. Where attempts have died it may not: the
    planner's order then shows which rows were running."""
    return last_open and not any(shard.waiting or shard.work.history.silent for shard in shards)
