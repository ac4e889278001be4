"""The application: routes, and what becomes of errors on their way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pipeline.gateway.answers import Answers
from pipeline.gateway.app_errors import answer_to, api_error
from pipeline.gateway.edge import Edge
from pipeline.gateway.errors import ApiError, bad_request, unavailable
from pipeline.gateway.inference_routes import inference_router
from pipeline.gateway.page import page_router, read_files
from pipeline.gateway.parts import GatewayParts
from pipeline.gateway.routes import batches_router, files_router, models_router
from pipeline.gateway.status_routes import status_router
from pipeline.gateway.websocket import websocket_router
from pipeline.ports import PipelineError

_CODES: Final = {404: "not_found", 405: "method_not_allowed"}


def make_app(parts: GatewayParts, draining: Callable[[], bool], answers: Answers | None = None) -> Edge:
    """The application.

    Args:
        draining: whether requests are to be sent elsewhere.
        answers: to requests whose callers wait; None: only batches are served.
    """
    app = FastAPI(title="tokenmill", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.state.parts = parts
    routers = [
        files_router(parts.settings.uploads_at_once),
        batches_router(),
        models_router(),
        status_router(answers),
        page_router(read_files()),
        _health_router(draining),
    ]
    if answers is not None:
        routers += [inference_router(answers), websocket_router(answers)]
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(PipelineError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_anything)
    return Edge(app, lambda: f"req-{parts.world.random.token(12).hex()}", draining, parts.settings.requests_at_once)


def _health_router(draining: Callable[[], bool]) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def alive() -> dict[str, str]:
        """The process works."""
        return {"status": "ok"}

    @router.get("/readyz")
    async def is_ready() -> dict[str, str]:
        """Requests may be sent here."""
        if draining():
            raise unavailable("this gateway is being stopped; ask another", "draining")
        return {"status": "ready"}

    return router


async def _on_error(_request: Request, error: Exception) -> JSONResponse:
    return answer_to(api_error(error))


async def _on_anything(_request: Request, _error: Exception) -> JSONResponse:
    return answer_to(ApiError(500, "internal_error", "something broke here; tell the operator, with x-request-id"))


async def _on_invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    name = ".".join(str(step) for step in first["loc"][1:])[:200]
    return answer_to(bad_request(f"{name}: {first['msg']}", name or None))


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} is not possible here" if error.status_code == 405 else str(error.detail)
    if error.status_code == 404:
        message = "there is nothing here; docs/http.md lists what there is"
    code = _CODES.get(error.status_code, "invalid_request")
    return answer_to(ApiError(error.status_code, code, message, headers=error.headers))
