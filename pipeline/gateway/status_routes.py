"""`/v1/status`: how the installation stands, for whoever may see batches."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter

from pipeline.gateway.answers import Answers
from pipeline.gateway.auth import Caller
from pipeline.gateway.keys import Scope
from pipeline.gateway.openapi import answers as documented
from pipeline.gateway.parts import Parts, calling
from pipeline.gateway.shapes import Installation


def status_router(answers: Answers | None) -> APIRouter:
    """`/v1/status`. `answers`: to requests whose callers wait here; None: there are none."""
    router = APIRouter(prefix="/v1/status", tags=["status"])

    @router.get("", responses=documented(Installation))
    def status(caller: Annotated[Caller, calling(Scope.BATCHES)], parts: Parts) -> dict[str, Any]:
        """Workers, backlog, and who waits. The backlog is the caller's own, except for the scope admin."""
        everybody = caller.may(Scope.ADMIN)
        lane = {"open": 0, "waiting": 0} if answers is None else answers.bridge.figures()
        return parts.status.document(None if everybody else caller.tenant) | {"lane": lane}

    return router
