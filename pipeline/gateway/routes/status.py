"""`/v1/status`: how the installation stands, for whoever may see batches. Monitoring samples are left out for keys that
may not read /metrics: they add up what all tenants do."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from fastapi import APIRouter

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.openapi.document import answers as documented
from pipeline.gateway.openapi.schemas import Installation
from pipeline.gateway.routes.dependencies import Parts, calling


def status_router() -> APIRouter:
    """`/v1/status`."""
    router = APIRouter(prefix="/v1/status", tags=["status"])

    @router.get("", responses=documented(Installation))
    def status(caller: Annotated[Caller, calling(Scope.BATCHES)], parts: Parts) -> dict[str, Any]:
        """Workers, backlog, and who waits. The backlog is the caller's own, except for the scope admin. Workers' names
        and samples, and the gateway's, are null without the scope metrics."""
        tenant = None if caller.has_scope(Scope.ADMIN) else caller.tenant
        if not caller.has_scope(Scope.METRICS):
            return parts.status.document(tenant, samples=False) | {"lane": None, "answers": None}
        answers: Counter[str] = Counter()
        for (_, result), count in parts.figures.answers().items():
            answers[result] += count
        document = parts.status.document(tenant, samples=True)
        return document | {"lane": parts.figures.callers(), "answers": answers}

    return router
