"""The routes of files, batches and models: each authenticates the caller and calls a service."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from pipeline.gateway.files.downloads import ContentHeaders, content_response
from pipeline.gateway.files.service import Files, file_response
from pipeline.gateway.files.uploads import Upload, declared_size, receive
from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.compression import choose_coding, compressed
from pipeline.gateway.http.idempotency import record_idempotency_key
from pipeline.gateway.http.pagination import (
    DEFAULT_LIMIT,
    MAX_BATCHES_PER_PAGE,
    MAX_FILES_PER_PAGE,
    PageRequest,
)
from pipeline.gateway.limits.storage_quota import StorageQuota
from pipeline.gateway.limits.upload_slots import UploadSlots
from pipeline.gateway.openapi.document import BODY, document_body, document_response, document_responses
from pipeline.gateway.records import StoredFile, derived_file_id, new_file_id
from pipeline.gateway.response_models import DeletedFile, File, ListPage, Model, ModelList
from pipeline.gateway.routes.dependencies import (
    GatewayDependencies,
    IdempotencyKey,
    Parts,
    authenticated_caller,
    json_body,
)
from pipeline.ports import World
from schemas.jobs.batch import Batch

Order = Annotated[Literal["asc", "desc"], Query(description="Sort order by creation time: `desc` is newest first.")]
After = Annotated[
    str | None,
    Query(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$",
        description="Pagination cursor: the page starts after the object with this id.",
    ),
]
FilesCaller = Annotated[Caller, authenticated_caller(Scope.FILES)]
BatchesCaller = Annotated[Caller, authenticated_caller(Scope.BATCHES)]
AnyCaller = Annotated[Caller, authenticated_caller(None)]
Body = Annotated[dict[str, Any], json_body()]
BodyOrNone = Annotated[dict[str, Any], json_body(empty=True)]
Without = Annotated[
    str | None,
    Query(
        max_length=100_000,
        pattern="^([0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*)?$",
        description="Parts to exclude, as `X-Parts` of an earlier response lists them.",
    ),
]

NDJSON: Final = "application/x-ndjson"


def files_router(max_concurrent_uploads: int) -> APIRouter:
    """Build the routes under `/v1/files`."""
    router = APIRouter(prefix="/v1/files", tags=["files"])
    upload_slots = UploadSlots(max_concurrent_uploads)

    @router.post("", openapi_extra=_UPLOAD, responses=document_responses(*BODY, 409, 507))
    async def upload(
        request: Request, caller: FilesCaller, parts: Parts, idempotency_key: IdempotencyKey = None
    ) -> File:
        """Upload a file of batch requests: JSONL or CSV, also compressed with gzip or zstd, Arrow or Parquet. Text is
        CSV if the file's name ends in .csv, .csv.gz or .csv.zst."""
        settings, quota = parts.settings, parts.rates.storage_quota(caller)
        with upload_slots.take_slot(caller.tenant):
            if idempotency_key is None:  # otherwise the file may exist already, and needs no further storage
                await run_in_threadpool(parts.files.usage.check, caller.tenant, declared_size(request), quota)
            async with receive(request, parts.world, settings.max_upload_bytes, settings.idle_seconds) as received:
                file = await run_in_threadpool(
                    _add, parts.world, parts.files, caller.tenant, received, idempotency_key, quota
                )
        return file_response(file)

    @router.get("", responses=document_responses())
    def page(
        caller: FilesCaller,
        parts: Parts,
        limit: Annotated[int, Query(ge=1, le=MAX_FILES_PER_PAGE)] = MAX_FILES_PER_PAGE,
        after: After = None,
        order: Order = "desc",
        purpose: str | None = None,
    ) -> ListPage[File]:
        """List the caller's files."""
        return parts.files.page(caller.tenant, PageRequest(limit, after, order), purpose)

    @router.get("/{file_id}", responses=document_responses(404))
    def get(file_id: str, caller: FilesCaller, parts: Parts) -> File:
        """Retrieve the metadata of a file."""
        return file_response(parts.files.get(caller.tenant, file_id))

    @router.delete("/{file_id}", responses=document_responses(404, 409, 507))
    def delete(file_id: str, caller: FilesCaller, parts: Parts) -> DeletedFile:
        """Delete a file. A file that an open batch reads can't be deleted."""
        file = parts.files.delete(caller.tenant, file_id)
        return DeletedFile(id=file.id)

    @router.get("/{file_id}/content", response_class=Response, responses=_CONTENT)
    def content(
        request: Request,
        file_id: str,
        caller: FilesCaller,
        parts: Parts,
        range_: Annotated[str | None, Header(alias="Range", description="A single byte range.")] = None,
        if_range: Annotated[
            str | None, Header(description="An ETag: the range is used only when it matches the file's.")
        ] = None,
        if_none_match: Annotated[str | None, Header(description="The ETag of the version that the client has.")] = None,
    ) -> Response:
        """Download a file, or a range of its bytes. Results are compressed if Accept-Encoding asks for gzip or zstd and
        no range is requested."""
        file = parts.files.get(caller.tenant, file_id)
        coding = choose_coding(request.headers)
        return content_response(parts.files, file, ContentHeaders(range_, if_range, if_none_match, coding))

    return router


def batches_router() -> APIRouter:
    """Build the routes under `/v1/batches`."""
    router = APIRouter(prefix="/v1/batches", tags=["batches"])

    @router.post(
        "", openapi_extra=document_body("BatchBody", _BATCH), responses=document_responses(*BODY, 404, 409, 507)
    )
    def create(caller: BatchesCaller, body: Body, parts: Parts, idempotency_key: IdempotencyKey = None) -> Batch:
        """Create a batch that runs all requests of a file."""
        return parts.batches.create(caller.tenant, body, idempotency_key, check_job_limit(caller, parts))

    @router.get("", responses=document_responses())
    def page(
        caller: BatchesCaller,
        parts: Parts,
        limit: Annotated[int, Query(ge=1, le=MAX_BATCHES_PER_PAGE)] = DEFAULT_LIMIT,
        after: After = None,
        order: Order = "desc",
    ) -> ListPage[Batch]:
        """List the caller's batches, including those submitted by other ingest sources than HTTP."""
        return parts.batches.page(caller.tenant, PageRequest(limit, after, order))

    @router.get("/{batch_id}", responses=document_responses(404))
    def get(batch_id: str, caller: BatchesCaller, parts: Parts) -> Batch:
        """Retrieve a batch."""
        return parts.batches.get(caller.tenant, batch_id)

    @router.post("/{batch_id}/cancel", responses=document_responses(404, 409, 507))
    def cancel(batch_id: str, caller: BatchesCaller, parts: Parts) -> Batch:
        """Cancel a batch. Results of finished rows are retained."""
        return parts.batches.cancel(caller.tenant, batch_id)

    @router.post("/{batch_id}/retry", openapi_extra=_RETRY, responses=document_responses(*BODY, 404, 409, 410, 507))
    def retry(batch_id: str, caller: BatchesCaller, body: BodyOrNone, parts: Parts) -> Batch:
        """Create a batch that retries the rows without a response."""
        return parts.batches.retry(caller.tenant, batch_id, body, check_job_limit(caller, parts))

    @router.get("/{batch_id}/results", response_class=Response, responses=_RESULTS)
    def results(
        request: Request, batch_id: str, caller: BatchesCaller, parts: Parts, without: Without = None
    ) -> Response:
        """Stream the results that are committed so far, as lines of OpenAI's output file."""
        found = parts.batches.results(caller.tenant, batch_id, without)
        headers = {"X-Incomplete": "true" if found.incomplete else "false", "X-Parts": found.parts}
        headers["Vary"] = "Accept-Encoding"
        data, coding = found.lines, choose_coding(request.headers)
        if coding is not None:
            headers["Content-Encoding"] = coding
            data = compressed(data, coding)
        return StreamingResponse(data, media_type=NDJSON, headers=headers)

    return router


def models_router() -> APIRouter:
    """Build the routes under `/v1/models`."""
    router = APIRouter(prefix="/v1/models", tags=["models"])

    @router.get("", responses=document_responses())
    def page(caller: AnyCaller, parts: Parts) -> ModelList:
        """List the available models."""
        return parts.models.page()

    @router.get("/{model:path}", responses=document_responses(404))
    def get(model: str, caller: AnyCaller, parts: Parts) -> Model:
        """Retrieve a model."""
        return parts.models.get(model)

    return router


def check_job_limit(caller: Caller, parts: GatewayDependencies) -> Callable[[], None]:
    """The check of the caller's limit of open jobs; it raises `ApiError` (429)."""

    def check() -> None:
        parts.rates.check_jobs(caller, lambda: parts.batches.open_jobs(caller.tenant))

    return check


def _add(world: World, files: Files, tenant: str, received: Upload, key: str | None, quota: StorageQuota) -> StoredFile:
    """Store an upload; the same upload with the same idempotency key gives the same file."""
    now = world.clock.now()
    if key is None:
        file_id = new_file_id(now, world.random)
    else:
        content = "\0".join((received.sha256, received.filename, str(received.expires_after)))
        digest = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
        now = record_idempotency_key(world, tenant, "file", key, digest)
        file_id = derived_file_id(now, tenant, key)
    life = received.expires_after
    made = StoredFile(
        id=file_id,
        tenant=tenant,
        filename=received.filename,
        purpose="batch",
        size=received.size,
        sha256=received.sha256,
        format=received.format,
        created_at=now,
        expires_at=None if life is None else now + life,
    )
    return files.add(made, received.path, quota)


_OCTETS: Final[dict[str, Any]] = {"application/octet-stream": {}}
_OF_CONTENT: Final = ("ETag", "Accept-Ranges", "Content-Disposition")
_CONTENT: Final = document_responses(
    404,
    416,
    content=_OCTETS,
    headers=("ETag", "Accept-Ranges?", "Content-Disposition", "Content-Encoding?", "Vary?"),
    others={
        206: document_response("The requested byte range.", _OCTETS, (*_OF_CONTENT, "Content-Range")),
        304: document_response("Not modified: the client has this version.", headers=_OF_CONTENT),
    },
)
_RESULTS: Final = document_responses(
    404,
    410,
    content={
        NDJSON: {"schema": {"type": "string", "description": "One line for each row, as in OpenAI's output file."}}
    },
    headers=("X-Incomplete", "X-Parts", "Content-Encoding?", "Vary"),
)
_RETRY: Final = document_body(
    "RetryBody", {"only": ["expired"], "tier": "bulk", "completion_window": "2h"}, required=False
)
_BATCH: Final = {
    "input_file_id": "file-…",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
    "metadata": {"project": "example"},
}
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"
_UPLOAD: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["file", "purpose"],
                    "dependentRequired": {_ANCHOR: [_SECONDS], _SECONDS: [_ANCHOR]},
                    "properties": {
                        "file": {"type": "string", "format": "binary", "minLength": 1},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        _ANCHOR: {"type": "string", "enum": ["created_at"]},
                        _SECONDS: {"type": "integer", "minimum": 3_600, "maximum": 2_592_000},
                    },
                }
            }
        },
    }
}
