"""The outermost ASGI middleware: request ids, security headers, OpenAI-shaped errors, metrics, traces, and one log line
for each request that holds no prompt."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import traceback
from collections.abc import Callable
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.gateway.http.body_reading import BodyBudget
from pipeline.gateway.http.csrf import HostGuard, check_origin
from pipeline.gateway.http.errors import (
    REQUEST_ID_SCOPE,
    ApiError,
    bad_request,
    error_response,
    internal_error,
    is_anthropic,
    route_not_found,
    unavailable,
)
from pipeline.gateway.http.metrics import METHODS, HttpMetrics
from pipeline.tracing import NO_TRACES, TRACEPARENT, Traces, read_traceparent, working_for

REQUEST_ID: Final = "x-request-id"
_ANTHROPIC_REQUEST_ID: Final = "request-id"
_GIVEN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SECURITY_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}

_FRAMES: Final = 8
_HEALTH: Final = ("/healthz", "/readyz")
_BEGINS: Final = ("http.response.start", "websocket.http.response.start", "websocket.accept")
_BODIES: Final = ("http.response.body", "websocket.http.response.body")
_METRICS: Final = "/metrics"
"""Served during shutdown, too, so that the last requests are counted in a scrape."""

_UNTRACED: Final = (*_HEALTH, _METRICS)

_MAX_DISCARDED_BYTES: Final = 1 << 20
_MAX_DISCARD_SECONDS: Final = 1.0

logger = structlog.get_logger(__name__)


class RequestMiddleware:
    """The outermost layer of the application.

    Args:
        new_id: creates a request id.
        draining: returns whether the gateway is shutting down and refuses new requests.
        metrics: counts requests and responses.
        hosts: checks the Host header.
        bodies: the memory budget of request bodies and WebSocket messages.
        max_requests: concurrent requests; further ones are refused.
        traces: each request is a span, except health checks and scrapes of metrics.

    Attributes:
        app: the wrapped application.  bodies: as given.
        active: requests in progress, WebSockets included.
        new_id: creates a request id.
    """

    def __init__(
        self,
        app: ASGIApp,
        new_id: Callable[[], str],
        draining: Callable[[], bool],
        metrics: HttpMetrics,
        hosts: HostGuard,
        bodies: BodyBudget,
        max_requests: int = 2_000,
        traces: Traces = NO_TRACES,
    ) -> None:
        self.active = 0
        self.app = app
        self.bodies = bodies
        self.new_id = new_id
        self._metrics = metrics
        self._draining = draining
        self._hosts = hosts
        self._max_requests = max_requests
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.active += 1
        self._metrics.request_started()
        try:
            if self._traces.is_enabled and scope["path"] not in _UNTRACED:
                await self._traced(scope, receive, send)
            else:
                await self._serve(scope, receive, send)
        finally:
            self.active -= 1
            self._metrics.request_finished()

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request in a span with OpenTelemetry's HTTP attributes. The span has the route, not the path, which
        may hold ids and names."""
        method, status = scope.get("method", "WEBSOCKET"), 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] in _BEGINS:
                status = message.get("status", 101)
            await send(message)

        parent = read_traceparent(Headers(scope=scope).get(TRACEPARENT))
        method = method if method in METHODS else "other"
        span = self._traces.begin(method, {"http.request.method": method}, kind="server", parent=parent)
        with working_for(span):
            await self._serve(scope, receive, send_on)
        route, caller = getattr(scope.get("route"), "path", None), scope.get("tokenmill.caller")
        span.set({"http.route": route, "http.response.status_code": status or None})
        span.set({"tokenmill.tenant": None if caller is None else caller.tenant})
        span.end(str(status) if status >= 500 else None, method if route is None else f"{method} {route}")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _GIVEN.fullmatch(given) else self.new_id()
        scope[REQUEST_ID_SCOPE] = request_id
        began, status, ended = time.monotonic(), 0, False

        async def send_on(message: Message) -> None:
            nonlocal status, ended
            if message["type"] in _BEGINS:
                status = message.get("status", 101)
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if is_anthropic(scope):
                    headers[_ANTHROPIC_REQUEST_ID] = request_id
                headers.update(scope.get("tokenmill.headers", {}))
                for name, value in _SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            elif message["type"] in _BODIES:
                ended = not message.get("more_body", False)
            elif message["type"] == "websocket.close" and not status:  # no route accepts this WebSocket
                await answer(route_not_found())
                return
            await send(message)

        async def answer(error: ApiError) -> None:
            await error_response(error, scope)(scope, receive, send_on)

        try:
            await self._check(scope)
            await self.app(scope, receive, send_on)
        except ApiError as error:
            if "Connection" in error.headers:
                await _discard_body(receive)
            await answer(error)
        except Exception as error:  # noqa: BLE001 - any error: the caller gets a response, and the log no prompt
            logger.error(
                "request_failed",
                request=request_id,
                path=_path(scope),
                error=type(error).__name__,
                at=code_location(error),
            )
            if not status:
                await answer(internal_error())
            elif not ended:  # abort the connection, so that the client doesn't take the response for complete
                raise _CutOff from None
        finally:
            method = scope.get("method", "WEBSOCKET")
            self._metrics.count_response(method, getattr(scope.get("route"), "path", None), status)
            caller = scope.get("tokenmill.caller")
            logger.info(
                "request",
                request=request_id,
                method=method,
                path=_path(scope),
                status=status,
                tenant=None if caller is None else caller.tenant,
                key=None if caller is None else caller.key,
                milliseconds=round(1000 * (time.monotonic() - began)),
            )

    async def _check(self, scope: Scope) -> None:
        """Raises `ApiError` for a request that is refused before routing."""
        if scope["path"] in _HEALTH:
            return
        if self._draining() and scope["path"] != _METRICS:
            draining = unavailable("this gateway is being stopped; ask again", "draining", seconds=1)
            draining.headers["Connection"] = "close"
            raise draining
        most = self._max_requests
        if self.active > most:
            raise unavailable(f"{most} requests are under way here; ask again later", "too_many_requests")
        headers = Headers(scope=scope)
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy in front may see another end of the body, and a smuggled request after it.
            both = bad_request("send Transfer-Encoding or Content-Length, and not both")
            both.headers["Connection"] = "close"
            raise both
        if len(headers.getlist("authorization")) > 1:
            # A proxy in front may have checked the other one.
            raise bad_request("send one Authorization header, and not several", code="several_credentials")
        check_origin(headers)
        await self._hosts.check(headers)


async def _discard_body(receive: Receive) -> None:
    """Read and discard the rest of the request, up to a bound: closing a connection with unread data resets it, and the
    client may lose the response."""
    read, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_MAX_DISCARD_SECONDS):
            while more and read < _MAX_DISCARDED_BYTES:
                message = await receive()
                read, more = read + len(message.get("body", b"")), message.get("more_body", False)


class _CutOff(Exception):
    """Raised to abort a connection whose response can't be completed."""


def code_location(error: BaseException) -> list[str]:
    """The innermost stack frames of an error, without its message, which may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return [f"{frame.filename}:{frame.lineno}:{frame.name}" for frame in frames]


def _path(scope: Scope) -> str:
    """The request's path for the log, without the query and bounded in length."""
    path: str = scope["path"]
    return "".join(character if character.isprintable() else "?" for character in path[:200])
