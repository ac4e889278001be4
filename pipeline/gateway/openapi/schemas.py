"""What is answered, as the OpenAPI document describes it: files, batches, models, the installation, errors.

Answers are made where they are known (`documents`, `papers`, …), and not from these models. The tests hold each answer
against them.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from schemas.jobs.job import Tier
from schemas.jobs.outcome import JobStatus
from schemas.workers.metrics import WorkerMetrics

Item = TypeVar("Item")
Moment = Annotated[int, Field(ge=0, description="Seconds since 1970.")]
Amount = Annotated[int, Field(ge=0)]


class ResponseModel(BaseModel):
    """An object with exactly these fields."""

    model_config = ConfigDict(extra="forbid")


class ListPage(ResponseModel, Generic[Item]):
    """A page of a list. `last_id` is what `after` takes."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class File(ResponseModel):
    """OpenAI's file object."""

    id: str
    object: Literal["file"]
    bytes: Amount
    created_at: Moment
    expires_at: Moment | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class DeletedFile(ResponseModel):
    """A file that is no more."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class RequestCounts(ResponseModel):
    """Rows. `failed` counts all that have no answer: failed, expired and cancelled."""

    total: Amount
    completed: Amount
    failed: Amount


class CachedTokens(ResponseModel):
    """Of a prompt, those that were not computed again."""

    cached_tokens: Amount


class ReasoningTokens(ResponseModel):
    """Of an answer; none are told apart here."""

    reasoning_tokens: Amount


class BatchUsage(ResponseModel):
    """Tokens of all rows."""

    input_tokens: Amount
    input_tokens_details: CachedTokens
    output_tokens: Amount
    output_tokens_details: ReasoningTokens
    total_tokens: Amount


class BatchError(ResponseModel):
    """Why a batch failed as a whole. `line`: of its file, from 1."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(ResponseModel):
    """All that were found."""

    object: Literal["list"]
    data: list[BatchError]


class RowCounts(ResponseModel):
    """Rows by how they ended."""

    total: Amount
    succeeded: Amount
    failed: Amount
    expired: Amount
    cancelled: Amount
    pending: Amount


class ShardProgress(ResponseModel):
    """Shards that are committed, of those that are planned so far."""

    shards_done: Amount
    shards_total: Amount


class BatchExtension(ResponseModel):
    """What OpenAI has no name for. `results`: where the Parquet files lie."""

    tier: Tier
    deadline: AwareDatetime | None
    counts: RowCounts
    progress: ShardProgress
    as_of: AwareDatetime | None
    attention: str | None
    eta: AwareDatetime | None
    cost: float | None
    max_cost: float | None
    cost_per_million_tokens: float | None
    repeated_tokens: Amount
    results: str
    results_expire_at: AwareDatetime | None
    results_removed_at: AwareDatetime | None
    retry_of: str | None


class Batch(ResponseModel):
    """OpenAI's batch object. One that came in by another door has no files, and no `completion_window`."""

    id: str
    object: Literal["batch"]
    status: JobStatus
    endpoint: str | None
    model: str | None
    input_file_id: str | None
    completion_window: str | None
    output_file_id: str | None
    error_file_id: str | None
    created_at: Moment
    in_progress_at: Moment | None
    expires_at: Moment | None
    finalizing_at: Moment | None
    completed_at: Moment | None
    failed_at: Moment | None
    expired_at: Moment | None
    cancelling_at: Moment | None
    cancelled_at: Moment | None
    request_counts: RequestCounts
    usage: BatchUsage
    errors: BatchErrors | None
    metadata: dict[str, str]
    tokenmill: BatchExtension


class ModelExtension(ResponseModel):
    """The very weights, and how they are computed with."""

    digest: str | None
    revision: str | None
    dtype: str
    quantization: str
    kv_dtype: str


class Model(ResponseModel):
    """OpenAI's model object. `created`: since when it is served as it is. `max_model_len`: tokens of prompt and answer
    together."""

    id: str
    object: Literal["model"]
    created: Moment
    owned_by: str
    max_model_len: Amount
    tokenmill: ModelExtension


class ModelList(ResponseModel):
    """All models."""

    object: Literal["list"]
    data: list[Model]


class WorkerStatus(ResponseModel):
    """A worker that lives, as its last heartbeat says. `figures`: what it has counted, where it tells that. Name and
    all samples are null for keys without the scope metrics."""

    name: str | None
    models: list[str]
    shards: Amount | None
    waiting_tokens: Amount | None
    tokens_per_second: float | None
    draining: bool
    figures: WorkerMetrics | None


class BacklogKind(ResponseModel):
    """Open jobs of a model and a tier; `model` is null for those of several models."""

    model: str | None
    tier: Tier
    jobs: Amount
    tokens: Amount


class BacklogEstimate(ResponseModel):
    """What is still to be computed, estimated. `incomplete`: it is more than was counted."""

    jobs: Amount
    tokens: Amount
    incomplete: bool
    kinds: list[BacklogKind]


class LaneMetrics(ResponseModel):
    """Requests that this gateway is answering, and those of them of which nothing has come yet."""

    open: Amount
    waiting: Amount


class Installation(ResponseModel):
    """How it stands, some seconds old.

    `latency_bounds`: upper ends of the buckets of all histograms, seconds. `lane`, `answers`: of this gateway to calls
    that wait, and by how they ended; null for keys without the scope metrics.
    """

    object: Literal["status"]
    as_of: AwareDatetime
    workers: list[WorkerStatus]
    latency_bounds: list[float]
    backlog: BacklogEstimate
    models: list[str]
    lane: LaneMetrics | None
    answers: dict[str, Amount] | None


class Health(ResponseModel):
    """A word."""

    status: Literal["ok", "ready"]


class ErrorDetails(ResponseModel):
    """What is wrong, and what to do. `code`: a short, stable name of the reason. `param`: the field to blame."""

    message: str
    type: str
    param: str | None
    code: str


class Error(ResponseModel):
    """OpenAI's error object."""

    error: ErrorDetails


class OpenApi(BaseModel):
    """This document."""

    model_config = ConfigDict(extra="allow")

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
