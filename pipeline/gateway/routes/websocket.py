"""`WS /v1/stream`: the same events as over SSE, with sequential requests on one connection.

The client sends JSON: `{"type": "request", "url": …, "body": {…}}`, `{"type": "cancel"}`, or
`{"type": "resume", "stream": ID, "after": NUMBER}`. The gateway sends `{"type": "begin", "stream": ID, "model": NAME}`
with the name of the model that answers, then `{"type": "event", "id": NUMBER, "data": CHUNK}` for each event, and
`{"type": "done"}`; or `{"type": "error", "error": …}`. An unexpected error is sent as `internal_error`, and the
connection is closed (1011).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import orjson
import structlog
from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.websockets import WebSocketState

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Caller, require_scope
from pipeline.gateway.http.body_reading import parse_object_off_loop
from pipeline.gateway.http.errors import (
    RETRY_SECONDS,
    ApiError,
    api_error,
    bad_request,
    error_response,
    internal_error,
    unavailable,
)
from pipeline.gateway.http.middleware import code_location
from pipeline.gateway.inference.chunks import DONE
from pipeline.gateway.inference.responses import InferenceResponses, Stream
from pipeline.gateway.inference.sse import read_items
from pipeline.gateway.routes.dependencies import GatewayDependencies
from pipeline.ports import PipelineError
from schemas.requests.parsing import CHAT_URL, COMPLETIONS_URL
from schemas.settings.gateway import GatewayOptions

_INTERNAL_ERROR: Final = 1011
"""The WebSocket close code for an unexpected server error (RFC 6455, section 7.4.1)."""

_URLS: Final = (CHAT_URL, COMPLETIONS_URL)
_CANCEL = re.compile(r'\s{0,9}\{\s{0,9}"type"\s{0,9}:\s{0,9}"cancel"\s{0,9}\}\s{0,9}')

logger = structlog.get_logger(__name__)


class WebSocketSlots:
    """Slots for open WebSockets, bounded for each tenant and in total. For one event loop.

    Args:
        max_sockets: of all tenants.  max_of_tenant: of one tenant.
    """

    def __init__(self, max_sockets: int, max_of_tenant: int) -> None:
        self._max_sockets = max_sockets
        self._max_of_tenant = max_of_tenant
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def take_slot(self, tenant: str) -> Iterator[None]:
        """Hold a slot until the block ends; raises `ApiError` (429, 503)."""
        if self._open[tenant] >= self._max_of_tenant:
            message = f"{self._max_of_tenant} WebSockets of this tenant are open; close one, or ask again later"
            raise ApiError(429, "too_many_websockets", message, headers={"Retry-After": str(RETRY_SECONDS)})
        if self._open.total() >= self._max_sockets:
            message = f"{self._max_sockets} WebSockets are open here; ask again later"
            raise unavailable(message, "too_many_connections")
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]


def websocket_router(answers: InferenceResponses, settings: GatewayOptions) -> APIRouter:
    """Build the route `/v1/stream`."""
    router = APIRouter()
    slots = WebSocketSlots(settings.max_websockets, settings.max_tenant_websockets)

    @router.websocket("/v1/stream")
    async def stream(socket: WebSocket) -> None:
        parts: GatewayDependencies = socket.app.state.parts
        with contextlib.ExitStack() as slot:
            try:
                caller = await run_in_threadpool(_caller, socket, parts)
                socket.scope["tokenmill.caller"] = caller
                slot.enter_context(slots.take_slot(caller.tenant))
            except PipelineError as error:
                refused: JSONResponse = error_response(api_error(error), socket.scope)
                await socket.send_denial_response(refused)
                return
            await socket.accept()
            with contextlib.suppress(WebSocketDisconnect):
                await _Connection(socket, caller, answers, parts).serve()

    return router


def _caller(socket: WebSocket, parts: GatewayDependencies) -> Caller:
    """Authenticate the connection's key, which may have been revoked since; raises `ApiError`."""
    caller = parts.authority.caller(socket.headers.get("authorization"))
    require_scope(caller, Scope.INFERENCE)
    return caller


class _Connection:
    """A WebSocket connection and its current stream."""

    def __init__(
        self, socket: WebSocket, caller: Caller, answers: InferenceResponses, parts: GatewayDependencies
    ) -> None:
        self._socket = socket
        self._caller = caller
        self._answers = answers
        self._parts = parts
        self._limits = parts.limits
        self._reading: asyncio.Task[None] | None = None
        self._has_sent_end = False  # the stream's end is being sent: the client may start the next one

    async def serve(self) -> None:
        """Handle messages until the client disconnects."""
        try:
            while True:
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                text = message.get("text") or (message.get("bytes") or b"").decode(errors="replace")
                try:
                    await self._handle(text)
                except PipelineError as error:
                    await self._send({"type": "error", **api_error(error).body()})
                except Exception as error:  # noqa: BLE001 - of this connection alone
                    await self._close_with_error(error)
                    return
        finally:
            await self._stop()

    async def _handle(self, text: str) -> None:
        """Handle a message. Before it is parsed, the key is checked again and the message counts as a request, except
        for `cancel`."""
        if _CANCEL.fullmatch(text) is None:
            self._caller = await run_in_threadpool(self._admit)
        await self._dispatch(await parse_object_off_loop(text, self._limits.max_json_depth + 1))

    def _admit(self) -> Caller:
        caller = _caller(self._socket, self._parts)
        self._parts.rates.take_request(caller)
        return caller

    async def _dispatch(self, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "cancel":
            await self._stop()
            return
        if kind not in ("request", "resume"):
            raise bad_request("type must be request, resume or cancel", "type")
        if self._has_sent_end and self._reading is not None:
            await asyncio.wait({self._reading})
        if self._reading is not None and not self._reading.done():
            raise ApiError(409, "busy", "a stream is under way on this connection; wait for its end, or cancel it")
        self._has_sent_end = False
        self._reading = asyncio.create_task(self._read(message))

    async def _read(self, message: dict[str, Any]) -> None:
        """Send one stream to its end; an unexpected error closes the connection."""
        try:
            await self._send_stream(message)
        except Exception as error:  # noqa: BLE001 - of this connection alone
            self._has_sent_end = True
            await self._close_with_error(error)

    async def _send_stream(self, message: dict[str, Any]) -> None:
        try:
            stream, after = await self._begin(message)
        except PipelineError as error:
            self._has_sent_end = True
            await self._send({"type": "error", **api_error(error).body()})
            return
        try:
            await self._send({"type": "begin", "stream": stream.id, "model": stream.served_by})
            async for items in read_items(stream, after):
                for item in items:
                    if item.data != DONE:
                        data = orjson.Fragment(item.data)
                        await self._send({"type": "event", "id": item.number, "data": data})
            self._has_sent_end = True
            await self._send({"type": "done"})
        finally:
            self._answers.detach(stream)
            await stream.wait_released()

    async def _begin(self, message: dict[str, Any]) -> tuple[Stream, int]:
        if message["type"] == "resume":
            after, name = message.get("after", -1), message.get("stream")
            if isinstance(after, bool) or not isinstance(after, int) or not isinstance(name, str):
                raise bad_request("resume takes a stream's id and, as after, the number of the last event", "after")
            return self._answers.find(self._caller.tenant, name), after
        url, body = message.get("url"), message.get("body")
        if url not in _URLS:
            raise bad_request(f"url must be {' or '.join(_URLS)}", "url")
        if not isinstance(body, dict):
            raise bad_request("body must be an object, as OpenAI's API takes it", "body")
        inference = await self._answers.read(self._caller, url, body | {"stream": True})
        return await self._answers.stream(inference), -1

    async def _stop(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._reading
            self._reading = None

    async def _close_with_error(self, error: Exception) -> None:
        """Close the connection with an error that holds no details. When the client has disconnected, which is the most
        frequent reason for the error, nothing is sent."""
        states = {self._socket.client_state, self._socket.application_state}
        if isinstance(error, WebSocketDisconnect | OSError) or states != {WebSocketState.CONNECTED}:
            return
        logger.error("websocket_failed", error=type(error).__name__, at=code_location(error))
        with contextlib.suppress(WebSocketDisconnect, OSError, RuntimeError):  # it goes meanwhile
            await self._send({"type": "error", **internal_error().body()})
            await self._socket.close(_INTERNAL_ERROR)

    async def _send(self, message: dict[str, Any]) -> None:
        await self._socket.send_text(orjson.dumps(message).decode())
