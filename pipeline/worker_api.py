"""What a worker's loop knows of the pipeline: where shards come from, and where their results go.

The loop touches no store and no queue of its own. All that it must tell while it works (that it lives, what it holds)
goes through `ShardSink`, and all that it needs to begin or to go on with a shard lies in `ShardWork`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

import pyarrow as pa

from schemas.job import Job, Usage
from schemas.results import ResultRow

EngineFact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class ShardWork:
    """One shard, taken by one worker for one attempt.

    Attributes:
        job: the whole order; `job.model_named(table["model"])` is the pin that the worker must match or refuse.
        shard: the shard's number, and its part's.
        attempt: 1, or more when the shard was taken before; goes into `ResultRow.attempt`.
        attempt_id: unique among all attempts ever made; names what this attempt writes.
        table: `schemas.tables.shard_schema(...)`, one row a request, copies included, in the planner's order.
        started_at: when it was taken; aware, UTC.
    """

    job: Job
    shard: int
    attempt: int
    attempt_id: str
    table: pa.Table
    started_at: datetime


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What an attempt cost; kept in the part's footer, so that the manifest adds up footers only.

    Attributes:
        usage: tokens of the rows that this attempt computed (a copy costs nothing).
        engine_started_at, engine_finished_at: first step and last step that worked on the shard; None if there was none
            (every row refused before the engine).
        engine: the engine's settings, for the manifest.
        versions: of the libraries that computed, for the manifest.
    """

    usage: Usage = field(default_factory=Usage)
    engine_started_at: datetime | None = None
    engine_finished_at: datetime | None = None
    engine: Mapping[str, EngineFact] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


class ShardSource(Protocol):
    """Where a worker gets its shards."""

    def take(self, timeout: float) -> ShardWork | None:
        """The next shard that is neither committed nor held by this worker, or None after `timeout` seconds (0: at
        once). From here on the worker holds it, until it commits or releases it. Raises `PipelineError`."""
        ...

    def finished(self) -> bool:
        """True when no shard will ever come again: the worker ends when it holds none."""
        ...


class ShardSink(Protocol):
    """Where a worker's results go, and how it shows that it lives."""

    def commit(self, work: ShardWork, rows: Sequence[ResultRow], report: ShardReport) -> bool:
        """Make the shard's part: one result for each row of `work.table`, in any order; carried columns are added here.

        True: the part is durable and visible. False: another attempt was first; its part stands, this work counts as
        repeated, and the worker goes on. Either way the shard is no longer held. Raises `PipelineError` when the rows
        are not exactly the shard's, or can't be written.
        """
        ...

    def release(self, work: ShardWork) -> None:
        """Give the shard back undone (drain, or a model that this worker lacks): another may take it at once."""
        ...

    def holding(self, shards: Sequence[ShardWork]) -> None:
        """The heartbeat: the worker lives and works on exactly these. Called every `HEARTBEAT_SECONDS` or oftener."""
        ...


HEARTBEAT_SECONDS = 3.0
"""How often a worker says that it lives."""
