"""Connections as uvicorn has them, with what it leaves open: who is slow to say what it wants, or takes nothing of what
it is told, is not waited for; what is no HTTP, and connections beyond a bound, are refused in the shape of all other
errors."""

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

from pipeline.gateway.http.bodies import BodyBudget, sender_of
from pipeline.gateway.http.errors import ApiError, bad_request, unavailable
from pipeline.gateway.http.middleware import REQUEST_ID

_POLICY: Final = 1008
"""WebSocket's code for a peer that doesn't keep to what is asked of it."""

_TOO_LARGE: Final = 1009
"""For a message that is too large."""

_TRY_AGAIN_LATER: Final = 1013

_MAX_WAITING_MESSAGES: Final = 64
"""Of a connection. The event loop reads 256 KiB at once, in which 40,000 messages may stand."""

_MAX_FRAMING: Final = 2
"""Bytes on the wire for each byte that a message may have: frames have headers, and may be empty."""

_MAX_PONG_BYTES: Final = 64 << 10
"""That wait for a peer which sends pings and reads nothing."""


class _Impatient(asyncio.Protocol):
    """A connection that is cut off when its peer takes nothing for a while. What waits for the peer in this process is
    no more than was handed over in one piece: before the next piece the sender is held up.

    Attributes:
        write_seconds: how long that is.
    """

    write_seconds: float
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Nothing is to wait beside what is being sent."""
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=0)
        super().connection_made(transport)

    def pause_writing(self) -> None:
        """The peer doesn't take all that there is for it."""
        super().pause_writing()
        self._wait_for_peer()

    def resume_writing(self) -> None:
        """It has taken all."""
        self._wait_no_more()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """There is nobody to wait for."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait_for_peer(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(self.write_seconds, self._look_at_peer, left)

    def _wait_no_more(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _look_at_peer(self, left_before: int) -> None:
        if self.transport.get_write_buffer_size() < left_before:
            self._wait_for_peer()
        else:
            self.transport.abort()


class HttpProtocol(_Impatient, H11Protocol):
    """A connection.

    Args:
        header_seconds: from its beginning, or a request's, until the request's headers must be there.
        write_seconds: for which a peer may take nothing of what there is for it.
        most: connections at once; further ones are told so, and closed.
        new_id: makes a request's id.
    """

    def __init__(
        self,
        *args: Any,
        header_seconds: float,
        write_seconds: float,
        most: int,
        new_id: Callable[[], str],
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self.write_seconds = write_seconds
        self._header_seconds = header_seconds
        self._most = most
        self._new_id = new_id
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first request is waited for."""
        super().connection_made(transport)
        # asyncio does so only for sockets that were made with their protocol's number, as ours is not. Without it the
        # kernel keeps an answer's body until its headers are acknowledged, which takes clients 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self._most:
            full = unavailable(f"{self._most} connections are open here; ask again later", "too_many_connections")
            headers = {**full.headers, "Connection": "close", REQUEST_ID: self._new_id()}
            self.app = JSONResponse(full.body(), full.status, headers)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Part of a request: from its first byte the rest of its headers is waited for."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._deadline is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or has too many headers."""
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

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(self._header_seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


class WebSocketProtocol(_Impatient, WebSocketsSansIOProtocol):
    """A connection that has become a WebSocket. Bytes of messages count against the budget of bodies from when they are
    received until the application asks for the next message: then it has parsed the one before. They are held by the
    tenant, once the application knows it.

    Args:
        write_seconds: for which a peer may take nothing of what there is for it.
        message_seconds: from a message's first byte until it must be whole, pings or no pings.
        budget: of bytes of bodies that are being read.
    """

    def __init__(
        self, *args: Any, write_seconds: float, message_seconds: float, budget: BodyBudget, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.write_seconds = write_seconds
        self._message_seconds = message_seconds
        self._unfinished: asyncio.TimerHandle | None = None
        self._budget = budget
        self._sender = ""  # who holds them
        self._held_bytes = 0  # of the budget: those of the unfinished message, and of whole ones
        self._unfinished_bytes = 0
        self._received_bytes = 0  # at once, last
        self._waiting_bytes: deque[int] = deque()  # of whole messages, the one that is being parsed at the front
        self._is_parsing = False
        self._pong_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Part of a message, of which the rest is waited for."""
        self._received_bytes = len(data)
        if not self._held_bytes:
            self._sender = sender_of(getattr(self, "scope", {"client": self.client}))
        try:
            self._budget.take(len(data), self._sender)
        except ApiError as error:
            self._fail(_TRY_AGAIN_LATER, error.message)
            return
        self._held_bytes += len(data)
        self._unfinished_bytes += len(data)
        super().data_received(data)
        if not self.frames:  # nothing but the beginning of a frame is left, also of many pings
            self._unfinished_bytes = len(self.conn.reader.buffer)
        if not self._unfinished_bytes:
            self._message_over()
        elif self._unfinished is None:
            self._wait_for_message()
        self._settle()
        if self._unfinished_bytes > _MAX_FRAMING * self.config.ws_max_size + self._received_bytes:
            self._fail(_TOO_LARGE, "a message has too many fragments")
        elif len(self._waiting_bytes) > _MAX_WAITING_MESSAGES:
            self._fail(_POLICY, "too many messages at once")

    def send_receive_event_to_app(self) -> None:
        """The message is whole."""
        self._message_over()
        self._waiting_bytes.append(sum(map(len, self.frames)))
        self._unfinished_bytes = min(self._unfinished_bytes, self._received_bytes)
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        """The next message, for the application, which is done with the one before."""
        if self._is_parsing:
            self._waiting_bytes.popleft()
            self._settle()
        message = await super().receive()
        self._is_parsing = message["type"] == "websocket.receive"
        return message

    def handle_ping(self) -> None:
        """A peer that reads nothing gets no further pongs."""
        answer = b"".join(self.conn.data_to_send())
        self._pong_bytes = 0 if self.writable.is_set() else self._pong_bytes + len(answer)
        if self._pong_bytes <= _MAX_PONG_BYTES:
            self.transport.write(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._message_over()
        super().connection_lost(exc)
        self.frames, self._unfinished_bytes = [], 0
        self._settle()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """The application reads no further message."""
        super().on_task_complete(task)
        self._waiting_bytes.clear()
        self._is_parsing = False
        self._settle()

    def _settle(self) -> None:
        """Hold no more of the budget than there is."""
        held = min(self._held_bytes, self._unfinished_bytes + sum(self._waiting_bytes))
        self._budget.give_back(self._held_bytes - held, self._sender)
        self._held_bytes = held

    def _fail(self, code: int, reason: str) -> None:
        if self.transport.is_closing():
            return
        self.conn.fail(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()

    def _wait_for_message(self) -> None:
        self._unfinished = self.loop.call_later(self._message_seconds, self._message_late)

    def _message_over(self) -> None:
        if self._unfinished is not None:
            self._unfinished.cancel()
            self._unfinished = None

    def _message_late(self) -> None:
        if self.read_paused:  # it is we who don't read
            self._wait_for_message()
            return
        self._unfinished = None
        self._fail(_POLICY, "a message took too long")
