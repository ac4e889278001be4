"""A dry run of one worker: shards are read, tokenized and scheduled as the worker would do it, and nothing is computed
(engine/dry_run.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.dry_run import DryRun, StepWork
from engine.errors import RequestRefused
from pipeline.worker_client.ports import ShardWork
from workers.rows import PreparedRow
from workers.settings import WorkerSettings
from workers.shards.lookahead import Lookahead, engine_has_all
from workers.shards.open_shard import OpenShard, PreparedShard
from workers.shards.shard_reader import ShardReader


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """The steps that the worker would make.

    Attributes:
        steps: float64 [steps, 4], each step's tokens, logits, reads and pairs (`StepWork`).
        waiting: bool [steps], whether sequences waited for a row of the batch.
        progress: float64 [steps], prompt and answer tokens that are done after each step, cached ones included.
        rejected: requests that the worker would refuse.
        prompt_tokens, cached_tokens, generated_tokens: of all requests (`DryRun`).
    """

    steps: NDArray[np.float64]
    waiting: NDArray[np.bool_]
    progress: NDArray[np.float64]
    rejected: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


class ShardDryRun:
    """The dry run of one worker.

    Args:
        reader: prepares the shards; only its model's tokenizer and limits are used.
        dry_run: schedules the rows.  max_num_seqs: rows of its running batch.
    """

    def __init__(
        self, reader: ShardReader, dry_run: DryRun, max_num_seqs: int, settings: WorkerSettings | None = None
    ) -> None:
        self._reader = reader
        self._dry_run = dry_run
        self._settings = settings or WorkerSettings()
        timed = self._settings.request_timeout_seconds is not None
        self._lookahead = Lookahead(max_num_seqs, self._settings.watermark, timed=timed)
        self._shards: list[OpenShard] = []
        self._owners: dict[str, OpenShard] = {}
        self._rejected = 0

    def run(self, works: Iterable[ShardWork]) -> DryRunResult:
        """Schedule all shards in this order. Each is prepared when the worker would open it."""
        remaining, steps, progress = iter(works), list[StepWork](), list[float]()
        scheduler = self._dry_run.scheduler
        following = next(remaining, None)  # fetched ahead as by a worker, which then sees when no more follow
        while True:
            while following is not None and self._wants_shard():
                self._open(self._reader.prepare(following))
                following = next(remaining, None)
            self._feed_scheduler(last_open=following is None)
            if (done := self._dry_run.step()) is None:
                if following is None and not self._shards:
                    break
                continue
            step, ended = done
            steps.append(step)
            stats = scheduler.stats
            progress.append(stats.computed_tokens - stats.recomputed_tokens + stats.prefix_hit_tokens)
            for name in ended:
                self._owners.pop(name).num_finished += 1
            self._shards = [shard for shard in self._shards if not shard.is_done]
        table = np.array(steps, dtype=np.float64).reshape(-1, len(StepWork._fields))
        return DryRunResult(
            steps=table[:, :4],
            waiting=table[:, 4] > 0,
            progress=np.array(progress, dtype=np.float64),
            rejected=self._rejected,
            prompt_tokens=self._dry_run.prompt_tokens,
            cached_tokens=self._dry_run.cached_tokens,
            generated_tokens=self._dry_run.generated_tokens,
        )

    def _wants_shard(self) -> bool:
        has_room = len(self._shards) < self._settings.max_open_shards
        return has_room and self._lookahead.wants_shard(self._shards, self._dry_run.scheduler.num_waiting)

    def _open(self, shard: PreparedShard) -> None:
        self._rejected += len(shard.rejected)
        opened = OpenShard.open(shard)
        if not opened.is_done:
            self._shards.append(opened)

    def _feed_scheduler(self, *, last_open: bool) -> None:
        limit = self._lookahead.rows(last_open=last_open)
        for shard in self._shards:
            while shard.waiting and self._dry_run.scheduler.num_waiting < limit:
                self._add(shard, shard.waiting.popleft())
        self._shards = [shard for shard in self._shards if not shard.is_done]
        self._dry_run.scheduler.settle(more_to_come=not engine_has_all(self._shards, last_open=last_open))

    def _add(self, shard: OpenShard, row: PreparedRow) -> None:
        try:
            self._dry_run.add(row.request)
        except RequestRefused:
            shard.num_finished += 1
            self._rejected += 1
        else:
            self._owners[row.request.request_id] = shard
