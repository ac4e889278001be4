"""Protocols between a worker's loop and the pipeline: the source of shards, and the sink of their results.

The loop accesses no store and no queue itself. It reports its state (liveness, held shards) through `ShardSink`, and
`ShardWork` contains everything that it needs to start or resume a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Protocol

import pyarrow as pa

from pipeline.ledger.records import ShardReport
from pipeline.results.shard_history import ShardHistory
from schemas.jobs.checkpoints import FinishedRows, LoggedChoice
from schemas.jobs.job import Job, Tier
from schemas.workers.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class ShardWork:
    """One shard, taken by one worker for one attempt.

    Attributes:
        job: the whole order; `job.model_named(table["model"])` is the pin that the worker must match or refuse.
        shard: the shard's number, and its part's.
        attempt: 1, or more when the shard was started before; recorded in `ResultRow.attempt`.
        attempt_id: unique among all attempts ever made; part of the keys that this attempt writes.
        table: `schemas.jobs.arrow_schemas.shard_schema(...)`, one row a request, copies included, in the planner's
            order.
        started_at: when it was taken; aware, UTC.
        history: state of earlier attempts. Its finished rows are done: the sink adds them to the part.
        as_tier: its tier for this worker, if that isn't the job's tier.
    """

    job: Job
    shard: int
    attempt: int
    attempt_id: str
    table: pa.Table
    started_at: datetime
    history: ShardHistory = field(default_factory=ShardHistory)
    as_tier: Tier | None = None

    @property
    def tier(self) -> Tier:
        """Its tier for this worker."""
        return self.as_tier or self.job.tier


BY_URGENCY: Final = (Tier.STANDARD, Tier.BULK)
"""The tiers of jobs, the most urgent first."""


class ShardSource(Protocol):
    """The source of a worker's shards."""

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        """The next shard that is neither committed nor held by this worker, or None after `timeout` seconds (0: at
        once). From now on the worker holds it, until it commits, releases or gives it up. Unreadable shards are
        skipped. Raises `StoreError`.

        Args:
            tiers: the tiers to take from, in order of preference.
        """
        ...

    def finished(self) -> bool:
        """Whether no shard will ever come again: the worker ends when it holds none."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointWork:
    """The progress of one shard since its attempt's last checkpoint.

    Attributes:
        finished: rows that have finished.  running: new tokens of the others.
        generated: tokens that the attempt has sampled for the shard so far.
        exposed: tokens that the engine sampled in between, for all its shards.
        final: the attempt ends with this checkpoint.
        busy_seconds: the shard's share of the engine's step time so far.
    """

    finished: FinishedRows
    running: Sequence[LoggedChoice]
    generated: int
    exposed: int
    final: bool = False
    busy_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's speed and progress, on which forecasts are based; and its metrics.

    Attributes:
        tokens_per_second: prompts (cached ones too) and answers, while it had work; None: not measured yet.
        unfinished: of its running shards, (job id, number) -> the share of rows without an outcome.
        metrics: metrics for monitoring; None: none.
        max_num_seqs: rows of its engine's batch; None: not known.
    """

    tokens_per_second: float | None = None
    unfinished: Mapping[tuple[str, int], float] = field(default_factory=dict)
    metrics: WorkerMetrics | None = None
    max_num_seqs: int | None = None


@dataclass(frozen=True, slots=True)
class RevokedShards:
    """Shards that a worker must stop computing, each (job id, number).

    Attributes:
        to_release: the job is being closed or has ended, or another worker took the shard over while this one was
            silent. The worker writes a last checkpoint and releases them.
        committed: their part exists. The worker drops them.
    """

    to_release: frozenset[tuple[str, int]] = frozenset()
    committed: frozenset[tuple[str, int]] = frozenset()


class ShardSink(Protocol):
    """The sink of a worker's results and heartbeats."""

    def commit(self, work: ShardWork, finished: FinishedRows, report: ShardReport) -> bool:
        """Commit the shard's part: one result for each row of `work.table` that `work.history` hasn't finished, in any
        order; finished rows and carried columns are added here.

        True: the part is durable and visible. False: another attempt's part was first, or the job ended as failed; this
        work counts as repeated, and the worker continues with other shards. Either way the shard is no longer held.
        Raises `PipelineError` when the rows are not exactly the shard's, or can't be written.
        """
        ...

    def begin(self, work: ShardWork) -> None:
        """Record durably that the attempt begins: from now on rows of the shard may be in the engine, and may cause a
        crash."""
        ...

    def checkpoint(self, work: ShardWork, new: CheckpointWork) -> None:
        """Write a durable checkpoint. Raises `PipelineError` when it can't be written."""
        ...

    def record(self, work: ShardWork, rows: Sequence[int]) -> None:
        """Record durably that from now on only these rows of the shard are computed, so that they are known if they
        crash the process; none: they survived, and other rows are computed again."""
        ...

    def release(self, work: ShardWork, generated: int, busy_seconds: float) -> None:
        """Release the shard undone (drain, or a model that this worker lacks): another may take it at once.
        `generated`: tokens that this attempt sampled for it.  `busy_seconds`: its share of the engine's step time."""
        ...

    def give_up(self, work: ShardWork, error: Exception, generated: int = 0, busy_seconds: float = 0.0) -> None:
        """Release the shard, and record durably why this attempt can't continue with it: `error`, which concerns only
        this shard. After some such attempts its rows fail. The other arguments as in `release`."""
        ...

    def send_heartbeat(self, shards: Sequence[ShardWork], load: WorkerLoad) -> None:
        """Send a heartbeat with the worker's running shards and its load. Shards that it has taken and not released are
        held too, even if not named. Called every `HEARTBEAT_SECONDS` or more often, on a thread of its own. Never
        reads or writes the store, whose answers may take minutes."""
        ...

    def find_revoked(self, shards: Sequence[ShardWork]) -> RevokedShards:
        """Find the shards that the worker must stop computing. Reads the store. Raises `PipelineError`."""
        ...


HEARTBEAT_SECONDS = 3.0
"""Interval of a worker's heartbeats."""

CHECKPOINT_SECONDS = 1.0
"""Interval of checkpoints: the maximum loss of a crash, plus the time of a step and of a write."""
