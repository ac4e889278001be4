"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from pipeline.gateway.batches.messages import MessageBatches
from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.inference.request_builder import DEGRADED
from pipeline.gateway.inference.responses import InferenceResponses
from pipeline.gateway.inference.sse import STREAM_ID
from pipeline.gateway.openapi.document import BODY, document_body, document_responses
from pipeline.gateway.response_models import DeletedMessageBatch, MessageBatch, MessageBatchPage, MessageTokens
from pipeline.gateway.routes.dependencies import (
    GatewayDependencies,
    IdempotencyKey,
    Parts,
    authenticated_caller,
    json_body,
)
from pipeline.gateway.routes.files_and_batches import NDJSON, check_job_limit
from pipeline.gateway.routes.inference import MODEL, document_events, document_json, reply
from schemas.requests.dialects.anthropic.body import MESSAGES_URL
from schemas.requests.tokenizing import COUNT_TOKENS_URL

InferenceCaller = Annotated[Caller, authenticated_caller(Scope.INFERENCE, anthropic=True)]
BatchesCaller = Annotated[Caller, authenticated_caller(Scope.BATCHES, anthropic=True)]
Body = Annotated[dict[str, Any], json_body()]
Cursor = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$", description="A batch's id.")]


def messages_router(answers: InferenceResponses) -> APIRouter:
    """Build the routes under `/v1/messages`."""
    router = APIRouter(prefix=MESSAGES_URL, tags=["messages"])

    @router.post(
        "", openapi_extra=document_body("MessagesBody", _MESSAGES), response_class=Response, responses=_RESPONSES
    )
    async def create(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Create a message, as with Anthropic's API."""
        return await reply(answers, request, caller, MESSAGES_URL, body)

    @router.post(
        "/count_tokens",
        openapi_extra=document_body("CountTokensBody", _COUNTED),
        response_model=MessageTokens,
        responses=_COUNTS,
    )
    async def count(request: Request, caller: InferenceCaller, body: Body) -> Response:
        """Count the tokens of a message's prompt."""
        return await reply(answers, request, caller, COUNT_TOKENS_URL, body)

    return router


def message_batches_router() -> APIRouter:
    """Build the routes under `/v1/messages/batches`."""
    router = APIRouter(prefix=f"{MESSAGES_URL}/batches", tags=["messages"])

    @router.post("", openapi_extra=document_body("MessageBatchBody", _BATCH), responses=_answers(*BODY, 409, 507))
    def create(caller: BatchesCaller, body: Body, parts: Parts, idempotency_key: IdempotencyKey = None) -> MessageBatch:
        """Create a message batch."""
        quota, check = parts.rates.storage_quota(caller), check_job_limit(caller, parts)
        return _batches(parts).create(caller.tenant, body, quota, idempotency_key, check)

    @router.get("", responses=_answers())
    def page(
        caller: BatchesCaller,
        parts: Parts,
        limit: Annotated[int, Query(ge=1, le=1_000)] = 20,
        after_id: Cursor = None,
        before_id: Cursor = None,
    ) -> MessageBatchPage:
        """List the caller's message batches, the newest first."""
        return _batches(parts).page(caller.tenant, limit, after_id, before_id)

    @router.get("/{batch_id}", responses=_answers(404))
    def get(batch_id: str, caller: BatchesCaller, parts: Parts) -> MessageBatch:
        """Retrieve a message batch."""
        return _batches(parts).get(caller.tenant, batch_id)

    @router.delete("/{batch_id}", responses=_answers(404, 409, 507))
    def delete(batch_id: str, caller: BatchesCaller, parts: Parts) -> DeletedMessageBatch:
        """Remove the results of a message batch that has ended."""
        _batches(parts).delete(caller.tenant, batch_id)
        return DeletedMessageBatch(id=batch_id)

    @router.post("/{batch_id}/cancel", responses=_answers(404, 409, 507))
    def cancel(batch_id: str, caller: BatchesCaller, parts: Parts) -> MessageBatch:
        """Cancel a message batch. Results of finished requests are retained."""
        return _batches(parts).cancel(caller.tenant, batch_id)

    @router.get("/{batch_id}/results", response_class=Response, responses=_RESULTS)
    def results(batch_id: str, caller: BatchesCaller, parts: Parts) -> Response:
        """Stream the results of a message batch that has ended, one line for each request."""
        return StreamingResponse(_batches(parts).results(caller.tenant, batch_id), media_type=NDJSON)

    return router


def _batches(parts: GatewayDependencies) -> MessageBatches:
    return MessageBatches(parts.world, parts.files, parts.batches)


def _answers(*refusals: int, **more: Any) -> dict[int | str, dict[str, Any]]:
    return document_responses(*refusals, anthropic=True, **more)


_LINES = {"schema": {"type": "string", "description": "One line for each request: its custom_id and its result."}}
_RESULTS = _answers(404, 409, 410, content={NDJSON: _LINES})
_MESSAGES = {"model": "demo", "max_tokens": 32, "messages": [{"role": "user", "content": "Hello"}]}
_COUNTED = {name: _MESSAGES[name] for name in ("model", "messages")}
_COUNTS = _answers(*BODY, 404, headers=(STREAM_ID, MODEL))
_BATCH = {"requests": [{"custom_id": "a", "params": _MESSAGES}]}
_RESPONSES = document_responses(
    *BODY,
    404,
    content=document_json("AnthropicMessage")
    | document_events("AnthropicEvent", "AnthropicError", last="the last is message_stop or an error"),
    headers=(STREAM_ID, MODEL, f"{DEGRADED}?"),
    anthropic=True,
)
