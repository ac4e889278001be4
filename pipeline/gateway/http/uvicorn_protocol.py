"""uvicorn's protocols for HTTP and WebSocket connections, with additional limits.

Time-outs close connections that send their headers or messages too slowly, or don't read their responses. Invalid HTTP
and connections above a bound are answered with the same error object as all other errors."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

import h11
import orjson
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from pipeline.gateway.http.body_reading import BodyBudget, sender_of
from pipeline.gateway.http.errors import ApiError, bad_request, unavailable
from pipeline.gateway.http.middleware import REQUEST_ID

_POLICY: Final = 1008
"""The WebSocket close code for a policy violation."""

_TOO_LARGE: Final = 1009
"""The WebSocket close code for a message that is too large."""

_TRY_AGAIN_LATER: Final = 1013

_MAX_WAITING_MESSAGES: Final = 64
"""Received but unread messages of a connection. The event loop reads 256 KiB at once, which may hold 40,000
messages."""

_MAX_FRAMING: Final = 2
"""The bound of received bytes for each byte of the largest message: frames have headers, and may be empty."""

_MAX_PONG_BYTES: Final = 64 << 10
"""Unsent pongs for a peer that sends pings and reads nothing."""


class _WriteTimeoutProtocol(asyncio.Protocol):
    """A connection that is aborted when its peer reads nothing for a while. The write buffer holds at most one write:
    before the next one the application is paused.

    Attributes:
        write_timeout_seconds: the time-out.
    """

    write_timeout_seconds: float
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pause the application as soon as the write buffer holds data."""
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=0)
        super().connection_made(transport)

    def pause_writing(self) -> None:
        """The peer doesn't read all data: start the time-out."""
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        """The peer has read all data: stop the time-out."""
        self._stop_write_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time-out."""
        self._stop_write_timer()
        super().connection_lost(exc)

    def _start_write_timer(self) -> None:
        max_unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.write_timeout_seconds, self._check_progress, max_unsent_bytes)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_progress(self, unsent_bytes_before: int) -> None:
        if self.transport.get_write_buffer_size() < unsent_bytes_before:
            self._start_write_timer()
        else:
            self.transport.abort()


class HttpProtocol(_WriteTimeoutProtocol, H11Protocol):
    """An HTTP connection.

    Args:
        header_seconds: the time-out for a request's headers, from the connection's beginning or the request's first
            byte.
        write_timeout_seconds: the time-out for a peer that reads nothing of its response.
        max_connections: concurrent connections; further ones are answered with 503 and closed.
        new_id: creates a request id.
    """

    def __init__(
        self,
        *args: Any,
        header_seconds: float,
        write_timeout_seconds: float,
        max_connections: int,
        new_id: Callable[[], str],
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self.write_timeout_seconds = write_timeout_seconds
        self._header_seconds = header_seconds
        self._max_connections = max_connections
        self._new_id = new_id
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time-out for the first request's headers."""
        super().connection_made(transport)
        # asyncio sets TCP_NODELAY only for sockets that were created with their protocol's number, and this one isn't.
        # Without it the kernel holds a response's body back until its headers are acknowledged, which adds 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        most = self._max_connections
        if len(self.connections) > most:
            full = unavailable(f"{most} connections are open here; ask again later", "too_many_connections")
            headers = {**full.headers, "Connection": "close", REQUEST_ID: self._new_id()}
            self.app = JSONResponse(full.body(), full.status, headers)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes. The first byte of a request starts the time-out for its headers."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_header_timer()
        elif self._header_timer is None:
            self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time-outs."""
        self._stop_header_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, or a request with too large headers, with an error object."""
        error = bad_request(msg)
        body = orjson.dumps(error.body())
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
            (REQUEST_ID, self._new_id()),
        ]
        parts = (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.transport.close()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self._header_seconds, self._close_if_idle)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close_if_idle(self) -> None:
        self._header_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


class WebSocketProtocol(_WriteTimeoutProtocol, WebSocketsSansIOProtocol):
    """A WebSocket connection. The bytes of a message are reserved in the body budget from when they are received until
    the application asks for the next message: then it has parsed this one. They are reserved for the tenant once the
    caller is authenticated.

    Args:
        write_timeout_seconds: the time-out for a peer that reads nothing.
        message_seconds: the time-out from a message's first byte to its last; pings don't extend it.
        budget: the memory budget of bodies that are being read.
    """

    def __init__(
        self, *args: Any, write_timeout_seconds: float, message_seconds: float, budget: BodyBudget, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.write_timeout_seconds = write_timeout_seconds
        self._message_seconds = message_seconds
        self._message_timer: asyncio.TimerHandle | None = None
        self._budget = budget
        self._sender = ""  # whose share of the budget the reserved bytes count against
        self._reserved_bytes = 0  # in the budget: of the incomplete message and of complete, unparsed ones
        self._incomplete_bytes = 0
        self._received_bytes = 0  # by the last read
        self._waiting_bytes: deque[int] = deque()  # of complete messages; the first one is being parsed
        self._is_parsing = False
        self._pong_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Handle received bytes; an incomplete message starts the time-out for its rest."""
        self._received_bytes = len(data)
        if not self._reserved_bytes:
            self._sender = sender_of(getattr(self, "scope", {"client": self.client}))
        try:
            self._budget.reserve(len(data), self._sender)
        except ApiError as error:
            self._fail(_TRY_AGAIN_LATER, error.message)
            return
        self._reserved_bytes += len(data)
        self._incomplete_bytes += len(data)
        super().data_received(data)
        if not self.frames:  # only the beginning of a frame remains, even after many pings
            self._incomplete_bytes = len(self.conn.reader.buffer)
        if not self._incomplete_bytes:
            self._stop_message_timer()
        elif self._message_timer is None:
            self._start_message_timer()
        self._release_parsed()
        if self._incomplete_bytes > _MAX_FRAMING * self.config.ws_max_size + self._received_bytes:
            self._fail(_TOO_LARGE, "a message has too many fragments")
        elif len(self._waiting_bytes) > _MAX_WAITING_MESSAGES:
            self._fail(_POLICY, "too many messages at once")

    def send_receive_event_to_app(self) -> None:
        """Pass a complete message to the application."""
        self._stop_message_timer()
        self._waiting_bytes.append(sum(map(len, self.frames)))
        self._incomplete_bytes = min(self._incomplete_bytes, self._received_bytes)
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        """The next message. The application has then parsed the previous one, so its bytes are released."""
        if self._is_parsing:
            self._waiting_bytes.popleft()
            self._release_parsed()
        message = await super().receive()
        self._is_parsing = message["type"] == "websocket.receive"
        return message

    def handle_ping(self) -> None:
        """Answer a ping, unless too many pongs are unread by the peer."""
        answer = b"".join(self.conn.data_to_send())
        self._pong_bytes = 0 if self.writable.is_set() else self._pong_bytes + len(answer)
        if self._pong_bytes <= _MAX_PONG_BYTES:
            self.transport.write(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time-outs and release the bytes of incomplete messages."""
        self._stop_message_timer()
        super().connection_lost(exc)
        self.frames, self._incomplete_bytes = [], 0
        self._release_parsed()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Release the bytes of all complete messages: the application has ended and reads no more."""
        super().on_task_complete(task)
        self._waiting_bytes.clear()
        self._is_parsing = False
        self._release_parsed()

    def _release_parsed(self) -> None:
        """Release the reserved bytes that no message holds any more."""
        needed = min(self._reserved_bytes, self._incomplete_bytes + sum(self._waiting_bytes))
        self._budget.release(self._reserved_bytes - needed, self._sender)
        self._reserved_bytes = needed

    def _fail(self, code: int, reason: str) -> None:
        if self.transport.is_closing():
            return
        self.conn.fail(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()

    def _start_message_timer(self) -> None:
        self._message_timer = self.loop.call_later(self._message_seconds, self._close_late)

    def _stop_message_timer(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _close_late(self) -> None:
        if self.read_paused:  # the gateway doesn't read, so the peer isn't late
            self._start_message_timer()
            return
        self._message_timer = None
        self._fail(_POLICY, "a message took too long")
