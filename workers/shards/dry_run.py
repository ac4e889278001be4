"""A worker's shards, rehearsed: read, tokenized and given to the engine's scheduler as the worker would, with nothing
computed (engine/dry_run.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.dry_run import DryRun, StepWork
from engine.errors import RequestRefused
from pipeline.worker_client.protocol import ShardWork
from workers.rows import PreparedRow
from workers.settings import WorkerSettings
from workers.shards.lookahead import Lookahead, engine_has_all
from workers.shards.state import OpenShard, PreparedShard, ShardReader


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """What the worker would do.

    Attributes:
        steps: float64 [steps, 4], of each step the tokens, logits, reads and pairs (`StepWork`).
        waiting: bool [steps], whether sequences had to wait for a row.
        progress: float64 [steps], prompt and answer tokens known to be done after each step, cached ones included.
        refused: requests that the worker would refuse.
        prompt_tokens, cached_tokens, generated_tokens: of all requests (`DryRun`).
    """

    steps: NDArray[np.float64]
    waiting: NDArray[np.bool_]
    progress: NDArray[np.float64]
    refused: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


class ShardDryRun:
    """One worker's way through shards.

    Args:
        reader: prepares them; of its model only the tokenizer and the limits matter.
        rehearsal: the scheduler.  max_num_seqs: rows of its running batch.
    """

    def __init__(
        self, reader: ShardReader, rehearsal: DryRun, max_num_seqs: int, settings: WorkerSettings | None = None
    ) -> None:
        self._reader = reader
        self._rehearsal = rehearsal
        self._settings = settings or WorkerSettings()
        timed = self._settings.request_timeout is not None
        self._ahead = Lookahead(max_num_seqs, self._settings.watermark, timed=timed)
        self._shards: list[OpenShard] = []
        self._whose: dict[str, OpenShard] = {}
        self._refused = 0

    def run(self, works: Iterable[ShardWork]) -> DryRunResult:
        """All shards, in this order; they are prepared one by one, when they are due."""
        due, steps, progress = iter(works), list[StepWork](), list[float]()
        scheduler = self._rehearsal.scheduler
        following = next(due, None)  # fetched ahead of need, as a worker does: so it knows when there are no more
        while True:
            while following is not None and self._wants_shard():
                self._open(self._reader.prepare(following))
                following = next(due, None)
            self._feed(last_open=following is None)
            if (done := self._rehearsal.step()) is None:
                if following is None and not self._shards:
                    break
                continue
            step, ended = done
            steps.append(step)
            stats = scheduler.stats
            progress.append(stats.computed_tokens - stats.recomputed_tokens + stats.prefix_hit_tokens)
            for name in ended:
                self._whose.pop(name).num_finished += 1
            self._shards = [shard for shard in self._shards if not shard.done]
        table = np.array(steps, dtype=np.float64).reshape(-1, len(StepWork._fields))
        made = self._rehearsal
        return DryRunResult(
            steps=table[:, :4],
            waiting=table[:, 4] > 0,
            progress=np.array(progress, dtype=np.float64),
            refused=self._refused,
            prompt_tokens=made.prompt_tokens,
            cached_tokens=made.cached_tokens,
            generated_tokens=made.generated_tokens,
        )

    def _wants_shard(self) -> bool:
        room = len(self._shards) < self._settings.max_open_shards
        return room and self._ahead.wants_shard(self._shards, self._rehearsal.scheduler.num_waiting)

    def _open(self, shard: PreparedShard) -> None:
        self._refused += len(shard.refused)
        opened = OpenShard.open(shard)
        if not opened.done:
            self._shards.append(opened)

    def _feed(self, *, last_open: bool) -> None:
        limit = self._ahead.rows(last_open=last_open)
        for shard in self._shards:
            while shard.waiting and self._rehearsal.scheduler.num_waiting < limit:
                self._add(shard, shard.waiting.popleft())
        self._shards = [shard for shard in self._shards if not shard.done]
        self._rehearsal.scheduler.settle(more_to_come=not engine_has_all(self._shards, last_open=last_open))

    def _add(self, shard: OpenShard, row: PreparedRow) -> None:
        try:
            self._rehearsal.add(row.request)
        except RequestRefused:
            shard.num_finished += 1
            self._refused += 1
        else:
            self._whose[row.request.request_id] = shard
