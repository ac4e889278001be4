"""Setup of traces by OpenTelemetry's variables; without them OpenTelemetry isn't imported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import structlog

from pipeline.tracing import NO_TRACES, Traces
from tokenmill.errors import UserError

_PROTOCOL: Final = "http/protobuf"

logger = structlog.get_logger(__name__)


def wants_traces(environment: Mapping[str, str]) -> bool:
    """Whether OTEL_TRACES_EXPORTER or an endpoint enables traces. Raises `UserError` for unsupported values."""
    exporter = environment.get("OTEL_TRACES_EXPORTER") or None
    endpoint = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    if exporter is None and not endpoint:
        return False
    if exporter not in (None, "otlp"):
        raise UserError(
            f"OTEL_TRACES_EXPORTER is {exporter!r}, but traces are sent by otlp only; set it to otlp or none"
        )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environment.get(name)
        if protocol:
            if protocol != _PROTOCOL:
                raise UserError(f"{name} is {protocol!r}, but OTLP is spoken over HTTP only; set it to {_PROTOCOL}")
            break
    return True


@contextmanager
def traces_of(command: str) -> Iterator[Traces]:
    """This process's traces, until the block ends; it then sends the remaining spans.

    Args:
        command: part of `service.name`, as in tokenmill-worker, unless OTEL_SERVICE_NAME is set.

    Raises:
        UserError: traces are enabled, but not available.
    """
    if not wants_traces(os.environ):
        yield NO_TRACES
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from pipeline.observability.otel import OtelTraces
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed, and traces need it; run: pip install 'tokenmill[tracing]', or set "
            "OTEL_SDK_DISABLED=true"
        ) from error
    exporter = OTLPSpanExporter()
    traces = OtelTraces(f"tokenmill-{command}", _version(), BatchSpanProcessor(exporter))
    logger.info("traces", service=f"tokenmill-{command}")
    try:
        yield traces
    finally:
        traces.close()


def _version() -> str:
    try:
        return version("tokenmill")
    except PackageNotFoundError:  # run from a source tree that isn't installed
        return "unknown"
