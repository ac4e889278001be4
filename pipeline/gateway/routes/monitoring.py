"""The routes for monitoring: `/metrics` for Prometheus, and `/v1/status` with the state of the installation."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Final

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.openapi.document import document_responses
from pipeline.gateway.response_models import Installation, LaneMetrics
from pipeline.gateway.routes.dependencies import Parts, authenticated_caller

_TEXT: Final = {"schema": {"type": "string"}}
_FORMATS: Final = {"text/plain": _TEXT, "application/openmetrics-text": _TEXT}


def monitoring_router() -> APIRouter:
    """Build the routes `/metrics`, for keys with the scope metrics, and `/v1/status`, for keys with the scope batches.

    Without the scope metrics the status has no monitoring samples: they cover the work of all tenants.
    """
    router = APIRouter(tags=["status"])

    @router.get("/v1/status", responses=document_responses())
    def status(caller: Annotated[Caller, authenticated_caller(Scope.BATCHES)], parts: Parts) -> Installation:
        """Retrieve workers, backlog, and interactive requests. The backlog covers the caller's own jobs, and all jobs
        for keys with the scope admin. Worker names, worker metrics and the gateway's metrics are null for keys without
        the scope metrics."""
        tenant = None if caller.has_scope(Scope.ADMIN) else caller.tenant
        if not caller.has_scope(Scope.METRICS):
            return parts.status.read(tenant, samples=False)
        answers: Counter[str] = Counter()
        for (_, result), count in parts.http_metrics.answers().items():
            answers[result] += count
        lane = LaneMetrics(**parts.http_metrics.callers())
        return parts.status.read(tenant, samples=True).model_copy(update={"lane": lane, "answers": dict(answers)})

    @router.get("/metrics", response_class=Response, responses=document_responses(content=_FORMATS))
    async def metrics(
        request: Request, caller: Annotated[Caller, authenticated_caller(Scope.METRICS)], parts: Parts
    ) -> Response:
        """Metrics of this process and of the installation, in Prometheus text format, or in OpenMetrics format when the
        client accepts it."""
        text, content_type = await run_in_threadpool(parts.metrics.encode, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    return router
