"""What a worker's loop knows of the pipeline: where shards come from, and where their results go.

The loop touches no store and no queue of its own. All that it must tell while it works (that it lives, what it holds)
goes through `ShardSink`, and all that it needs to begin or to go on with a shard lies in `ShardWork`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Protocol

import pyarrow as pa

from pipeline.ledger.records import ShardReport
from pipeline.results.checkpoints import ShardHistory
from schemas.jobs.checkpoints import FinishedRows, LoggedChoice
from schemas.jobs.job import Job, Tier
from schemas.workers.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class ShardWork:
    """One shard, taken by one worker for one attempt.

    Attributes:
        job: the whole order; `job.model_named(table["model"])` is the pin that the worker must match or refuse.
        shard: the shard's number, and its part's.
        attempt: 1, or more when the shard was begun before; goes into `ResultRow.attempt`.
        attempt_id: unique among all attempts ever made; names what this attempt writes.
        table: `schemas.tables.shard_schema(...)`, one row a request, copies included, in the planner's order.
        started_at: when it was taken; aware, UTC.
        history: what earlier attempts left. Its finished rows are done: the sink joins them to the part.
        as_tier: how urgent it is to this worker, where that isn't the job's tier.
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
        """How urgent it is."""
        return self.as_tier or self.job.tier


BY_URGENCY: Final = (Tier.STANDARD, Tier.BULK)
"""The tiers of jobs."""


class ShardSource(Protocol):
    """Where a worker gets its shards."""

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        """The next shard that is neither committed nor held by this worker, or None after `timeout` seconds (0: at
        once). From here on the worker holds it, until it commits, releases or gives it up. One that can't be read is
        passed over. Raises `StoreError`.

        Args:
            tiers: which may come, the most wanted first.
        """
        ...

    def finished(self) -> bool:
        """True when no shard will ever come again: the worker ends when it holds none."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointWork:
    """What is new in one shard since its attempt's last checkpoint.

    Attributes:
        finished: rows that have finished.  running: what the others have got.
        generated: tokens that the attempt has sampled for the shard so far.
        exposed: tokens that the engine sampled in between, for all shards together.
        final: the attempt ends with this one.
        busy_seconds: of the engine's steps, the shard's share so far.
    """

    finished: FinishedRows
    running: Sequence[LoggedChoice]
    generated: int
    exposed: int
    final: bool = False
    busy_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How fast a worker is, and how far: what forecasts are made of; and its figures.

    Attributes:
        tokens_per_second: prompts (cached ones too) and answers, while it had work; None: not measured yet.
        unfinished: of the shards that it works on, (job id, number) -> the share of rows without an outcome.
        figures: what it has to tell whoever watches; None: nothing.
    """

    tokens_per_second: float | None = None
    unfinished: Mapping[tuple[str, int], float] = field(default_factory=dict)
    figures: WorkerMetrics | None = None


@dataclass(frozen=True, slots=True)
class RevokedShards:
    """Shards that a worker must stop computing, each (job id, number).

    Attributes:
        to_release: the job is being closed or has ended, or another worker took the shard over while this one was
            silent. The worker writes a last checkpoint and releases them.
        committed: a part stands. The worker drops them.
    """

    to_release: frozenset[tuple[str, int]] = frozenset()
    committed: frozenset[tuple[str, int]] = frozenset()


class ShardSink(Protocol):
    """Where a worker's results go, and how it shows that it lives."""

    def commit(self, work: ShardWork, finished: FinishedRows, report: ShardReport) -> bool:
        """Make the shard's part: one result for each row of `work.table` that `work.history` hasn't finished, in any
        order; those that it has, and carried columns, are added here.

        True: the part is durable and visible. False: another attempt was first and its part stands, or the job ended as
        failed; this work counts as repeated, and the worker goes on. Either way the shard is no longer held. Raises
        `PipelineError` when the rows are not exactly the shard's, or can't be written.
        """
        ...

    def begin(self, work: ShardWork) -> None:
        """Make it durable that the attempt begins: from here on rows of the shard may be in the engine, and a death may
        be their doing."""
        ...

    def checkpoint(self, work: ShardWork, new: CheckpointWork) -> None:
        """Make what is new durable. Raises `PipelineError` when it can't be written."""
        ...

    def note(self, work: ShardWork, rows: Sequence[int]) -> None:
        """Make it durable that from here on only these rows of the shard are computed, so that they are known if they
        end the process; none: they survived, and others are computed again."""
        ...

    def release(self, work: ShardWork, generated: int, busy_seconds: float) -> None:
        """Give the shard back undone (drain, or a model that this worker lacks): another may take it at once.
        `generated`: tokens that this attempt sampled for it.  `busy_seconds`: of the engine's steps, its share."""
        ...

    def give_up(self, work: ShardWork, error: Exception, generated: int = 0, busy_seconds: float = 0.0) -> None:
        """Give the shard back, and make it durable why this attempt can't go on with it: `error`, which is about this
        shard and no other. After some such attempts its rows are failed. The rest as in `release`."""
        ...

    def send_heartbeat(self, shards: Sequence[ShardWork], load: WorkerLoad) -> None:
        """The worker lives and works on these, and this is its load. What it has taken and not let go of is held too,
        named or not. Called every `HEARTBEAT_SECONDS` or oftener, on a thread of its own. Never reads or writes the
        store, whose answers may take minutes."""
        ...

    def find_revoked(self, shards: Sequence[ShardWork]) -> RevokedShards:
        """Which of these shards the worker must stop computing. Reads the store. Raises `PipelineError`."""
        ...


HEARTBEAT_SECONDS = 3.0
"""How often a worker says that it lives."""

CHECKPOINT_SECONDS = 1.0
"""How often what is new is logged: what a death costs at most, with the time of a step and of a write."""
