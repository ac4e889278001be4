"""The tracing port: spans across processes.

A span context travels as W3C's `traceparent`: in HTTP, Kafka and Celery headers, and in stored records and lane
requests (`Job.traceparent`, `LaneRequest.traceparent`). Within a process the current span context is a context
variable, set only where an ingest source or the gateway handles input; jobs and lane requests that are created there
belong to that span. Spans never contain prompts, answers or keys.

`NO_TRACES` is used where tracing is off: it creates no objects, reads no clock and stores nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Final, Literal, NamedTuple, Protocol

from structlog.contextvars import bound_contextvars

from schemas.jobs.job import Job
from schemas.jobs.outcome import JobStatus, Manifest

TRACEPARENT: Final = "traceparent"
"""The name of the header."""

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, str | int | float | bool | None]
"""Attributes with the value None are left out."""

_CURRENT: Final[ContextVar[str | None]] = ContextVar("tokenmill_traceparent", default=None)
_WRITTEN: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TraceContext(NamedTuple):
    """A span context; `flags` bit 0: the span is recorded."""

    trace: int
    span: int
    flags: int

    def __str__(self) -> str:
        return f"00-{self.trace:032x}-{self.span:016x}-{self.flags:02x}"


def read_traceparent(text: str | bytes | None) -> str | None:
    """The text, if it is a valid `traceparent`; an invalid one is ignored, as W3C's Trace Context demands (section
    3.2)."""
    if isinstance(text, bytes):
        text = text.decode("ascii", "replace")
    return None if text is None or parse_traceparent(text) is None else text


def parse_traceparent(text: str) -> TraceContext | None:
    """Parse a `traceparent`; None if it isn't one."""
    found = _WRITTEN.fullmatch(text)
    if found is None:
        return None
    context = TraceContext(*(int(part, 16) for part in found.groups()))
    return context if context.trace and context.span else None


class Span(Protocol):
    """An operation with a duration. Thread-safe; calls after its end have no effect."""

    @property
    def traceparent(self) -> str | None:
        """The span context for its children; None: tracing is off."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Set attributes."""
        ...

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Add an event at the current time."""
        ...

    def end(self, error: str | None = None, name: str | None = None) -> None:
        """End the span. `error`: a short, stable code of its failure; `name`: a new name. Further calls have no
        effect."""
        ...


class Traces(Protocol):
    """Creates spans. Thread-safe."""

    @property
    def is_enabled(self) -> bool:
        """Whether spans are recorded; if not, callers can skip attributes that are expensive to compute."""
        ...

    def begin(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: Kind = "internal",
        parent: str | None = None,
        links: Sequence[str] = (),
    ) -> Span:
        """Begin a span now. `parent`: by default the current span; without one the span begins a new trace."""
        ...

    def of_job(self, job: Job) -> str | None:
        """The context of the job's span, parent of all that belongs to the job: each reader of the job's order derives
        the same."""
        ...

    def job_ended(self, job: Job, at: datetime, attributes: Attributes, error: str | None = None) -> None:
        """Emit the job's own span, from its creation until `at`. A repeated call emits the same span."""
        ...


class _NoSpan:
    traceparent = None

    def set(self, attributes: Attributes) -> None:
        """Nothing."""

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Nothing."""

    def end(self, error: str | None = None, name: str | None = None) -> None:
        """Nothing."""


class _NoTraces:
    is_enabled = False

    def begin(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: Kind = "internal",
        parent: str | None = None,
        links: Sequence[str] = (),
    ) -> Span:
        """Return `NO_SPAN`."""
        return NO_SPAN

    def of_job(self, job: Job) -> str | None:
        """Nothing."""
        return None

    def job_ended(self, job: Job, at: datetime, attributes: Attributes, error: str | None = None) -> None:
        """Nothing."""


NO_SPAN: Final[Span] = _NoSpan()
NO_TRACES: Final[Traces] = _NoTraces()


def current_traceparent() -> str | None:
    """The `traceparent` of this thread's or task's current span."""
    return _CURRENT.get()


@contextmanager
def working_for(span: Span) -> Iterator[None]:
    """Make the span current in the block, for children and log lines. An exception ends the span with the error's name
    and is raised on; otherwise the caller ends the span."""
    written = span.traceparent
    if written is None:
        yield
        return
    token = _CURRENT.set(written)
    try:
        with bound_contextvars(**log_fields(written)):
            yield
    except BaseException as error:
        span.end(type(error).__name__)
        raise
    finally:
        _CURRENT.reset(token)


@contextmanager
def ingest_span(traces: Traces, name: str, sent_for: Sequence[str | None]) -> Iterator[Span]:
    """A consumer span around the handling of one or more messages.

    Args:
        sent_for: the `traceparent` of each message that has one. If all are of one trace, the first one is the span's
            parent; else the span begins a new trace. It is linked with all of them.
    """
    if not traces.is_enabled:
        yield NO_SPAN
        return
    links = [sent for sent in sent_for if sent is not None]
    of_one = len({sent.split("-")[1] for sent in links}) == 1
    parent = links[0] if of_one else None
    span = traces.begin(name, kind="consumer", parent=parent, links=links if len(links) > 1 else ())
    with working_for(span):
        yield span
    span.end()


def trace_job(traces: Traces, job: Job, manifest: Manifest) -> None:
    """Emit the span of an ended job."""
    if not traces.is_enabled:
        return
    counts, usage = manifest.counts, manifest.usage
    failed = manifest.errors[0].code if manifest.errors else None
    traces.job_ended(
        job,
        manifest.finished_at,
        job_attributes(job)
        | {
            "tokenmill.job.status": manifest.status.value,
            "tokenmill.rows": counts.total,
            "tokenmill.rows.failed": counts.failed + counts.expired,
            "tokenmill.tokens.prompt": usage.prompt,
            "tokenmill.tokens.completion": usage.completion,
            "tokenmill.tokens.repeated": usage.repeated,
        },
        failed or ("failed" if manifest.status is JobStatus.FAILED else None),
    )


def job_attributes(job: Job) -> dict[str, str | int | float | bool | None]:
    """Span attributes that identify a job."""
    return {"tokenmill.job.id": job.id, "tokenmill.tier": job.tier.value, "tokenmill.tenant": job.tenant}


def log_fields(traceparent: str | None) -> dict[str, str]:
    """Log fields of the span; empty where tracing is off."""
    context = None if traceparent is None else parse_traceparent(traceparent)
    return {} if context is None else {"trace_id": f"{context.trace:032x}", "span_id": f"{context.span:016x}"}
