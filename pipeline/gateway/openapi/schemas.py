"""Response schemas for the OpenAPI document: files, batches, models, the installation, errors.

Responses aren't built from these models, but by the services (`records`, `batches.serialization`, `status`, …). The
tests validate each response against them.
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
    """A page of a list. Pass `last_id` as `after` to get the next page."""

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
    """A deleted file."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class RequestCounts(ResponseModel):
    """Row counts. `failed` counts all rows without a response: failed, expired and cancelled."""

    total: Amount
    completed: Amount
    failed: Amount


class CachedTokens(ResponseModel):
    """Prompt tokens that were read from the prefix cache."""

    cached_tokens: Amount


class ReasoningTokens(ResponseModel):
    """Reasoning tokens of a response; always 0, as they aren't counted separately."""

    reasoning_tokens: Amount


class BatchUsage(ResponseModel):
    """Token usage of all rows."""

    input_tokens: Amount
    input_tokens_details: CachedTokens
    output_tokens: Amount
    output_tokens_details: ReasoningTokens
    total_tokens: Amount


class BatchError(ResponseModel):
    """An error that failed the whole batch. `line`: the line of the input file, from 1."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(ResponseModel):
    """All errors of a batch."""

    object: Literal["list"]
    data: list[BatchError]


class RowCounts(ResponseModel):
    """Row counts by result."""

    total: Amount
    succeeded: Amount
    failed: Amount
    expired: Amount
    cancelled: Amount
    pending: Amount


class ShardProgress(ResponseModel):
    """Committed shards, and shards that are planned so far."""

    shards_done: Amount
    shards_total: Amount


class BatchExtension(ResponseModel):
    """Fields that OpenAI's API doesn't have. `results`: the location of the Parquet files."""

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
    """OpenAI's batch object. A batch that wasn't submitted over HTTP has no files and no `completion_window`."""

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
    """The exact weights, and their number formats."""

    digest: str | None
    revision: str | None
    dtype: str
    quantization: str
    kv_dtype: str


class Model(ResponseModel):
    """OpenAI's model object. `created`: since when this version is served. `max_model_len`: the largest sum of prompt
    and output tokens."""

    id: str
    object: Literal["model"]
    created: Moment
    owned_by: str
    max_model_len: Amount
    tokenmill: ModelExtension


class ModelList(ResponseModel):
    """The list of all models."""

    object: Literal["list"]
    data: list[Model]


class WorkerStatus(ResponseModel):
    """A live worker, as of its last heartbeat. `metrics`: its metrics, if it reports them. The name and all samples are
    null for keys without the scope metrics."""

    name: str | None
    models: list[str]
    shards: Amount | None
    waiting_tokens: Amount | None
    tokens_per_second: float | None
    draining: bool
    metrics: WorkerMetrics | None


class BacklogKind(ResponseModel):
    """Open jobs of a model and a tier; `model` is null for those of several models."""

    model: str | None
    tier: Tier
    jobs: Amount
    tokens: Amount


class BacklogEstimate(ResponseModel):
    """The estimated remaining work. `incomplete`: not all open jobs were counted."""

    jobs: Amount
    tokens: Amount
    incomplete: bool
    kinds: list[BacklogKind]


class LaneMetrics(ResponseModel):
    """Inference requests in progress at this gateway (`open`), and those without a first token (`waiting`)."""

    open: Amount
    waiting: Amount


class Installation(ResponseModel):
    """The state of the installation, some seconds old.

    `latency_bounds`: upper bounds of the buckets of all histograms, in seconds. `lane`: inference requests in progress
    at this gateway. `answers`: finished ones by result. Both are null for keys without the scope metrics.
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
    """The state of the gateway."""

    status: Literal["ok", "ready"]


class ErrorDetails(ResponseModel):
    """The details of an error. `message`: what is wrong, and what to do. `code`: a short, stable name of the reason.
    `param`: the field that caused the error."""

    message: str
    type: str
    param: str | None
    code: str


class Error(ResponseModel):
    """OpenAI's error object."""

    error: ErrorDetails


class OpenApi(BaseModel):
    """An OpenAPI document."""

    model_config = ConfigDict(extra="allow")

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
