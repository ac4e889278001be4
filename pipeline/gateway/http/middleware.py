"""Around everything else: each answer has an id, each failure has OpenAI's shape, and each request is one line of the
log that tells nothing of what was asked."""

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
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.gateway.http.bodies import BodyBudget
from pipeline.gateway.http.csrf import HostGuard, check_origin
from pipeline.gateway.http.errors import ApiError, bad_request, internal_error, nothing_here, unavailable
from pipeline.gateway.http.metrics import METHODS, HttpMetrics
from pipeline.tracing import NO_TRACES, TRACEPARENT, Traces, read_traceparent, working_for

REQUEST_ID: Final = "x-request-id"
_GIVEN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SAFE: Final = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}

_FRAMES: Final = 8
_HEALTH: Final = ("/healthz", "/readyz")
_BEGINS: Final = ("http.response.start", "websocket.http.response.start", "websocket.accept")
_BODIES: Final = ("http.response.body", "websocket.http.response.body")
_WATCHED: Final = "/metrics"
"""To the end: how the last requests end is told, too."""

_UNTRACED: Final = (*_HEALTH, _WATCHED)

_AWAY_BYTES: Final = 1 << 20
_AWAY_SECONDS: Final = 1.0

logger = structlog.get_logger(__name__)


class RequestMiddleware:
    """The outermost layer of the application.

    Args:
        new_id: makes a request's id.
        draining: whether new requests are sent elsewhere.
        figures: count what is answered.
        hosts: knows the names that may be asked for.
        bodies: what may be read at once of bodies and of messages over WebSockets.
        most: requests at once; further ones are refused.
        traces: where each request is a span; questions after health and figures are none.

    Attributes:
        app: what this is around.  bodies: as given.
        active: requests that are under way, WebSockets among them.
        new_id: makes a request's id.
    """

    def __init__(
        self,
        app: ASGIApp,
        new_id: Callable[[], str],
        draining: Callable[[], bool],
        figures: HttpMetrics,
        hosts: HostGuard,
        bodies: BodyBudget,
        most: int = 2_000,
        traces: Traces = NO_TRACES,
    ) -> None:
        self.active = 0
        self.app = app
        self.bodies = bodies
        self.new_id = new_id
        self._figures = figures
        self._draining = draining
        self._hosts = hosts
        self._most = most
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.active += 1
        self._figures.began()
        try:
            if self._traces.on and scope["path"] not in _UNTRACED:
                await self._traced(scope, receive, send)
            else:
                await self._serve(scope, receive, send)
        finally:
            self.active -= 1
            self._figures.over()

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        """By OpenTelemetry's words for HTTP. The path isn't told, but its route: ids and names may stand there."""
        method, status = scope.get("method", "WEBSOCKET"), 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] in _BEGINS:
                status = message.get("status", 101)
            await send(message)

        sent = read_traceparent(Headers(scope=scope).get(TRACEPARENT))
        method = method if method in METHODS else "other"
        span = self._traces.begin(method, {"http.request.method": method}, kind="server", parent=sent)
        with working_for(span):
            await self._serve(scope, receive, send_on)
        route, caller = getattr(scope.get("route"), "path", None), scope.get("tokenmill.caller")
        span.set({"http.route": route, "http.response.status_code": status or None})
        span.set({"tokenmill.tenant": None if caller is None else caller.tenant})
        span.end(str(status) if status >= 500 else None, method if route is None else f"{method} {route}")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _GIVEN.fullmatch(given) else self.new_id()
        began, status, ended = time.monotonic(), 0, False

        async def send_on(message: Message) -> None:
            nonlocal status, ended
            if message["type"] in _BEGINS:
                status = message.get("status", 101)
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                headers.update(scope.get("tokenmill.headers", {}))
                for name, value in _SAFE.items():
                    headers.setdefault(name, value)
            elif message["type"] in _BODIES:
                ended = not message.get("more_body", False)
            elif message["type"] == "websocket.close" and not status:  # no route takes it
                await answer(nothing_here())
                return
            await send(message)

        async def answer(error: ApiError) -> None:
            await JSONResponse(error.body(), error.status, headers=error.headers)(scope, receive, send_on)

        try:
            await self._check(scope)
            await self.app(scope, receive, send_on)
        except ApiError as error:
            if "Connection" in error.headers:
                await _read_away(receive)
            await answer(error)
        except Exception as error:  # noqa: BLE001 - whatever it is: the caller was answered, and the log gets no prompt
            logger.error(
                "request_failed",
                request=request_id,
                path=_path(scope),
                error=type(error).__name__,
                at=code_location(error),
            )
            if not status:
                await answer(internal_error())
            elif not ended:  # cut it off, so that nobody takes it for whole
                raise _CutOff from None
        finally:
            self._figures.answered(scope.get("method", "WEBSOCKET"), getattr(scope.get("route"), "path", None), status)
            caller = scope.get("tokenmill.caller")
            logger.info(
                "request",
                request=request_id,
                method=scope.get("method", "WEBSOCKET"),
                path=_path(scope),
                status=status,
                tenant=None if caller is None else caller.tenant,
                key=None if caller is None else caller.key,
                milliseconds=round(1000 * (time.monotonic() - began)),
            )

    async def _check(self, scope: Scope) -> None:
        """Raises `ApiError` for what isn't even looked at."""
        if scope["path"] in _HEALTH:
            return
        if self._draining() and scope["path"] != _WATCHED:
            gone = unavailable("this gateway is being stopped; ask again", "draining", seconds=1)
            gone.headers["Connection"] = "close"
            raise gone
        if self.active > self._most:
            raise unavailable(f"{self._most} requests are under way here; ask again later", "too_many_requests")
        headers = Headers(scope=scope)
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy before this may see another end of the body, and another request behind it.
            both = bad_request("send Transfer-Encoding or Content-Length, and not both")
            both.headers["Connection"] = "close"
            raise both
        if len(headers.getlist("authorization")) > 1:
            # A proxy before this may have judged the other one.
            raise bad_request("send one Authorization header, and not several", code="several_credentials")
        check_origin(headers)
        await self._hosts.check(headers)


async def _read_away(receive: Receive) -> None:
    """Let the rest of the request come in, up to a bound: what is unread when a connection is closed has it reset, and
    the answer may be lost with it."""
    read, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_AWAY_SECONDS):
            while more and read < _AWAY_BYTES:
                message = await receive()
                read, more = read + len(message.get("body", b"")), message.get("more_body", False)


class _CutOff(Exception):
    """Ends a connection whose answer can't be ended in order."""


def code_location(error: BaseException) -> list[str]:
    """The last places on the way to the error. What it says may be a prompt, so that is left out."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return [f"{frame.filename}:{frame.lineno}:{frame.name}" for frame in frames]


def _path(scope: Scope) -> str:
    """Without the query; bounded."""
    path: str = scope["path"]
    return "".join(letter if letter.isprintable() else "?" for letter in path[:200])
