"""A real HTTP server that receives webhooks; a test can stop and restart it, and set its responses."""

from __future__ import annotations

import ssl
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Received:
    """A received request. `path` includes the query."""

    path: str
    headers: dict[str, str]
    body: bytes
    at: float


class Receiver:
    """Listens on a port of its own.

    Attributes:
        status: that is answered.  slow: seconds before it is.  location: of a redirect.
        received: all that came, answered or not.
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.status, self.slow, self.location = 200, 0.0, ""
        self.received: list[Received] = []
        self.port = 0
        self._context = context
        self._server: ThreadingHTTPServer | None = None
        self.start()

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        return f"{'http' if self._context is None else 'https'}://{host}:{self.port}{path}"

    def start(self) -> None:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.received.append(Received(self.path, headers, body, time.time()))
                if receiver.slow:
                    time.sleep(receiver.slow)
                self.send_response(receiver.status)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        if self._context is not None:
            self._server.socket = self._context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def kill(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
