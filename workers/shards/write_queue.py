"""The queue of writes of a worker's open shards: begin records, notes, checkpoints, parts and releases. Parquet is
written in `pipeline.results.part_files`.

One executor thread makes all these writes, in the order in which they are submitted. The worker's loop submits them and
collects their outcomes between two steps of the engine. The loop waits only for writes that must be durable before it
continues; heartbeats and progress reports continue meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from datetime import datetime, timedelta
from typing import Final, TypeVar

from pipeline.ledger.records import ShardReport
from pipeline.ports import Clock, StoreError
from pipeline.runtime.inline_executor import InlineExecutor
from pipeline.worker_client.ports import ShardSink
from schemas.jobs.checkpoints import FinishedRows
from workers.model.loaded_model import LoadedModel, library_versions, speculation_facts
from workers.policies.retry import PolicyRetry
from workers.rows import Envelope, PreparedRow
from workers.settings import FIRST_CHECKPOINT_SECONDS, WorkerSettings
from workers.shards.checkpointer import Checkpointer, ShardSnapshot
from workers.shards.open_shard import OpenShard
from workers.translation.responses import ResponseBuilder

Result = TypeVar("Result")
RunningRow = tuple[OpenShard, PreparedRow]

WAIT_SECONDS: Final = 0.1
"""Interval between two progress reports while the loop waits for a write."""


class ShardWriter:
    """Submits the writes of one worker's shards and collects their outcomes. Only the worker's loop calls it.

    Args:
        while_waiting: called every `WAIT_SECONDS` while the loop waits for a write.

    Attributes:
        checkpointer: tracks which tokens and outcomes of the open shards are logged.
        builder: builds the results.
    """

    def __init__(
        self,
        model: LoadedModel,
        sink: ShardSink,
        clock: Clock,
        settings: WorkerSettings,
        while_waiting: Callable[[], None],
    ) -> None:
        self._is_awaited = False
        retry = PolicyRetry(clock, lambda: not self._is_awaited)
        self.builder = ResponseBuilder(model.tokenizer, model.limits.classifier, retry)
        self.checkpointer = Checkpointer(model.engine, self.builder, sink)
        self._model = model
        self._sink = sink
        self._now = clock.monotonic
        self._settings = settings
        self._while_waiting = while_waiting
        self._versions = library_versions()
        self._engine_epoch = clock.now() - timedelta(seconds=model.engine.clock())
        self._executor: Executor = InlineExecutor()
        self._commits: dict[Future[bool], OpenShard] = {}
        self._begin: tuple[OpenShard, Future[None]] | None = None
        self._checkpoint: Future[None] | None = None
        self._next_checkpoint: float | None = None  # None: the engine computes no row of a shard

    def start(self, executor: Executor) -> None:
        """Make the writes on `executor` from now on. It must run them in the order of their submission."""
        self._executor = executor

    @property
    def committing(self) -> list[OpenShard]:
        """Shards whose parts are being written."""
        return list(self._commits.values())

    @property
    def is_pending(self) -> bool:
        """Whether a begin record or a part is being written."""
        return self._begin is not None or bool(self._commits)

    # -- Parts

    def submit_commit(self, shard: OpenShard) -> None:
        """Build the shard's results and commit its part."""
        self._commits[self._executor.submit(self._commit, shard)] = shard

    def collect_commits(self) -> Iterator[tuple[OpenShard, bool | Exception]]:
        """Each shard whose commit has ended, with what `ShardSink.commit` returned or raised. Raises `StoreError`."""
        for future in [future for future in self._commits if future.done()]:
            outcome: bool | Exception
            try:
                outcome = future.result()
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - it concerns one shard; the worker continues with others
                outcome = error
            yield self._commits.pop(future), outcome

    def wait_for_commits(self) -> None:
        """Wait until all submitted commits have ended."""
        for future in list(self._commits):
            self._wait_for(future)

    def _commit(self, shard: OpenShard) -> bool:
        """Runs on the executor."""
        if shard.failure is not None:
            raise shard.failure
        self.checkpointer.build(shard, shard.finished, self._envelope(shard))
        stats = self._model.engine.stats()
        report = ShardReport(
            generated=shard.generated + shard.unlogged,
            exposed=max(self.checkpointer.exposed, shard.unlogged),
            busy_seconds=shard.busy_seconds,
            engine_started_at=None if shard.first_start is None else self._utc(shard.first_start),
            engine_finished_at=None if shard.last_end is None else self._utc(shard.last_end),
            engine={
                **self._model.facts,
                "preemptions": stats.preemptions,
                **speculation_facts(stats.speculation),
                **self._settings.policies.facts,
            },
            versions=self._versions,
        )
        return self._sink.commit(shard.work, FinishedRows(shard.built_rows, shard.built_usages), report)

    # -- Begin records and notes

    def write_begin(self, shard: OpenShard) -> Future[None]:
        """Record durably that the shard's attempt begins."""
        return self._executor.submit(self._sink.begin, shard.work)

    def submit_begin(self, shard: OpenShard) -> bool:
        """Write the begin record where no other one is being written. True: it has been submitted and has ended."""
        if self._begin is not None:
            return False
        written = self.write_begin(shard)
        self._begin = shard, written
        return written.done()

    def collect_begin(self) -> tuple[OpenShard, Future[None]] | None:
        """The shard of `submit_begin`, once its write has ended."""
        if self._begin is None or not self._begin[1].done():
            return None
        ended, self._begin = self._begin, None
        return ended

    def write_note(self, shard: OpenShard, rows: Sequence[int]) -> Future[None]:
        """Record durably that only these rows of the shard are computed from now on."""
        return self._executor.submit(self._sink.record, shard.work, rows)

    # -- Checkpoints

    def schedule_checkpoint(self) -> None:
        """Write the next checkpoint within `FIRST_CHECKPOINT_SECONDS`, whatever the interval is. Until an attempt's
        first checkpoint a death of the process leaves no record, and a row may have caused it."""
        at = self._now() + min(FIRST_CHECKPOINT_SECONDS, self._settings.checkpoint_seconds)
        self._next_checkpoint = at if self._next_checkpoint is None else min(self._next_checkpoint, at)

    def schedule_first_checkpoint(self) -> None:
        """As `schedule_checkpoint`, unless one is scheduled already."""
        if self._next_checkpoint is None:
            self.schedule_checkpoint()

    def checkpoint_if_due(self, shards: list[OpenShard], running: Iterable[RunningRow]) -> None:
        """Checkpoint the open shards when the interval has passed and no other checkpoint is being written."""
        if not shards:
            self._next_checkpoint = None
        now = self._now()
        if self._checkpoint is None and self._next_checkpoint is not None and now >= self._next_checkpoint:
            self._next_checkpoint = now + self._settings.checkpoint_seconds
            self._checkpoint = self.write_checkpoint(shards, running, final=False)

    def collect_checkpoint(self) -> None:
        """Raises what the last checkpoint of `checkpoint_if_due` raised, once it has ended."""
        if self._checkpoint is not None and self._checkpoint.done():
            self._checkpoint.result()
            self._checkpoint = None

    def write_checkpoint(self, shards: list[OpenShard], running: Iterable[RunningRow], *, final: bool) -> Future[None]:
        """Checkpoint these shards. `running`: all rows that the engine has.  `final`: their attempts end with it."""
        snapshots = self.take_snapshots(shards, running)
        return self._executor.submit(self.checkpointer.write, snapshots, self.checkpointer.sampled(), final=final)

    def take_snapshots(
        self, shards: list[OpenShard], running: Iterable[RunningRow]
    ) -> list[tuple[ShardSnapshot, Envelope]]:
        """The shards' new tokens and outcomes; `OpenShard.generated` counts these tokens afterwards."""
        rows: dict[int, list[PreparedRow]] = {id(shard): [] for shard in shards}
        for shard, row in running:
            if id(shard) in rows:
                rows[id(shard)].append(row)
        return [(self.checkpointer.snapshot(shard, rows[id(shard)]), self._envelope(shard)) for shard in shards]

    # -- Ends without a part

    def release(self, shard: OpenShard, generated: int) -> Future[None]:
        """Release the shard for other workers. `generated`: tokens that this attempt sampled for it."""
        return self._executor.submit(self._sink.release, shard.work, generated, shard.busy_seconds)

    def give_up(self, shard: OpenShard, error: Exception) -> Future[None]:
        """Release the shard, and record durably why its attempt failed."""
        generated = shard.generated + shard.unlogged
        return self._executor.submit(self._sink.give_up, shard.work, error, generated, shard.busy_seconds)

    def forget(self, shards: Iterable[OpenShard]) -> None:
        """Ignore the outcome of a begin record of these shards."""
        if self._begin is not None and any(shard is self._begin[0] for shard in shards):
            self._begin = None

    # -- Waiting

    def result_of(self, future: Future[Result]) -> Result:
        """Wait for a write; returns or raises its outcome. `while_waiting` is called meanwhile."""
        self._wait_for(future)
        return future.result()

    def _wait_for(self, future: Future[Result]) -> None:
        """Wait for a write. Rows whose answers wait for a content policy don't hold it up: their attempts end."""
        self._is_awaited = True
        while not future.done():
            self._while_waiting()
            wait([future], timeout=WAIT_SECONDS)
        self._is_awaited = False

    def _envelope(self, shard: OpenShard) -> Envelope:
        return Envelope(shard.work.job.id, shard.work.job.created_at, shard.work.attempt, self._utc)

    def _utc(self, seconds: float) -> datetime:
        """UTC of a time on the engine's clock."""
        return self._engine_epoch + timedelta(seconds=seconds)
