"""Response models of files, models, the installation and errors; those of batches are in `schemas.jobs.batch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from schemas.jobs.batch import Batch, ResponseModel, Timestamp, UnixTime
from schemas.jobs.job import Tier
from schemas.stored import Count
from schemas.workers.metrics import WorkerMetrics


class File(ResponseModel):
    """OpenAI's file object."""

    id: str
    object: Literal["file"] = "file"
    bytes: Count
    created_at: UnixTime
    expires_at: UnixTime | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class DeletedFile(ResponseModel):
    """A deleted file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


Item = TypeVar("Item", File, Batch)


class ListPage(ResponseModel, Generic[Item]):
    """A page of a list. Pass `last_id` as `after` to get the next page."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


def list_page(data: Sequence[Item], has_more: bool) -> ListPage[Item]:
    """A page of these items."""
    ids = [item.id for item in data]
    return ListPage(
        data=list(data), first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=has_more
    )


class MessageCounts(ResponseModel):
    """Requests of a message batch by status."""

    processing: Count
    succeeded: Count
    errored: Count
    canceled: Count
    expired: Count


class MessageBatch(ResponseModel):
    """Anthropic's message batch. `archived_at`: when its results were removed."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: Timestamp
    expires_at: Timestamp | None
    ended_at: Timestamp | None
    cancel_initiated_at: Timestamp | None
    archived_at: Timestamp | None
    results_url: str | None


class MessageBatchPage(ResponseModel):
    """A page of message batches, the newest first. Pass `last_id` as `after_id` to get the next page."""

    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageTokens(ResponseModel):
    """The number of a prompt's tokens."""

    input_tokens: Count


class DeletedMessageBatch(ResponseModel):
    """A message batch whose results are removed."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class ModelExtension(ResponseModel):
    """The exact weights, their number formats, and the engine that computes them."""

    digest: str | None
    revision: str | None
    dtype: str
    quantization: str
    kv_dtype: str
    engine: str
    engine_version: str | None


class VirtualModelExtension(ResponseModel):
    """The models from which a virtual model's rules choose."""

    models: list[str]


class Model(ResponseModel):
    """OpenAI's model object, with vLLM's fields. `created`: since when this version is served. `root`: where its files
    are, or the name of a virtual model. `parent`: of an adapter, the model that it is of. `max_model_len`: the largest
    sum of prompt and output tokens; of a virtual model, that of any of its models."""

    id: str
    object: Literal["model"] = "model"
    created: UnixTime
    owned_by: Literal["tokenmill"] = "tokenmill"
    root: str
    parent: str | None = None
    max_model_len: Count
    tokenmill: ModelExtension | VirtualModelExtension


class ModelList(ResponseModel):
    """The list of all models."""

    object: Literal["list"] = "list"
    data: list[Model]


class WorkerStatus(ResponseModel):
    """A live worker, as of its last heartbeat. `metrics`: its metrics, if it reports them. The name and all samples are
    null for keys without the scope metrics."""

    name: str | None
    models: list[str]
    shards: Count | None
    waiting_tokens: Count | None
    tokens_per_second: float | None
    draining: bool
    metrics: WorkerMetrics | None


class BacklogKind(ResponseModel):
    """Open jobs of a model and a tier; `model` is null for those of several models."""

    model: str | None
    tier: Tier
    jobs: Count
    tokens: Count


class BacklogEstimate(ResponseModel):
    """The estimated remaining work. `incomplete`: not all open jobs were counted."""

    jobs: Count
    tokens: Count
    incomplete: bool
    kinds: list[BacklogKind]


class LaneMetrics(ResponseModel):
    """Inference requests in progress at this gateway (`open`), and those without a first token (`waiting`)."""

    open: Count
    waiting: Count


class Installation(ResponseModel):
    """The state of the installation, some seconds old.

    `latency_bounds`: upper bounds of the buckets of all histograms, in seconds. `lane`: inference requests in progress
    at this gateway. `answers`: finished ones by result. Both are null for keys without the scope metrics.
    """

    object: Literal["status"] = "status"
    as_of: Timestamp
    workers: list[WorkerStatus]
    latency_bounds: list[float]
    backlog: BacklogEstimate
    models: list[str]
    lane: LaneMetrics | None = None
    answers: dict[str, Count] | None = None


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
