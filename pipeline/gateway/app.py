"""The FastAPI application: it includes the routers and converts exceptions into OpenAI error responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from pipeline.gateway.http.body_reading import BodyBudget
from pipeline.gateway.http.compression import ResponseCompression
from pipeline.gateway.http.csrf import HostGuard
from pipeline.gateway.http.errors import (
    ApiError,
    api_error,
    bad_request,
    error_response,
    internal_error,
    route_not_found,
    unavailable,
)
from pipeline.gateway.http.middleware import RequestMiddleware
from pipeline.gateway.inference.responses import InferenceResponses
from pipeline.gateway.openapi.document import DocumentedApp, document_responses
from pipeline.gateway.openapi.request_schemas import build_schemas
from pipeline.gateway.page import page_router, read_files
from pipeline.gateway.response_models import Health, OpenApi
from pipeline.gateway.routes.dependencies import GatewayDependencies
from pipeline.gateway.routes.files_and_batches import batches_router, files_router, models_router
from pipeline.gateway.routes.inference import inference_router
from pipeline.gateway.routes.messages import message_batches_router, messages_router
from pipeline.gateway.routes.monitoring import monitoring_router
from pipeline.gateway.routes.tokenizing import tokenizer_router
from pipeline.gateway.routes.websocket import websocket_router
from pipeline.ports import PipelineError

_DESCRIPTION: Final = """An OpenAI-compatible API for files, batches, and interactive inference.

An unknown path is answered with 404, and a method that a path doesn't support with 405 (`components/responses`).
JSON from 1,024 bytes on is compressed if Accept-Encoding asks for gzip or zstd.
OpenAPI can't describe WebSockets: `/v1/stream` accepts them and sends the same events as a stream over SSE. A WebSocket
request that fails is refused before the handshake, with the same error object as any other route."""


def make_app(
    parts: GatewayDependencies, draining: Callable[[], bool], answers: InferenceResponses | None = None
) -> RequestMiddleware:
    """Build the ASGI application with all routes, exception handlers and the request middleware.

    Args:
        draining: returns whether the gateway is shutting down and refuses new requests.
        answers: serves interactive requests; None: the inference routes are left out.
    """
    app = DocumentedApp(
        build_schemas(None if answers is None else answers.builder.default_model),
        title="tokenmill",
        description=_DESCRIPTION,
        version=version("tokenmill"),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.parts = parts
    app.state.bodies = BodyBudget(parts.settings.max_buffered_body_bytes)
    routers = [
        files_router(parts.settings.max_concurrent_uploads),
        batches_router(),
        message_batches_router(),
        models_router(),
        monitoring_router(),
        page_router(read_files()),
        _health_router(draining),
        _document_router(app),
    ]
    if answers is not None:
        routers += [inference_router(answers), messages_router(answers), tokenizer_router(answers)]
        routers += [websocket_router(answers, parts.settings)]
    for router in routers:
        app.include_router(router)
    app.add_middleware(ResponseCompression)
    app.add_exception_handler(PipelineError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    routes = [route for router in routers for route in router.routes]
    app.add_exception_handler(HTTPException, partial(_on_http, routes))
    app.add_exception_handler(Exception, _on_unexpected)
    hosts = HostGuard(parts.settings.hosts, lambda: parts.authority.is_open)
    max_requests = parts.settings.max_concurrent_requests
    new_id, traces = (lambda: f"req-{parts.world.random.token(12).hex()}"), parts.world.traces
    return RequestMiddleware(app, new_id, draining, parts.http_metrics, hosts, app.state.bodies, max_requests, traces)


def _health_router(draining: Callable[[], bool]) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/healthz", responses=document_responses(keyed=None))
    async def alive() -> Health:
        """Liveness probe: the process is running."""
        return Health(status="ok")

    @router.get("/readyz", responses=document_responses(503, keyed=None))
    async def is_ready() -> Health:
        """Readiness probe: the gateway accepts requests; 503 while it shuts down."""
        if draining():
            raise unavailable("this gateway is being stopped; ask another", "draining")
        return Health(status="ready")

    return router


def _document_router(app: FastAPI) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/openapi.json", response_model=OpenApi, responses=document_responses(keyed=False))
    def document() -> JSONResponse:
        """The OpenAPI document of this gateway."""
        return JSONResponse(app.openapi())

    return router


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(api_error(error), request.scope)


async def _on_unexpected(request: Request, _error: Exception) -> JSONResponse:
    return error_response(internal_error(), request.scope)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    name = ".".join(str(step) for step in first["loc"][1:])[:200]
    return error_response(bad_request(f"{name}: {first['msg']}", name or None), request.scope)


async def _on_http(routes: Sequence[BaseRoute], request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(route_not_found(), request.scope)
    if error.status_code == 405:
        path = request.url.path
        matching = [route for route in routes if isinstance(route, APIRoute) and route.path_regex.match(path)]
        allowed = ", ".join(sorted({method for route in matching for method in route.methods or ()}))
        message = f"{request.method} is not possible here, but {allowed}"
        return error_response(ApiError(405, "method_not_allowed", message, headers={"Allow": allowed}), request.scope)
    return error_response(
        ApiError(error.status_code, "invalid_request", str(error.detail), headers=error.headers), request.scope
    )
