"""The server: uvicorn on a thread of its own, from a bound socket until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, cast

import structlog
import uvicorn

from pipeline.gateway.http.middleware import RequestMiddleware
from pipeline.gateway.http.protocol import HttpProtocol, WebSocketProtocol
from pipeline.ports import PipelineError

_LOOK_SECONDS: Final = 0.1
_BACKLOG: Final = 1_024
_LAST_SECONDS: Final = 3
"""For what was ended to be told."""

logger = structlog.get_logger(__name__)


class CantListen(PipelineError):
    """Raised when an address can't be had."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How is listened.

    Attributes:
        certificate, private_key: PEM files, for TLS; None: plain HTTP.
        drain_seconds: that requests have to come to their end after the word to stop.
        keep_alive_seconds: for which a connection may idle between two requests.
        header_seconds: for which the headers of a request are waited for.
        write_seconds: for which a peer may take nothing of what there is for it.
        unsent_bytes: of a connection, that wait in the kernel for their turn (beside those that are on their way).
        max_message_bytes: of a message over a WebSocket; whoever sends more is hung up on.
        message_seconds: that a message over a WebSocket may take to come.
        most_connections: at once; further ones are refused, with 503. Larger than the application's own bound: many
            are idle.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    private_key: Path | None = None
    drain_seconds: float = 25.0
    keep_alive_seconds: int = 75
    header_seconds: float = 20.0
    write_seconds: float = 60.0
    unsent_bytes: int = 64 << 10
    max_message_bytes: int = 1 << 20
    message_seconds: float = 30.0
    most_connections: int = 4_000


def listen(settings: ServerSettings) -> socket.socket:
    """A socket that nobody else has; raises `CantListen`."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        made = socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise CantListen(
            f"{settings.host}:{settings.port}: can't listen there: {error.strerror or error}; choose another port"
        ) from error
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # connections have it from their listener; else megabytes may wait there
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, settings.unsent_bytes)
    return made


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class GatewayServer:
    """Serves an application.

    Attributes:
        draining: the word to stop has come.
    """

    def __init__(self, settings: ServerSettings, bound: socket.socket) -> None:
        self.draining = threading.Event()
        self._settings = settings
        self._bound = bound

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self._bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"{'http' if self._settings.certificate is None else 'https'}://{shown}:{port}"

    def run(self, app: RequestMiddleware, stop: threading.Event, end: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`, and to the end of what is under way then.

        Args:
            end: ends what takes too long, in order; called on the event loop.
        """
        asyncio.run(self._serve(app, stop, end))

    async def _serve(self, app: RequestMiddleware, stop: threading.Event, end: Callable[[], None]) -> None:
        server = uvicorn.Server(self._config(app))
        watching = asyncio.create_task(self._watch(server, app, stop, end))
        try:
            await server.serve(sockets=[self._bound])
        finally:
            self.draining.set()
            watching.cancel()
            self._bound.close()

    async def _watch(
        self, server: uvicorn.Server, app: RequestMiddleware, stop: threading.Event, end: Callable[[], None]
    ) -> None:
        """Ends the server when it is time. While requests come to their end it still listens, to say that new ones are
        to go elsewhere."""
        while not stop.is_set():
            await asyncio.sleep(_LOOK_SECONDS)
        self.draining.set()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.drain_seconds
        while app.active and loop.time() < until:
            await asyncio.sleep(_LOOK_SECONDS)
        end()
        server.should_exit = True

    def _config(self, app: RequestMiddleware) -> uvicorn.Config:
        certificate, key = self._settings.certificate, self._settings.private_key
        return uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            lifespan="off",
            h11_max_incomplete_event_size=32 * 1024,
            timeout_keep_alive=self._settings.keep_alive_seconds,
            timeout_graceful_shutdown=_LAST_SECONDS,
            ssl_certfile=None if certificate is None else str(certificate),
            ssl_keyfile=None if key is None else str(key),
            ws=cast(
                Any,
                partial(
                    WebSocketProtocol,
                    write_seconds=self._settings.write_seconds,
                    message_seconds=self._settings.message_seconds,
                    budget=app.bodies,
                ),
            ),
            ws_max_size=self._settings.max_message_bytes,
            # A kilobyte could become a megabyte, on the event loop, before its size is known.
            ws_per_message_deflate=False,
            loop="asyncio",
            http=cast(
                Any,
                partial(
                    HttpProtocol,
                    header_seconds=self._settings.header_seconds,
                    write_seconds=self._settings.write_seconds,
                    most=self._settings.most_connections,
                    new_id=app.new_id,
                ),
            ),
        )
