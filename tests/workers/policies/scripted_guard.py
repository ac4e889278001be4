"""A server that answers as a guard model's does: by the words of a text, or not at all."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.waiting import HANG_SECONDS

DIGEST = f"sha256:{'ab' * 32}"


@dataclass
class ScriptedGuard:
    """The server's script, and what it was asked.

    Attributes:
        labels: words in a text -> the answer. Otherwise `default`.
        logprob: of the answer, in one token; None: the answer has none.
        status: of all responses to questions.
        models: the list of models.
        raw: the body of all responses to questions; None: an answer by the labels.
        hang: while it is set, questions get no answer.  slow: the same for questions with this word.  drips: their
            "headers" or "body" come a byte now and then, and never end.
        asked: bodies of questions.  most: questions at a time.
    """

    labels: dict[str, str] = field(default_factory=dict)
    default: str = "safe"
    logprob: float | None = None
    status: int = 200
    models: Any = field(default_factory=lambda: [{"id": "guard", "created": 1, "tokenmill": {"digest": DIGEST}}])
    raw: bytes | None = None
    hang: bool = False
    slow: str = ""
    drips: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    most: int = 0
    together: int = 1
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _open: int = 0

    def answer(self, path: str, body: dict[str, Any]) -> bytes:
        """The answer to a question. Waits until `together` questions are open."""
        with self._lock:
            self.asked.append(body)
            self._open += 1
            self.most = max(self.most, self._open)
            self._lock.notify_all()
            self._lock.wait_for(lambda: self.most >= self.together, HANG_SECONDS)
        text = body["input"] if path == "/v1/classify" else body["messages"][0]["content"]
        if self.hang or (self.slow and self.slow in text):
            self.released.wait(HANG_SECONDS)
        with self._lock:
            self._open -= 1
        if self.raw is not None:
            return self.raw
        label = next((label for word, label in self.labels.items() if word in text), self.default)
        usage = {"prompt_tokens": len(text), "completion_tokens": 2}
        if path == "/v1/classify":
            probs = [0.25, 0.75]
            return json.dumps({"data": [{"label": label, "probs": probs}], "usage": usage}).encode()
        logprobs = None if self.logprob is None else {"content": [{"token": label, "logprob": self.logprob}]}
        message = {"role": "assistant", "content": label}
        return json.dumps({"choices": [{"message": message, "logprobs": logprobs}], "usage": usage}).encode()


@contextmanager
def serving_guard(guard: ScriptedGuard | None = None, port: int = 0) -> Iterator[ScriptedGuard]:
    """The server, until the block ends."""
    guard = guard or ScriptedGuard()
    connections: list[socket.socket] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            connections.append(self.connection)

        def do_GET(self) -> None:
            self._send(200, json.dumps({"object": "list", "data": guard.models}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(guard.status, guard.answer(self.path, body))

        def _send(self, status: int, data: bytes) -> None:
            with suppress(OSError):  # the client didn't wait
                self.send_response(status)
                if guard.drips == "headers":
                    self.flush_headers()
                    self.wfile.write(b"X-Drip: ")
                else:
                    self.send_header("Content-Length", str(len(data) + 1_000 * bool(guard.drips)))
                    self.end_headers()
                    self.wfile.write(data)
                while guard.drips and not guard.released.wait(0.02):
                    self.wfile.write(b" ")
                    self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    guard.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield guard
    finally:
        guard.released.set()
        server.shutdown()
        server.server_close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join(HANG_SECONDS)
