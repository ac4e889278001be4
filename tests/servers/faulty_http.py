"""A proxy in front of an HTTP server (S3, SQS) that injects faults: busy, slow, unreachable, or lost responses.

It parses HTTP, so a fault can apply to certain requests only, and each request is recorded. `FaultyHttp.faults` are the
active rules; the first matching rule applies to a request.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "expect", "content-length", "te", "upgrade"})
UPSTREAM_SECONDS = 60.0


@dataclass(slots=True)
class Fault:
    """A rule: what happens to a matching request.

    Attributes:
        kind: "status": answered so, and not passed on.  "slow": passed on after `seconds`.
            "late": passed on and done at once, but answered after `seconds`.
            "lost": passed on and done, but the connection closes without an answer.
            "dropped": the connection closes, and it is not passed on.
            "cut": passed on; of the answer's body only the first half comes.
        method: of requests that it hits; "": any.  path: a part of theirs, with the query.
        times: it hits so many requests; None: until it is removed.  chance: of hitting one that fits.
        unless: requests whose path holds this are spared.
    """

    kind: str
    method: str = ""
    path: str = ""
    times: int | None = None
    chance: float = 1.0
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0.0
    unless: str | None = None
    hits: int = 0

    def fits(self, method: str, path: str) -> bool:
        if self.times is not None and self.hits >= self.times:
            return False
        if self.unless is not None and self.unless in path:
            return False
        return self.method in ("", method) and self.path in path


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """A received request and its outcome: a status, or the kind of fault that ended it."""

    method: str
    path: str
    headers: dict[str, str]
    outcome: int | str


class FaultyHttp:
    """A proxy at `endpoint`, in front of the server at `upstream` (a URL without a path).

    Args:
        seed: of the faults' chances.
        watch: called with each method and path before anything happens to the request; may block, or kill things.
        remember: keep all requests in `seen`; not for long runs.
    """

    def __init__(
        self,
        upstream: str,
        seed: int = 0,
        watch: Callable[[str, str], None] | None = None,
        *,
        remember: bool = True,
    ) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname is not None
        self.host, self.upstream_port = parts.hostname, parts.port or 80
        self.faults: list[Fault] = []
        self.seen: list[ProxiedRequest] = []
        self.watch = watch
        self.remember = remember
        self.strip: set[tuple[str, str]] = set()  # (method, header in lower case) that are not forwarded to the server
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, kind: str, **more: Any) -> Fault:
        """Put a fault in force; see `Fault`."""
        fault = Fault(kind, **more)
        with self._lock:
            self.faults.append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        """Let go of this one, if it is in force."""
        with self._lock:
            self.faults = [other for other in self.faults if other is not fault]

    def clear(self) -> None:
        """From now on everything is passed on."""
        with self._lock:
            self.faults.clear()

    def count(self, method: str = "", path: str = "") -> int:
        """Requests seen."""
        with self._lock:
            return sum(1 for seen in self.seen if method in ("", seen.method) and path in seen.path)

    def fault_for(self, method: str, path: str) -> Fault | None:
        """The fault that this request meets; it counts as hit."""
        with self._lock:
            for fault in self.faults:
                if fault.fits(method, path) and self._random.random() < fault.chance:
                    fault.hits += 1
                    return fault
        return None

    def record(self, seen: ProxiedRequest) -> None:
        if self.remember:
            with self._lock:
                self.seen.append(seen)

    def __enter__(self) -> FaultyHttp:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    proxy: FaultyHttp

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is its own business."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def relay(self) -> None:
        proxy, body = self.server.proxy, self._body()
        if proxy.watch is not None:
            proxy.watch(self.command, self.path)
        fault = proxy.fault_for(self.command, self.path)
        kind = fault.kind if fault is not None else ""
        if kind == "status":
            assert fault is not None
            self._note(fault.status)
            self._refuse(fault)
        elif kind == "dropped":
            self._note(kind)
            self._hang_up()
        else:
            late = fault.seconds if fault is not None else 0.0
            if kind == "slow":
                time.sleep(late)
            self._pass_on(body, kind, late)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = relay  # noqa: N815 - the base's names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Log nothing: `seen` has more."""

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            pieces = []
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _note(self, outcome: int | str) -> None:
        """Record the request before the client gets its response, so that a test with a response finds the record."""
        self.server.proxy.record(ProxiedRequest(self.command, self.path, dict(self.headers.items()), outcome))

    def _pass_on(self, body: bytes, kind: str, late: float) -> None:
        """Forward the request and its response, unless the response is to be lost; an unreachable server is a
        hang-up."""
        upstream = http.client.HTTPConnection(self.server.proxy.host, self.server.proxy.upstream_port, UPSTREAM_SECONDS)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            strip = self.server.proxy.strip
            for name, value in self.headers.items():
                if name.lower() not in HOP_BY_HOP and (self.command, name.lower()) not in strip:
                    upstream.putheader(name, value)
            if body or self.command in ("PUT", "POST"):
                upstream.putheader("Content-Length", str(len(body)))
            upstream.endheaders(body)
            answer = upstream.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._note(type(error).__name__)
            self._hang_up()
            return
        finally:
            upstream.close()
        self._note(kind if kind in ("lost", "cut") else answer.status)
        if kind == "late":
            time.sleep(late)
        if kind == "lost":
            self._hang_up()
        else:
            self._answer(answer, content, cut=kind == "cut")

    def _answer(self, answer: http.client.HTTPResponse, content: bytes, *, cut: bool) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        length = answer.headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
        if length is not None and answer.status not in (204, 304):
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self._hang_up()

    def _refuse(self, fault: Fault) -> None:
        content = f"<Error><Code>{fault.code}</Code><Message>injected fault</Message></Error>".encode()
        self.send_response_only(fault.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
