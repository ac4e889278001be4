"""A job as JSON: OpenAI's batch object, the same over HTTP, from Celery and on the command line. Fields that OpenAI's
object lacks are under `tokenmill`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema

from schemas.jobs.job import Tier
from schemas.jobs.outcome import Counts, JobError, JobStatus
from schemas.stored import Count

UnixTime = Annotated[int, Field(ge=0, description="Seconds since 1970.")]
Timestamp = Annotated[
    AwareDatetime,
    PlainSerializer(datetime.isoformat, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]


class ResponseModel(BaseModel):
    """Base of what is sent: an object with exactly these fields. None: unknown, or it has not happened."""

    model_config = ConfigDict(extra="forbid", json_schema_serialization_defaults_required=True)


class RequestCounts(ResponseModel):
    """Row counts. `failed` counts all rows without a response: failed, expired and cancelled."""

    total: Count
    completed: Count
    failed: Count


class CachedTokens(ResponseModel):
    """Prompt tokens that were read from the prefix cache."""

    cached_tokens: Count


class ReasoningTokens(ResponseModel):
    """Reasoning tokens of a response; always 0, as they aren't counted separately."""

    reasoning_tokens: Count = 0


class BatchUsage(ResponseModel):
    """Token usage of all rows."""

    input_tokens: Count
    input_tokens_details: CachedTokens
    output_tokens: Count
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: Count


class BatchErrors(ResponseModel):
    """All errors of a batch. `line`: the line of the input file, from 1."""

    object: Literal["list"] = "list"
    data: list[JobError]


class ShardProgress(ResponseModel):
    """Committed shards, and shards that are planned so far."""

    shards_done: Count
    shards_total: Count


class BatchExtension(ResponseModel):
    """Fields that OpenAI's API doesn't have. `results`: the location of the Parquet files."""

    tier: Tier
    deadline: Timestamp | None
    counts: Counts
    progress: ShardProgress
    as_of: Timestamp | None
    attention: str | None
    eta: Timestamp | None
    cost: float | None
    max_cost: float | None
    cost_per_million_tokens: float | None
    repeated_tokens: Count
    results: str
    results_expire_at: Timestamp | None
    results_removed_at: Timestamp | None
    retry_of: str | None


class Batch(ResponseModel):
    """OpenAI's batch object. A batch that wasn't submitted over HTTP has no files and no `completion_window`."""

    id: str
    object: Literal["batch"] = "batch"
    status: JobStatus
    endpoint: str | None
    model: str | None
    input_file_id: str | None = None
    completion_window: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: UnixTime
    in_progress_at: UnixTime | None = None
    expires_at: UnixTime | None = None
    finalizing_at: UnixTime | None = None
    completed_at: UnixTime | None = None
    failed_at: UnixTime | None = None
    expired_at: UnixTime | None = None
    cancelling_at: UnixTime | None = None
    cancelled_at: UnixTime | None = None
    request_counts: RequestCounts
    usage: BatchUsage
    errors: BatchErrors | None = None
    metadata: dict[str, str]
    tokenmill: BatchExtension


class UnreadableJob(ResponseModel):
    """A job in a list whose records can't be read. `problem`: why."""

    id: str
    object: Literal["batch"] = "batch"
    status: None = None
    problem: str


def unix_time(at: datetime | None) -> int | None:
    """Whole seconds since 1970, as OpenAI's times are."""
    return None if at is None else int(at.timestamp())
