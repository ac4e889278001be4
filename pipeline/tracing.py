"""The port of traces: what belongs to what, across processes, as spans with a beginning and an end.

A place in a trace travels as W3C's `traceparent`: in HTTP's and Kafka's headers, in Celery's, and in our own papers
(`Job.traceparent`, `LaneRequest.traceparent`). Within a process the current one is a context variable, set only where a
door or the gateway works on what came in; whatever is made there (a job, a request on the lane) belongs to it. Nothing
of a prompt, an answer or a key ever goes into a span.

`NO_TRACES` is what everybody has who doesn't trace: it makes no object, reads no clock and keeps nothing.
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
"""The header's name, everywhere."""

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, str | int | float | bool | None]
"""None: left out."""

_CURRENT: Final[ContextVar[str | None]] = ContextVar("tokenmill_traceparent", default=None)
_WRITTEN: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TraceContext(NamedTuple):
    """A place in a trace; `flags` bit 0: it is recorded."""

    trace: int
    span: int
    flags: int

    def __str__(self) -> str:
        return f"00-{self.trace:032x}-{self.span:016x}-{self.flags:02x}"


def read_traceparent(text: str | bytes | None) -> str | None:
    """What was sent, if it is one; what isn't is passed over, as W3C's Trace Context asks (section 3.2)."""
    if isinstance(text, bytes):
        text = text.decode("ascii", "replace")
    return None if text is None or place_of(text) is None else text


def place_of(text: str) -> TraceContext | None:
    """The place that a `traceparent` names; None for anything else."""
    found = _WRITTEN.fullmatch(text)
    if found is None:
        return None
    place = TraceContext(*(int(part, 16) for part in found.groups()))
    return place if place.trace and place.span else None


class Span(Protocol):
    """Something that takes time. Threads may share one; after its end it takes nothing more."""

    @property
    def traceparent(self) -> str | None:
        """What is told to those who work for it; None: nobody traces."""
        ...

    def set(self, attributes: Attributes) -> None:
        """More is known of it."""
        ...

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Something happened now."""
        ...

    def end(self, error: str | None = None, name: str | None = None) -> None:
        """It is over. `error`: a short, stable word for why it failed; `name`: a better one. Again: nothing."""
        ...


class Traces(Protocol):
    """Where spans are made. Threads share it."""

    @property
    def on(self) -> bool:
        """Whether anything is recorded: what costs something to find out needn't be, else."""
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
        """Something begins now. `parent`: by default the current span; a trace of its own if there is none."""
        ...

    def of_job(self, job: Job) -> str | None:
        """What belongs to the job belongs to this span: the same for everybody who reads the job's papers."""
        ...

    def job_ended(self, job: Job, at: datetime, attributes: Attributes, error: str | None = None) -> None:
        """The job's own span, from its making until `at`. Told twice it is the same span."""
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
    on = False

    def begin(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: Kind = "internal",
        parent: str | None = None,
        links: Sequence[str] = (),
    ) -> Span:
        """The span that is none."""
        return NO_SPAN

    def of_job(self, job: Job) -> str | None:
        """Nothing."""
        return None

    def job_ended(self, job: Job, at: datetime, attributes: Attributes, error: str | None = None) -> None:
        """Nothing."""


NO_SPAN: Final[Span] = _NoSpan()
NO_TRACES: Final[Traces] = _NoTraces()


def current_traceparent() -> str | None:
    """Of the span that this thread or task works for."""
    return _CURRENT.get()


@contextmanager
def working_for(span: Span) -> Iterator[None]:
    """What is made and logged in the block belongs to the span. A failure ends the span with the error's name, and is
    raised on; else the span is the caller's to end."""
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
def doors_span(traces: Traces, name: str, sent_for: Sequence[str | None]) -> Iterator[Span]:
    """Around what makes one thing of one or more messages.

    Args:
        sent_for: the `traceparent` of each message that has one. Where all are of one trace the span belongs to the
            first of them, else it begins a trace of its own; it is linked with all.
    """
    if not traces.on:
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
    """The span of a job that has ended."""
    if not traces.on:
        return
    counts, usage = manifest.counts, manifest.usage
    failed = manifest.errors[0].code if manifest.errors else None
    traces.job_ended(
        job,
        manifest.finished_at,
        about_job(job)
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


def about_job(job: Job) -> dict[str, str | int | float | bool | None]:
    """What tells a job from others."""
    return {"tokenmill.job.id": job.id, "tokenmill.tier": job.tier.value, "tokenmill.tenant": job.tenant}


def log_fields(traceparent: str | None) -> dict[str, str]:
    """What a line of the log says of the span that it belongs to; nothing where nobody traces."""
    place = None if traceparent is None else place_of(traceparent)
    return {} if place is None else {"trace_id": f"{place.trace:032x}", "span_id": f"{place.span:016x}"}
