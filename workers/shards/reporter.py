"""Reports the state of a worker's loop: heartbeats with load and metrics for the dispatcher, progress for an
observer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.request import Completion
from pipeline.ports import Clock
from pipeline.worker_client.ports import RevokedShards, WorkerLoad
from schemas.jobs.job import Tier
from workers.model.loaded_model import LoadedModel
from workers.observability.metrics import MetricsReader
from workers.observability.progress import RateMeter, WorkerCounts, WorkerObserver, WorkerProgress
from workers.policies.counts import PolicyCounts
from workers.rows import ComputedRow, RejectedRow
from workers.shards.heartbeats import HeartbeatSender
from workers.shards.open_shard import OpenShard, PreparedShard
from workers.side_work import SideWork
from workers.translation.responses import failure_of


class WorkerReporter:
    """Counts rows and shards, and reports when a report is due. Only the worker's loop calls it."""

    def __init__(
        self,
        model: LoadedModel,
        clock: Clock,
        side_work: SideWork,
        observer: WorkerObserver | None,
        report_seconds: float,
        policies: PolicyCounts | None = None,
    ) -> None:
        """`report_seconds`: interval between two calls of the observer.  `policies`: see `MetricsReader`."""
        self._engine = model.engine
        self._max_num_seqs = model.max_num_seqs
        self._now = clock.monotonic
        self._side_work = side_work
        self._observer = observer
        self._report_seconds = report_seconds
        self._next_report = 0.0
        self._counts = WorkerCounts()
        self._rate = RateMeter()
        adapters = {name: files.size for name, files in model.adapters.items()}
        self._metrics = MetricsReader(model.name, model.engine, clock.monotonic(), model.gpu_uuids, policies, adapters)
        self._heartbeats: HeartbeatSender | None = None

    def start(self, heartbeats: HeartbeatSender) -> None:
        """Send heartbeats through `heartbeats` from now on."""
        self._heartbeats = heartbeats

    # -- Counting

    def count_rejected(self, tier: Tier, rows: Sequence[RejectedRow]) -> None:
        """These rows of a shard of this tier are rejected."""
        self._counts = self._counts.with_refused(sum(len(row.names) for row in rows))
        self._metrics.ended.record_refused(tier, len(rows))

    def count_restored(self, rows: int) -> None:
        """Rows of a shard have an outcome that an earlier attempt logged."""
        self._counts = self._counts.with_restored(rows)

    def count_computed(self, tier: Tier, row: ComputedRow) -> None:
        """A row and its copies have their outcome."""
        copies, completion = len(row.prepared.names), row.completion
        failed = len(row.rejected) if failure_of(completion) is None else copies
        self._counts = self._counts.with_computed(copies - failed, failed, completion)
        self._metrics.ended.record(tier, completion, row.prepared.request.adapter)

    def count_try(self, completion: Completion) -> None:
        """A row has an answer that is not accepted, and no outcome yet."""
        self._counts = self._counts.with_computed(0, 0, completion)

    def count_part(self, rows: int, committed: bool) -> None:
        """A shard's part is durable; `committed`: this worker wrote it."""
        self._counts = self._counts.with_part(rows, committed)

    # -- Reporting

    def collect_revoked(self) -> RevokedShards:
        """Shards that this worker must stop computing, as found since the last call."""
        return RevokedShards() if self._heartbeats is None else self._heartbeats.collect_revoked()

    def report_if_due(
        self, open_shards: Sequence[OpenShard], committing: Sequence[OpenShard], prepared: PreparedShard | None
    ) -> None:
        """Send a heartbeat and call the observer, each when its interval has passed."""
        now = self._now()
        if self._heartbeats is not None:
            self._heartbeats.record_progress()
            if self._heartbeats.is_due:
                self._send_heartbeat(self._heartbeats, now, open_shards, committing, prepared)
        if self._observer is not None and now >= self._next_report:
            self._next_report = now + self._report_seconds
            self._observer.progress(self._progress(open_shards, committing, stopped=False))

    def _send_heartbeat(
        self,
        heartbeats: HeartbeatSender,
        now: float,
        open_shards: Sequence[OpenShard],
        committing: Sequence[OpenShard],
        prepared: PreparedShard | None,
    ) -> None:
        shards = [*open_shards, *committing]
        held = [shard.work for shard in shards]
        held += [] if prepared is None else [prepared.work]
        unfinished = {(shard.work.job.id, shard.work.shard): shard.unfinished for shard in shards}
        queued: Counter[Tier] = Counter()
        for shard in open_shards:
            queued[shard.work.tier] += len(shard.waiting)
        metrics = self._metrics.read(now, queued, self._side_work.metrics())
        speed = self._rate.measure(now, self._engine.stats())
        heartbeats.send(held, WorkerLoad(speed, unfinished, metrics, self._max_num_seqs))

    def report_end(
        self, open_shards: Sequence[OpenShard], committing: Sequence[OpenShard], *, stopped: bool
    ) -> WorkerProgress:
        """Call the observer a last time; returns the worker's progress."""
        progress = self._progress(open_shards, committing, stopped=stopped)
        if self._observer is not None:
            self._observer.progress(progress)
        return progress

    def _progress(
        self, open_shards: Sequence[OpenShard], committing: Sequence[OpenShard], *, stopped: bool
    ) -> WorkerProgress:
        queued = sum(len(shard.waiting) for shard in open_shards)
        held = len(open_shards) + len(committing)
        return WorkerProgress(self._counts, self._engine.stats(), queued, held, stopped)
