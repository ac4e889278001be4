"""Anthropic's message batches on top of jobs: the requests of a body become an input file, and the results are read
from the job's Parquet parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Final

import orjson
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.gateway.batches.requests import EXTENSION, read_batch
from pipeline.gateway.batches.service import Batches
from pipeline.gateway.files.service import Files
from pipeline.gateway.http.errors import ApiError, bad_request, not_found
from pipeline.gateway.http.pagination import PageRequest
from pipeline.gateway.limits.storage_quota import StorageQuota
from pipeline.gateway.records import StoredFile, new_file_id
from pipeline.gateway.response_models import MessageBatch, MessageBatchPage, MessageCounts
from pipeline.ledger.ledger import JobLedger, part_key
from pipeline.ledger.records import Tombstone
from pipeline.ledger.tenant_index import message_batches_of
from pipeline.ports import World
from schemas.jobs.batch import Batch
from schemas.jobs.job import OnInvalid
from schemas.jobs.outcome import JobStatus
from schemas.jobs.results import RowStatus
from schemas.requests.dialects.anthropic.body import MESSAGES_URL
from schemas.requests.parsing import row_error

MAX_REQUESTS: Final = 4_500
"""Most requests of one body (Anthropic takes 100,000): as many of one short message each have just below
`MAX_CONTAINERS_AND_KEYS`, eleven for each."""

_WINDOW: Final = "24h"
_FILE_DAYS: Final = 30
_BATCH_ROWS: Final = 256
_COLUMNS: Final = ["custom_id", "status", "status_code", "response", "error_code", "error_message"]
_STATUSES: Final = {
    JobStatus.COMPLETED: "ended",
    JobStatus.EXPIRED: "ended",
    JobStatus.CANCELLED: "ended",
    JobStatus.FAILED: "ended",
    JobStatus.CANCELLING: "canceling",
}


class MessageRequest(BaseModel):
    """A request of a batch. `params`: a body of /v1/messages, which is validated with its row."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    custom_id: Annotated[str, Field(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]+$")]
    params: dict[str, Any]


class MessageBatchBody(BaseModel):
    """The body that creates a message batch. `tokenmill`: the job options."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    requests: Annotated[list[MessageRequest], Field(min_length=1, max_length=MAX_REQUESTS)]
    tokenmill: dict[str, Any] | None = None


class MessageBatches:
    """The message batches of all tenants. Thread-safe."""

    def __init__(self, world: World, files: Files, batches: Batches) -> None:
        self._world = world
        self._files = files
        self._batches = batches

    def create(
        self,
        tenant: str,
        body: dict[str, Any],
        quota: StorageQuota,
        key: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> MessageBatch:
        """Create a batch, or find the one that the same request created before.

        Args:
            quota: of the tenant's stored files; the requests are one.
            key: the idempotency key of the request.
            check: raises `ApiError` when the caller may not create another batch.

        Raises:
            ApiError: the batch can't be created.
        """
        try:
            given = MessageBatchBody.model_validate(body)
        except ValidationError as error:
            mistake = row_error(error)
            raise bad_request(mistake.message, mistake.param, mistake.code.value) from None
        self._check_ids(given.requests)
        # An invalid request is a result of its own, as with Anthropic; and so is one of a model that isn't served.
        options = {"on_invalid": OnInvalid.ROW.value, **(given.tokenmill or {})}
        order = {"input_file_id": "", "endpoint": MESSAGES_URL, "completion_window": _WINDOW}
        request = read_batch({**order, EXTENSION: options})
        store = partial(self._store, tenant, given.requests, quota)
        return _serialize(self._batches.create_without_files(tenant, body, request, store, key, check))

    def get(self, tenant: str, batch_id: str) -> MessageBatch:
        """The tenant's batch; raises `ApiError` (404)."""
        return _serialize(self._find(tenant, batch_id))

    def page(self, tenant: str, limit: int, after: str | None, before: str | None) -> MessageBatchPage:
        """A page of the tenant's batches, the newest first: those behind `after`, or the last ones in front of
        `before`."""
        if after is not None and before is not None:
            raise bad_request("after_id and before_id are both set; remove one", "before_id")
        index = message_batches_of(tenant)
        request = PageRequest(limit, after) if before is None else PageRequest(limit, before, "asc")
        page = self._batches.page(tenant, request, index)
        data = [_serialize(batch) for batch in page.data]
        if before is not None:
            data.reverse()
        return MessageBatchPage(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=page.has_more,
        )

    def cancel(self, tenant: str, batch_id: str) -> MessageBatch:
        """Cancel the batch; results of finished rows are retained. Raises `ApiError`: there is none (404), or it has
        ended (409)."""
        self._find(tenant, batch_id)
        return _serialize(self._batches.cancel(tenant, batch_id))

    def delete(self, tenant: str, batch_id: str) -> None:
        """Mark the results of an ended batch for removal: they can't be read any more, and the next sweep of the
        retention removes them. Raises `ApiError`: there is none (404), or it hasn't ended (409)."""
        batch = self._find(tenant, batch_id)
        if _status(batch) != "ended":
            raise ApiError(409, "batch_not_ended", f"batch {batch_id} has not ended; cancel it first", param="id")
        ledger, job = self._batches.find(tenant, batch_id)
        ledger.create_tombstone(Tombstone(job=job.id, at=self._world.clock.now()))

    def results(self, tenant: str, batch_id: str) -> Iterator[bytes]:
        """The lines of an ended batch's results. Raises `ApiError`: there is none (404), or it hasn't ended (409);
        `ResultsRemoved`."""
        batch = self._find(tenant, batch_id)
        if _status(batch) != "ended":
            message = f"batch {batch_id} has not ended; read its results when processing_status is ended"
            raise ApiError(409, "batch_not_ended", message, param="id")
        ledger, _ = self._batches.find(tenant, batch_id)
        ledger.check_results()
        numbers = ledger.result_parts(ledger.manifest())
        return (line for number in numbers for line in _lines(ledger, number))

    def _find(self, tenant: str, batch_id: str) -> Batch:
        batch = self._batches.get(tenant, batch_id)
        if batch.endpoint != MESSAGES_URL:
            raise not_found("batch", batch_id)
        return batch

    def _check_ids(self, requests: list[MessageRequest]) -> None:
        seen: set[str] = set()
        for at, request in enumerate(requests):
            if request.custom_id in seen:
                message = f"requests[{at}].custom_id is {request.custom_id!r}, as is that of another request"
                raise bad_request(f"{message}; give each a name of its own", f"requests[{at}].custom_id")
            seen.add(request.custom_id)

    def _store(self, tenant: str, requests: list[MessageRequest], quota: StorageQuota) -> StoredFile:
        """Store the requests as the input file of a job."""
        now = self._world.clock.now()
        path = self._world.scratch / f"messages-{self._world.random.token(12).hex()}.jsonl"
        digest, size = hashlib.sha256(), 0
        try:
            with path.open("wb") as stream:
                for request in requests:
                    line = _line(request)
                    digest.update(line)
                    size += stream.write(line)
            file = StoredFile(
                id=new_file_id(now, self._world.random),
                tenant=tenant,
                filename="message_batch.jsonl",
                purpose="batch",
                size=size,
                sha256=digest.hexdigest(),
                created_at=now,
                expires_at=now + timedelta(days=_FILE_DAYS),
            )
            return self._files.add(file, path, quota)
        finally:
            path.unlink(missing_ok=True)


def _line(request: MessageRequest) -> bytes:
    line = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES_URL, "body": request.params}
    try:
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    except (TypeError, orjson.JSONEncodeError):
        message = "the body holds half a character (a lone surrogate) or a number beyond 64 bits; send text and numbers"
        raise bad_request(f"{request.custom_id}: {message}", "requests") from None


def _status(batch: Batch) -> str:
    return _STATUSES.get(batch.status, "in_progress")


def _serialize(batch: Batch) -> MessageBatch:
    counts, status = batch.tokenmill.counts, _status(batch)
    ended = batch.completed_at or batch.expired_at or batch.cancelled_at or batch.failed_at
    removed = batch.tokenmill.results_removed_at
    return MessageBatch.model_validate(
        {
            "id": batch.id,
            "processing_status": status,
            "request_counts": MessageCounts(
                processing=counts.pending,
                succeeded=counts.succeeded,
                errored=counts.failed,
                canceled=counts.cancelled,
                expired=counts.expired,
            ),
            "created_at": _moment(batch.created_at),
            "expires_at": _moment(batch.expires_at),
            "ended_at": _moment(ended),
            "cancel_initiated_at": _moment(batch.cancelling_at),
            "archived_at": removed,
            "results_url": f"{MESSAGES_URL}/batches/{batch.id}/results" if status == "ended" and not removed else None,
        }
    )


def _moment(at: int | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


def _lines(ledger: JobLedger, number: int) -> Iterator[bytes]:
    """The lines of a part."""
    with ledger.store.open(ledger.prefix + part_key(number)) as stream:
        for batch in pq.ParquetFile(stream, pre_buffer=False).iter_batches(_BATCH_ROWS, columns=_COLUMNS):
            for row in batch.to_pylist():
                line = {"custom_id": row["custom_id"], "result": _result(row)}
                yield orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _result(row: dict[str, Any]) -> dict[str, Any]:
    status = row["status"]
    if status == RowStatus.SUCCEEDED:
        return {"type": "succeeded", "message": orjson.Fragment(row["response"])}
    if status == RowStatus.CANCELLED:
        return {"type": "canceled"}
    if status == RowStatus.EXPIRED:
        return {"type": "expired"}
    error = ApiError(row["status_code"], row["error_code"], row["error_message"])
    return {"type": "errored", "error": error.anthropic_body()}
