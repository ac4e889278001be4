"""The metrics endpoint on a port of its own, for processes without HTTP and for scrapers without a key."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Final

import structlog

from tokenmill.errors import UserError

if TYPE_CHECKING:
    from pipeline.observability.exposition import Metrics
    from pipeline.observability.samples import Source
    from schemas.settings.settings import Settings

PATH: Final = "/metrics"
_SCRAPER_SECONDS: Final = 10.0
_MAX_SCRAPES: Final = 16

Documents = Callable[[str], bytes | None]
"""Returns the JSON document at a path; None: there is none. Called by the server's threads."""

logger = structlog.get_logger(__name__)


@contextmanager
def metrics_served(
    settings: Settings, port: int | None, *sources: Source, documents: Documents | None = None
) -> Iterator[None]:
    """Serve the sources' metrics at `/metrics` until the block ends. `port` None: the settings' port; without one
    nothing is served. `documents`: JSON at other paths. Raises `UserError` if the port can't be opened."""
    port = settings.metrics.port if port is None else port
    if port is None:
        yield
        return
    try:
        from pipeline.metric_collectors import build
        from pipeline.observability.exposition import Metrics
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed, and metrics need it; run: pip install 'tokenmill[metrics]'"
        ) from error
    server = _listen(settings.metrics.host, port, Metrics([build, *sources]), documents)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    host, bound = settings.metrics.host, server.server_address[1]
    logger.info("metrics", url=f"http://{f'[{host}]' if ':' in host else host}:{bound}{PATH}")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _listen(host: str, port: int, metrics: Metrics, documents: Documents | None) -> MetricsServer:
    try:
        return MetricsServer(host, port, metrics, documents)
    except OSError as error:
        raise UserError(
            f"{host}:{port}: metrics can't be served there: {error.strerror or error}; choose another --metrics-port"
        ) from error


class MetricsServer(ThreadingHTTPServer):
    """A server for a few concurrent scrapes; it closes the connections of further ones."""

    daemon_threads = True

    def __init__(self, host: str, port: int, metrics: Metrics, documents: Documents | None = None) -> None:
        self.metrics = metrics
        self.documents = documents or (lambda _path: None)
        self._slots = threading.BoundedSemaphore(_MAX_SCRAPES)
        self.address_family = socket.AF_INET6 if _is_v6(host) else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind as `HTTPServer` does, but without a DNS query for this machine's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a request on a thread of its own, if a slot is free."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a request, and free its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed scrape (a closed or silent connection) in one line."""
        logger.warning("a scrape failed", error=type(sys.exception()).__name__)


class _Handler(BaseHTTPRequestHandler):
    timeout = _SCRAPER_SECONDS
    server: MetricsServer
    server_version, sys_version = "tokenmill", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        document = None if path == PATH else self.server.documents(path)
        if path == PATH:
            text, content_type = self.server.metrics.encode(self.headers.get("Accept", ""))
        elif document is not None:
            text, content_type = document, "application/json"
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_what: Any) -> None:
        """Log no requests, which repeat every few seconds."""


def _is_v6(host: str) -> bool:
    try:
        return ip_address(host).version == 6
    except ValueError:  # a name
        return False
