"""The routes of files, batches and models: each finds out who calls, and hands over to the part that answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from pipeline.gateway.files.service import Files
from pipeline.gateway.files.uploads import Upload, declared_size, receive
from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.http.idempotency import record_idempotency_key
from pipeline.gateway.http.pagination import DEFAULT_LIMIT, MAX_BATCHES_PER_PAGE, MAX_FILES_PER_PAGE, PageRequest
from pipeline.gateway.http.ranges import Unsatisfiable, read_range, wanted_bytes
from pipeline.gateway.limits.storage_quota import StorageQuota
from pipeline.gateway.limits.upload_slots import UploadSlots
from pipeline.gateway.openapi.document import BODY, answers, other, takes
from pipeline.gateway.openapi.schemas import Batch, DeletedFile, File, ListPage, Model, ModelList
from pipeline.gateway.records import StoredFile, derived_file_id, new_file_id
from pipeline.gateway.routes.dependencies import GatewayDependencies, IdempotencyKey, Parts, calling, json_body
from pipeline.ports import World

Order = Annotated[Literal["asc", "desc"], Query(description="By when they were made: the newest first, or last.")]
After = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$", description="Go on behind this id.")]
FilesCaller = Annotated[Caller, calling(Scope.FILES)]
BatchesCaller = Annotated[Caller, calling(Scope.BATCHES)]
AnyCaller = Annotated[Caller, calling(None)]
Body = Annotated[dict[str, Any], json_body()]
BodyOrNone = Annotated[dict[str, Any], json_body(empty=True)]
Without = Annotated[
    str | None,
    Query(
        max_length=100_000,
        pattern="^([0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*)?$",
        description="Parts that the caller has, as `X-Parts` said.",
    ),
]

NDJSON: Final = "application/x-ndjson"


def files_router(uploads_at_once: int) -> APIRouter:
    """`/v1/files`."""
    router = APIRouter(prefix="/v1/files", tags=["files"])
    upload_slots = UploadSlots(uploads_at_once)

    @router.post("", openapi_extra=_UPLOAD, responses=answers(File, *BODY, 409, 507))
    async def upload(
        request: Request, caller: FilesCaller, parts: Parts, idempotency_key: IdempotencyKey = None
    ) -> dict[str, Any]:
        """Upload a file of requests: JSONL or Parquet."""
        settings, quota = parts.settings, parts.rates.storage_quota(caller)
        with upload_slots.take_slot(caller.tenant):
            if idempotency_key is None:  # else it may stand already
                await run_in_threadpool(parts.files.usage.check, caller.tenant, declared_size(request), quota)
            async with receive(request, parts.world, settings.most_upload_bytes, settings.idle_seconds) as received:
                file = await run_in_threadpool(
                    _add, parts.world, parts.files, caller.tenant, received, idempotency_key, quota
                )
        return file.document()

    @router.get("", responses=answers(ListPage[File]))
    def page(
        caller: FilesCaller,
        parts: Parts,
        limit: Annotated[int, Query(ge=1, le=MAX_FILES_PER_PAGE)] = MAX_FILES_PER_PAGE,
        after: After = None,
        order: Order = "desc",
        purpose: str | None = None,
    ) -> dict[str, Any]:
        """The caller's files."""
        return parts.files.page(caller.tenant, PageRequest(limit, after, order), purpose).document()

    @router.get("/{file_id}", responses=answers(File, 404))
    def get(file_id: str, caller: FilesCaller, parts: Parts) -> dict[str, Any]:
        """What is known of a file."""
        return parts.files.get(caller.tenant, file_id).document()

    @router.delete("/{file_id}", responses=answers(DeletedFile, 404, 409, 507))
    def delete(file_id: str, caller: FilesCaller, parts: Parts) -> dict[str, Any]:
        """Remove a file that no open batch reads."""
        file = parts.files.delete(caller.tenant, file_id)
        return {"id": file.id, "object": "file", "deleted": True}

    @router.get("/{file_id}/content", response_class=Response, responses=_CONTENT)
    def content(
        file_id: str,
        caller: FilesCaller,
        parts: Parts,
        range_: Annotated[str | None, Header(alias="Range", description="Of bytes, one.")] = None,
        if_range: Annotated[str | None, Header(description="An ETag; with another one all is sent.")] = None,
        if_none_match: Annotated[str | None, Header(description="An ETag that the caller has the bytes of.")] = None,
    ) -> Response:
        """The bytes of a file, or a range of them."""
        wanted = _Wanted(range_, if_range, if_none_match)
        return _content(parts.files, parts.files.get(caller.tenant, file_id), wanted)

    return router


def batches_router() -> APIRouter:
    """`/v1/batches`."""
    router = APIRouter(prefix="/v1/batches", tags=["batches"])

    @router.post("", openapi_extra=takes("BatchBody", _BATCH), responses=answers(Batch, *BODY, 404, 409, 507))
    def create(
        caller: BatchesCaller, body: Body, parts: Parts, idempotency_key: IdempotencyKey = None
    ) -> dict[str, Any]:
        """Answer all requests of a file."""
        return parts.batches.create(caller.tenant, body, idempotency_key, _room(caller, parts))

    @router.get("", responses=answers(ListPage[Batch]))
    def page(
        caller: BatchesCaller,
        parts: Parts,
        limit: Annotated[int, Query(ge=1, le=MAX_BATCHES_PER_PAGE)] = DEFAULT_LIMIT,
        after: After = None,
        order: Order = "desc",
    ) -> dict[str, Any]:
        """The caller's batches, by whatever door they came."""
        return parts.batches.page(caller.tenant, PageRequest(limit, after, order)).document()

    @router.get("/{batch_id}", responses=answers(Batch, 404))
    def get(batch_id: str, caller: BatchesCaller, parts: Parts) -> dict[str, Any]:
        """How a batch stands."""
        return parts.batches.get(caller.tenant, batch_id)

    @router.post("/{batch_id}/cancel", responses=answers(Batch, 404, 409, 507))
    def cancel(batch_id: str, caller: BatchesCaller, parts: Parts) -> dict[str, Any]:
        """End a batch before its time; what is finished is kept."""
        return parts.batches.cancel(caller.tenant, batch_id)

    @router.post("/{batch_id}/retry", openapi_extra=_RETRY, responses=answers(Batch, *BODY, 404, 409, 410, 507))
    def retry(batch_id: str, caller: BatchesCaller, body: BodyOrNone, parts: Parts) -> dict[str, Any]:
        """A batch of the rows that got no answer."""
        return parts.batches.retry(caller.tenant, batch_id, body, _room(caller, parts))

    @router.get("/{batch_id}/results", response_class=Response, responses=_RESULTS)
    def results(batch_id: str, caller: BatchesCaller, parts: Parts, without: Without = None) -> Response:
        """What is committed so far, as lines of OpenAI's output file."""
        found = parts.batches.results(caller.tenant, batch_id, without)
        headers = {"X-Incomplete": "true" if found.incomplete else "false", "X-Parts": found.parts}
        return StreamingResponse(found.lines, media_type=NDJSON, headers=headers)

    return router


def models_router() -> APIRouter:
    """`/v1/models`."""
    router = APIRouter(prefix="/v1/models", tags=["models"])

    @router.get("", responses=answers(ModelList))
    def page(caller: AnyCaller, parts: Parts) -> dict[str, Any]:
        """The models that requests can name."""
        return parts.models.page()

    @router.get("/{model:path}", responses=answers(Model, 404))
    def get(model: str, caller: AnyCaller, parts: Parts) -> dict[str, Any]:
        """One of them."""
        return parts.models.get(model)

    return router


def _room(caller: Caller, parts: GatewayDependencies) -> Callable[[], None]:
    """Raises `ApiError` when the caller has too many jobs."""

    def check() -> None:
        parts.rates.check_jobs(caller, lambda: parts.batches.open_jobs(caller.tenant))

    return check


def _add(world: World, files: Files, tenant: str, received: Upload, key: str | None, quota: StorageQuota) -> StoredFile:
    """Store what came; the same upload with the same key is the same file."""
    now = world.clock.now()
    if key is None:
        file_id = new_file_id(now, world.random)
    else:
        said = "\0".join((received.sha256, received.filename, str(received.expires_after)))
        digest = hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()
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


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is asked for of a file's bytes, by headers."""

    range: str | None
    if_range: str | None
    if_none_match: str | None


def _content(files: Files, file: StoredFile, asked: _Wanted) -> Response:
    tag = f'"{file.sha256}"'
    headers = {
        "ETag": tag,
        "Accept-Ranges": "bytes",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
        "Content-Type": "application/octet-stream",
    }
    if asked.if_none_match in (tag, "*"):
        return Response(status_code=304, headers=headers)
    try:
        wanted = wanted_bytes(asked.range if asked.if_range in (None, tag) else None, file.size)
    except Unsatisfiable:
        raise ApiError(
            416,
            "range_not_satisfiable",
            f"the file has {file.size} bytes, and the range lies behind them",
            headers={"Content-Range": f"bytes */{file.size}"},
        ) from None
    status = 200 if wanted is None else 206
    if wanted is None:
        wanted = range(file.size)
    else:
        headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{file.size}"
    headers["Content-Length"] = str(len(wanted))
    return StreamingResponse(read_range(files.open(file), wanted), status_code=status, headers=headers)


_OCTETS: Final[dict[str, Any]] = {"application/octet-stream": {}}
_OF_CONTENT: Final = ("ETag", "Accept-Ranges", "Content-Disposition")
_CONTENT: Final = answers(
    _OCTETS,
    404,
    416,
    headers=_OF_CONTENT,
    others={
        206: other("A range of the bytes.", _OCTETS, (*_OF_CONTENT, "Content-Range")),
        304: other("The caller has them.", headers=_OF_CONTENT),
    },
)
_RESULTS: Final = answers(
    {NDJSON: {"schema": {"type": "string", "description": "A line for each row, as in OpenAI's output file."}}},
    404,
    410,
    headers=("X-Incomplete", "X-Parts"),
)
_RETRY: Final = takes("RetryBody", {"only": ["expired"], "tier": "bulk", "completion_window": "2h"}, required=False)
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
