"""A worker's side of the pipeline: takes shard names from the queue, shards from the ledger, and commits parts.

Nothing here trusts the queue: a name that comes twice, too late or for a shard already done is dropped after one look
at the ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.ledger import JobLedger, LedgerError
from pipeline.ports import Heartbeats, ShardQueue, ShardTask, World
from pipeline.records import AttemptRecord, PartSummary, RepeatedRecord
from pipeline.results import PartWriter, part_schema, shard_results
from pipeline.worker_api import ShardReport, ShardWork
from schemas.job import Job, ShardRef, Usage
from schemas.results import ResultRow

OpenLedger = Callable[[str], JobLedger]
"""The ledger of a job, by its id."""


@dataclass(slots=True)
class _KnownJob:
    ledger: JobLedger
    job: Job
    shards: dict[int, ShardRef]
    segments: int = 0


class ShardClient:
    """`ShardSource` and `ShardSink` of one worker. Threads of the worker may share it.

    Args:
        worker: the worker's name, unique among those that live.
        no_more: tells that no shard will ever come again.
    """

    def __init__(
        self,
        worker: str,
        world: World,
        open_ledger: OpenLedger,
        queue: ShardQueue,
        heartbeats: Heartbeats,
        no_more: Callable[[], bool],
    ) -> None:
        self.worker = worker
        self._world = world
        self._open_ledger = open_ledger
        self._queue = queue
        self._heartbeats = heartbeats
        self._no_more = no_more
        self._lock = threading.Lock()
        self._jobs: dict[str, _KnownJob] = {}
        self._held: set[tuple[str, int]] = set()

    # -- ShardSource

    def take(self, timeout: float) -> ShardWork | None:
        """The next shard that is neither committed nor held here, or None after `timeout` seconds."""
        clock = self._world.clock
        until = clock.monotonic() + timeout
        while (task := self._queue.take(max(0.0, until - clock.monotonic()))) is not None:
            if (task.job, task.shard) in self._held:
                continue
            known = self._known(task)
            if known.ledger.has_part(task.shard) or known.ledger.closing() is not None:
                continue
            self._hold(task.job, task.shard)
            try:
                return self._begin(known, task.shard)
            except BaseException:
                self._let_go(task.job, task.shard)
                raise
        return None

    def finished(self) -> bool:
        """True when no shard will ever come again."""
        return self._no_more()

    # -- ShardSink

    def commit(self, work: ShardWork, rows: Sequence[ResultRow], report: ShardReport) -> bool:
        """Make the shard's part; False when another attempt's part stands. Raises `PipelineError`."""
        known = self._jobs[work.job.id]
        won = self._write_part(known.ledger, work, shard_results(rows, work.table), report)
        if not won:
            self._record_repeated(known.ledger, work, report)
        self._let_go(work.job.id, work.shard)
        return won

    def release(self, work: ShardWork, report: ShardReport | None = None) -> None:
        """Give the shard back undone; `report` says what was computed for nothing."""
        if report is not None:
            self._record_repeated(self._jobs[work.job.id].ledger, work, report)
        self._let_go(work.job.id, work.shard)

    def holding(self, shards: Sequence[ShardWork]) -> None:
        """The heartbeat: the worker lives and works on exactly these."""
        self._heartbeats.beat(self.worker, {(work.job.id, work.shard) for work in shards})

    # -- inside

    def _known(self, task: ShardTask) -> _KnownJob:
        known = self._jobs.get(task.job)
        if known is None:
            ledger = self._open_ledger(task.job)
            known = self._jobs[task.job] = _KnownJob(ledger, ledger.job(), {})
        if task.shard not in known.shards:
            for segment in known.ledger.segments(known.segments):
                known.shards.update((shard.number, shard) for shard in segment.shards)
                known.segments = segment.index + 1
        if task.shard not in known.shards:
            raise LedgerError(f"{known.ledger.place()}: shard {task.shard} was queued, but no plan segment has it")
        return known

    def _begin(self, known: _KnownJob, shard: int) -> ShardWork:
        now = self._world.clock.now()
        attempt_id = self._world.random.token(8).hex()
        data = known.ledger.read_shard(known.shards[shard])
        record = known.ledger.begin_attempt(
            shard,
            lambda number: AttemptRecord(attempt=number, attempt_id=attempt_id, worker=self.worker, started_at=now),
        )
        table = pq.read_table(pa.BufferReader(data))
        return ShardWork(known.job, shard, record.attempt, attempt_id, table, now)

    def _write_part(self, ledger: JobLedger, work: ShardWork, table: pa.Table, report: ShardReport) -> bool:
        path = self._world.scratch / f"part-{work.shard:05d}-{work.attempt_id}.parquet"
        writer = PartWriter(path, part_schema(work.table.schema))
        try:
            writer.append(table)
            writer.finish(
                PartSummary(
                    job=work.job.id,
                    part=work.shard,
                    attempt=work.attempt,
                    attempt_id=work.attempt_id,
                    worker=self.worker,
                    counts=writer.counts(),
                    usage=report.usage,
                    started_at=work.started_at,
                    committed_at=self._world.clock.now(),
                    engine_started_at=report.engine_started_at,
                    engine_finished_at=report.engine_finished_at,
                    engine=dict(report.engine),
                    versions=dict(report.versions),
                )
            )
        except BaseException:
            writer.abandon()
            raise
        return ledger.create_part(work.shard, path)

    def _record_repeated(self, ledger: JobLedger, work: ShardWork, report: ShardReport) -> None:
        ledger.record_repeated(
            work.shard, RepeatedRecord(attempt_id=work.attempt_id, usage=computed_only(report.usage))
        )

    def _hold(self, job: str, shard: int) -> None:
        with self._lock:
            self._held.add((job, shard))
            self._heartbeats.beat(self.worker, self._held)

    def _let_go(self, job: str, shard: int) -> None:
        with self._lock:
            self._held.discard((job, shard))
            self._heartbeats.beat(self.worker, self._held)


def computed_only(usage: Usage) -> Usage:
    """What a lost attempt adds to a job's usage: all that it computed is repeated, nothing is a result."""
    return Usage(
        repeated=usage.prompt - usage.cached + usage.completion, drafted=usage.drafted, accepted=usage.accepted
    )
