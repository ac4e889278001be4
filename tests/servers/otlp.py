"""A receiver of traces: OTLP over HTTP, decoded by OpenTelemetry's own protobuf messages."""

from __future__ import annotations

import gzip
import importlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


def tracing(module: str) -> Any:
    """A module of what `tokenmill[tracing]` installs. Where it is missing the test is skipped, and fails in CI."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"NOT TESTED HERE: {error.name} is missing; install it with: pip install 'tokenmill[tracing]'")


@dataclass(frozen=True)
class Received:
    """A span. Ids in hex; `parent` empty: it has none. Times in nanoseconds since 1970."""

    service: str
    name: str
    kind: int
    trace: str
    span: str
    parent: str
    links: tuple[tuple[str, str], ...]
    began: int
    ended: int
    error: str | None
    attributes: dict[str, Any]
    events: tuple[str, ...]


class OtlpReceiver:
    """Listens on a port of its own, until it is closed.

    Attributes:
        raw: bodies as they came, unpacked.
    """

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self._spans: list[Received] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                right = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
                if right:
                    receiver.take(body)
                self.send_response(200 if right else 400)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """For OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, body: bytes) -> None:
        """Spans of one export."""
        messages = tracing("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        self.raw.append(body)
        request = messages.ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self._spans += [_received(service, span) for span in scope.spans]

    def spans(self, name: str | None = None, **attributes: Any) -> list[Received]:
        """Those that have come, of this name and with these attributes (dots are underscores)."""
        wanted = {key.replace("_", "."): value for key, value in attributes.items()}
        return [
            span
            for span in list(self._spans)
            if name in (None, span.name) and wanted.items() <= span.attributes.items()
        ]

    def wait(self, name: str, so: Callable[[Received], bool] = lambda _: True, seconds: float = 60) -> Received:
        """The first of this name of which that is so, once it is here."""
        until = time.monotonic() + seconds
        while not (found := [span for span in self.spans(name) if so(span)]):
            assert time.monotonic() < until, f"no span {name!r} among {sorted({s.name for s in self._spans})}"
            time.sleep(0.1)
        return found[0]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _received(service: str, span: Any) -> Received:
    return Received(
        service=service,
        name=span.name,
        kind=span.kind,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        error=span.status.message if span.status.code == 2 else None,
        attributes=_values(span.attributes),
        events=tuple(event.name for event in span.events),
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
