"""Implements `pipeline.tracing` with OpenTelemetry's SDK.

The SDK samples, bounds and exports spans, configured by its standard environment variables. The id of a job's span is
not random: another process ends the span than the one that began it, and shards are its children long before. So the
span id is derived from the job's id, and so is the trace id if no ingest source traced the job.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import Span as OtelSpan

from pipeline.tracing import Attributes, Kind, Span, TraceContext, current_traceparent, parse_traceparent
from schemas.jobs.job import Job

_KINDS: Final = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}
MAX_LINKS: Final = 128
"""The SDK's own bound; further links are dropped."""


class OtelTraces:
    """Creates spans for a processor, such as the SDK's batch processor. `close` sends the remaining spans.

    Args:
        service: `service.name` of this process, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has one.
        version: of tokenmill.
    """

    is_enabled = True

    def __init__(self, service: str, version: str, processor: SpanProcessor) -> None:
        self._ids = _Ids()
        named = Resource.create({"service.version": version})
        if str(named.attributes.get("service.name", "")).startswith("unknown_service"):
            named = named.merge(Resource({"service.name": service}))
        self._provider = TracerProvider(resource=named, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tokenmill", version)

    def begin(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: Kind = "internal",
        parent: str | None = None,
        links: Sequence[str] = (),
    ) -> Span:
        """See `Traces.begin`."""
        above = parent or current_traceparent()
        return _Span(
            self._tracer.start_span(
                name,
                context=_context(above),
                kind=_KINDS[kind],
                attributes=_known(attributes),
                links=[
                    Link(_span_context(context)) for link in links[:MAX_LINKS] if (context := parse_traceparent(link))
                ],
            )
        )

    def of_job(self, job: Job) -> str | None:
        """See `Traces.of_job`."""
        return str(self._context_of_job(job))

    def job_ended(self, job: Job, at: datetime, attributes: Attributes, error: str | None = None) -> None:
        """See `Traces.job_ended`."""
        context = self._context_of_job(job)
        with self._ids.chosen(context):
            span = self._tracer.start_span(
                "job",
                context=_context(job.traceparent),
                attributes=_known(attributes),
                start_time=_nanoseconds(job.created_at),
            )
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_nanoseconds(at))

    def close(self) -> None:
        """Send the remaining spans, within the exporter's own time limit."""
        self._provider.shutdown()

    def _context_of_job(self, job: Job) -> TraceContext:
        digest = hashlib.sha256(job.id.encode()).digest()
        span = int.from_bytes(digest[:8], "big") or 1
        above = None if job.traceparent is None else parse_traceparent(job.traceparent)
        if above is not None:
            return TraceContext(above.trace, span, above.flags)
        # All processes' samplers agree: they decide by the trace id.
        trace = int.from_bytes(digest[8:24], "big") or 1
        sampled = self._provider.sampler.should_sample(None, trace, "job").decision is Decision.RECORD_AND_SAMPLE
        return TraceContext(trace, span, int(sampled))


class _Span:
    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent: str | None = str(TraceContext(context.trace_id, context.span_id, int(context.trace_flags)))

    def set(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            self._span.set_attributes(_known(attributes))

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        if self._span.is_recording():
            self._span.add_event(name, _known(attributes))

    def end(self, error: str | None = None, name: str | None = None) -> None:
        if not self._span.is_recording():  # it isn't sampled, or has ended
            return
        if name is not None:
            self._span.update_name(name)
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class _Ids(RandomIdGenerator):
    """Random ids, except for a span whose context is set by the thread that begins it."""

    def __init__(self) -> None:
        self._local = threading.local()

    def chosen(self, context: TraceContext) -> _Chosen:
        return _Chosen(self._local, context)

    def generate_trace_id(self) -> int:
        context: TraceContext | None = getattr(self._local, "context", None)
        return super().generate_trace_id() if context is None else context.trace

    def generate_span_id(self) -> int:
        context: TraceContext | None = getattr(self._local, "context", None)
        return super().generate_span_id() if context is None else context.span


class _Chosen:
    def __init__(self, local: threading.local, context: TraceContext) -> None:
        self._local, self._context = local, context

    def __enter__(self) -> None:
        self._local.context = self._context

    def __exit__(self, *_error: object) -> None:
        with suppress(AttributeError):
            del self._local.context


def _known(attributes: Attributes | None) -> dict[str, str | int | float | bool]:
    return {name: value for name, value in (attributes or {}).items() if value is not None}


def _span_context(context: TraceContext) -> SpanContext:
    return SpanContext(context.trace, context.span, is_remote=True, trace_flags=TraceFlags(context.flags))


def _context(traceparent: str | None) -> Context:
    """The parent context of a span, independent of the thread's current context."""
    context = None if traceparent is None else parse_traceparent(traceparent)
    return Context() if context is None else set_span_in_context(NonRecordingSpan(_span_context(context)), Context())


def _nanoseconds(at: datetime) -> int:
    return round(at.timestamp() * 1_000_000) * 1_000
