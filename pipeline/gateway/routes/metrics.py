"""`/metrics`: figures for programs that watch."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.openapi.document import answers as documented
from pipeline.gateway.routes.dependencies import Parts, calling

_TEXT: Final = {"schema": {"type": "string"}}
_FORMS: Final = {"text/plain": _TEXT, "application/openmetrics-text": _TEXT}


def metrics_router() -> APIRouter:
    """`/metrics`, for keys with the scope metrics."""
    router = APIRouter(tags=["status"])

    @router.get("/metrics", response_class=Response, responses=documented(_FORMS))
    async def metrics(request: Request, caller: Annotated[Caller, calling(Scope.METRICS)], parts: Parts) -> Response:
        """Figures of this process and of the installation, as text of Prometheus, or of OpenMetrics where that is
        accepted."""
        text, content_type = await run_in_threadpool(parts.metrics.encode, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    return router
