"""Events of jobs and releases, delivered at least once. Each is derived from committed objects, and its `id` is the
same in every repeat."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, TypeAdapter

from schemas.jobs.outcome import Counts, JobStatus, Usage
from schemas.stored import Count, StoredReport


class Event(StoredReport):
    """The common fields of all events. `at`: when it happened, by the emitter's clock."""

    version: Literal[1] = 1
    id: str
    job: str
    at: AwareDatetime


class JobChanged(Event):
    """A job's status changed."""

    type: Literal["job.changed"] = "job.changed"
    status: JobStatus
    counts: Counts
    message: str | None = None


class ShardCommitted(Event):
    """A part was committed."""

    type: Literal["shard.committed"] = "shard.committed"
    shard: Count
    rows: Count
    attempt: int
    usage: Usage


class ProgressMade(Event):
    """A job's progress; only for display."""

    type: Literal["job.progress"] = "job.progress"
    counts: Counts
    usage: Usage


class ReleaseEnded(StoredReport):
    """A new version of a model was promoted, or rolled back.

    Attributes:
        stable, candidate: digests of the version that was served, and of the new one.
        by: "comparison", "time" or "operator".
    """

    version: Literal[1] = 1
    id: str
    at: AwareDatetime
    type: Literal["release.ended"] = "release.ended"
    model: str
    release: Count
    stable: str | None
    candidate: str | None
    verdict: Literal["promoted", "rolled_back"]
    by: str
    reasons: tuple[str, ...] = ()


SomeEvent = JobChanged | ShardCommitted | ProgressMade | ReleaseEnded
AnyEvent = Annotated[SomeEvent, Field(discriminator="type")]


def read_event(data: bytes | str) -> SomeEvent:
    """An event from its JSON; raises pydantic's ValidationError."""
    adapter: TypeAdapter[SomeEvent] = TypeAdapter(AnyEvent)
    return adapter.validate_json(data)
