"""Stored records that only the pipeline reads: a part's footer, and the objects in `work/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from pydantic import AwareDatetime, Field

from schemas.jobs.outcome import Counts, Usage, WorkerTime
from schemas.stored import Count, StoredModel, StoredReport

EngineFact = str | int | float | bool | None

EngineFacts = dict[str, EngineFact]


@dataclass(frozen=True, slots=True)
class ShardReport:
    """The cost of an attempt; stored in the part's footer, so that the manifest adds up footers only.

    Attributes:
        generated: tokens that this attempt sampled, used or not.
        exposed: maximum tokens that its engine sampled between two checkpoints.
        busy_seconds: the shard's share of the engine's step time.
        engine_started_at, engine_finished_at: first and last engine step for the shard; None if there was none (every
            row was refused before the engine).
        engine: the engine's settings, for the manifest.
        versions: of the libraries that computed, for the manifest.
    """

    generated: int = 0
    exposed: int = 0
    busy_seconds: float = 0.0
    engine_started_at: datetime | None = None
    engine_finished_at: datetime | None = None
    engine: Mapping[str, EngineFact] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


class PartSummary(StoredReport):
    """The footer of a part: all facts that a manifest needs, so that adding up a job reads no results.

    Attributes:
        part: its number, which is its shard's; 0 holds the rows refused in planning.
        attempt, attempt_id, worker: the attempt and the worker that made it.
        counts: its rows by status.  usage: tokens of the rows computed for it (copies cost nothing).
        started_at, committed_at: when the shard was taken and when the part was built.
        engine_started_at, engine_finished_at: first and last engine step for the shard.
        engine, versions: the engine's settings and libraries.
        exposed: maximum tokens that its engine sampled between two checkpoints: the loss when a worker dies.
        accounted: attempt -> tokens that it sampled and that are in `usage`, as answers or as repeated.
        worked: attempt -> worker time that it used; of the attempts known when the part was made.
    """

    version: Literal[1] = 1
    job: str
    part: Count
    attempt: int = 1
    attempt_id: str
    worker: str
    counts: Counts
    usage: Usage = Usage()
    started_at: AwareDatetime
    committed_at: AwareDatetime
    engine_started_at: AwareDatetime | None = None
    engine_finished_at: AwareDatetime | None = None
    engine: EngineFacts = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    exposed: Count = 0
    accounted: dict[str, Count] = Field(default_factory=dict)
    worked: dict[str, WorkerTime] = Field(default_factory=dict)


class AttemptRecord(StoredReport):
    """`work/NNNNN/attempt-NNNN.json`: a worker started the shard. The number of attempts survives any crash.

    `session` identifies one process of the worker: attempts of the same session end with the same crash.
    """

    version: Literal[1] = 1
    attempt: Count
    attempt_id: str
    worker: str
    session: str = ""
    started_at: AwareDatetime


class NoteRecord(StoredModel):
    """`work/NNNNN/note-ATTEMPT_ID-SEQ.json`: from here on the attempt computes only these rows of the shard. Empty:
    they survived, and the attempt computes any rows again."""

    version: Literal[1] = 1
    rows: tuple[Count, ...] = ()


class EndRecord(StoredReport):
    """`work/NNNNN/ended-ATTEMPT_ID.json`: an attempt that ended without a commit, with all tokens that it sampled
    and the worker time that it used."""

    version: Literal[1] = 1
    attempt_id: str
    generated: Count
    worked: WorkerTime = WorkerTime()


class PlanningFailure(StoredReport):
    """`work/planning/failed-NN.json`: planning the job failed with an unexpected error. The number of failures
    survives any restart."""

    version: Literal[1] = 1
    attempt: Count
    error: str
    at: AwareDatetime


class UnreadableRecord(StoredReport):
    """`work/NNNNN/unreadable-ATTEMPT_ID.json`: an attempt could not continue with the shard, and the reason: its
    objects, or the plan's, can't be read, or an error was unexpected. After some of these the shard is given up."""

    version: Literal[1] = 1
    worker: str
    at: AwareDatetime
    reason: str


class RunRecord(StoredReport):
    """`work/runs/ID.json`: a run started or resumed the job. With it, the time between runs is not billed."""

    version: Literal[1] = 1
    started_at: AwareDatetime


class Tombstone(StoredModel):
    """`tombstone.json`: the results of the job were removed, or their removal began at this time. The job's order and
    outcome stay."""

    version: Literal[1] = 1
    job: str
    at: AwareDatetime
