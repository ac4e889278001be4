"""The HTTP server: uvicorn with an own event loop on a bound socket, with graceful shutdown."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import Any, Final, cast

import structlog
import uvicorn

from pipeline.gateway.http.middleware import RequestMiddleware
from pipeline.gateway.http.uvicorn_protocol import HttpProtocol, WebSocketProtocol
from pipeline.ports import PipelineError
from schemas.settings.gateway import GatewayOptions

_POLL_SECONDS: Final = 0.1
_BACKLOG: Final = 1_024
_SHUTDOWN_SECONDS: Final = 3
"""For the last responses, of requests that were cancelled at the end of the drain."""

logger = structlog.get_logger(__name__)


class CantListen(PipelineError):
    """Raised when the server can't listen on an address."""


def listen(host: str, port: int, max_unsent_bytes: int = 64 << 10) -> socket.socket:
    """Bind the listening socket; raises `CantListen`.

    Args:
        max_unsent_bytes: bytes of a connection that are queued in the kernel but not sent (TCP_NOTSENT_LOWAT).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise CantListen(
            f"{host}:{port}: can't listen there: {error.strerror or error}; choose another port"
        ) from error
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # connections inherit it; without it the kernel may queue megabytes
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, max_unsent_bytes)
    return listener


def is_loopback(host: str) -> bool:
    """Whether the address is reachable from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class GatewayServer:
    """Serves an application on a bound socket.

    Args:
        header_seconds: the time-out for a request's headers.
        max_connections: concurrent connections; further ones are refused with 503. None: twice the bound of requests,
            as many connections are idle.

    Attributes:
        draining: set once the server has been stopped and refuses new requests.
    """

    def __init__(
        self,
        options: GatewayOptions,
        bound: socket.socket,
        header_seconds: float = 20.0,
        max_connections: int | None = None,
    ) -> None:
        self.draining = threading.Event()
        self._options = options
        self._header_seconds = header_seconds
        self._max_connections = max_connections or 2 * options.max_concurrent_requests
        self._bound = bound

    @property
    def url(self) -> str:
        """The base URL of the server."""
        host, port = self._bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"{'http' if self._options.tls_certificate is None else 'https'}://{shown}:{port}"

    def run(self, app: RequestMiddleware, stop: threading.Event, end: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` is set, then drain the running requests.

        Args:
            end: ends requests that outlast the drain; called on the event loop.
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
        """Stop the server after `stop` is set. During the drain it still listens, to refuse new requests with 503."""
        while not stop.is_set():
            await asyncio.sleep(_POLL_SECONDS)
        self.draining.set()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._options.drain_seconds
        while app.active and loop.time() < until:
            await asyncio.sleep(_POLL_SECONDS)
        end()
        server.should_exit = True

    def _config(self, app: RequestMiddleware) -> uvicorn.Config:
        certificate, key = self._options.tls_certificate, self._options.tls_key
        return uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            lifespan="off",
            h11_max_incomplete_event_size=32 * 1024,
            timeout_keep_alive=self._options.keep_alive_seconds,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            ssl_certfile=None if certificate is None else str(certificate),
            ssl_keyfile=None if key is None else str(key),
            ws=cast(
                Any,
                partial(
                    WebSocketProtocol,
                    write_timeout_seconds=self._options.write_timeout_seconds,
                    message_seconds=self._options.idle_seconds,
                    budget=app.bodies,
                ),
            ),
            ws_max_size=min(self._options.max_message_bytes, self._options.max_body_bytes),
            # A kilobyte could become a megabyte, on the event loop, before its size is known.
            ws_per_message_deflate=False,
            loop="asyncio",
            http=cast(
                Any,
                partial(
                    HttpProtocol,
                    header_seconds=self._header_seconds,
                    write_timeout_seconds=self._options.write_timeout_seconds,
                    max_connections=self._max_connections,
                    new_id=app.new_id,
                ),
            ),
        )
