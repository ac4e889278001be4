"""`/v1/status`: how the installation stands, for whoever may see batches."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from fastapi import APIRouter

from pipeline.gateway.auth import Caller
from pipeline.gateway.keys import Scope
from pipeline.gateway.openapi import answers as documented
from pipeline.gateway.parts import Parts, calling
from pipeline.gateway.shapes import Installation


def status_router() -> APIRouter:
    """`/v1/status`."""
    router = APIRouter(prefix="/v1/status", tags=["status"])

    @router.get("", responses=documented(Installation))
    def status(caller: Annotated[Caller, calling(Scope.BATCHES)], parts: Parts) -> dict[str, Any]:
        """Workers, backlog, and who waits. The backlog is the caller's own, except for the scope admin."""
        everybody = caller.may(Scope.ADMIN)
        answers: Counter[str] = Counter()
        for (_, result), count in parts.figures.answers().items():
            answers[result] += count
        document = parts.status.document(None if everybody else caller.tenant)
        return document | {"lane": parts.figures.callers(), "answers": answers}

    return router
