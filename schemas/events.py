"""What is announced, at least once, after the fact: each event is derived from committed objects, and its `id` is the
same in every repeat."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, TypeAdapter

from schemas.job import Count, Counts, JobStatus, Paper, Usage


class Event(Paper):
    """What all events carry. `at` is when it happened, by the announcer's clock."""

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
    """A part became visible."""

    type: Literal["shard.committed"] = "shard.committed"
    shard: Count
    rows: Count
    attempt: int
    usage: Usage


class ProgressMade(Event):
    """How far a job is; only for display."""

    type: Literal["job.progress"] = "job.progress"
    counts: Counts
    usage: Usage


AnyEvent = Annotated[JobChanged | ShardCommitted | ProgressMade, Field(discriminator="type")]


def read_event(data: bytes | str) -> JobChanged | ShardCommitted | ProgressMade:
    """An event from its JSON; raises pydantic's ValidationError."""
    adapter: TypeAdapter[JobChanged | ShardCommitted | ProgressMade] = TypeAdapter(AnyEvent)
    return adapter.validate_json(data)
