"""Trace spans of a worker: each shard from being taken to its end, sampled steps of the engine, and lane requests.

A step takes milliseconds and there are millions of them, so one step per interval gets a span. Its parent is the most
urgent open shard, and it is linked with the other open shards, because it computes rows of all of them. A step without
open shards, which computes only lane requests, gets no span: these requests have their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipeline.ports import Clock
from pipeline.tracing import NO_SPAN, Span, Traces, job_attributes, log_fields
from pipeline.worker_client.ports import ShardWork
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest


class HasWork(Protocol):
    """An open shard."""

    @property
    def work(self) -> ShardWork: ...


class EngineCounts(Protocol):
    """Counters of an engine since its start."""

    @property
    def computed(self) -> int: ...

    @property
    def step_rows(self) -> int: ...


class ShardSpans:
    """The spans of one worker's loop, used by its thread only.

    Args:
        model: the model's name.
        step_seconds: interval of the steps that get a span; 0: none does.
    """

    def __init__(self, clock: Clock, model: str, traces: Traces, step_seconds: float) -> None:
        self._traces = traces
        self._clock = clock
        self._model = model
        self._open: dict[str, Span] = {}  # by the attempt's id
        self._step_seconds = step_seconds if traces.is_enabled else 0.0
        self._next_step = 0.0 if self._step_seconds else float("inf")

    def taken(self, work: ShardWork) -> dict[str, str]:
        """Begin the shard's span; returns the fields that its log records carry."""
        if not self._traces.is_enabled:
            return {}
        about = {
            **job_attributes(work.job),
            "tokenmill.shard": work.shard,
            "tokenmill.attempt": work.attempt,
            "tokenmill.model": self._model,
            "tokenmill.rows": len(work.table),
        }
        span = self._traces.begin("shard", about, kind="consumer", parent=self._traces.of_job(work.job))
        self._open[work.attempt_id] = span
        return log_fields(span.traceparent)

    def ended(self, work: ShardWork, outcome: str, error: str | None = None) -> dict[str, str]:
        """End the shard's span; returns fields as `taken`. `outcome`: "committed", "repeated" (another attempt's part
        is durable), "given back" (released) or "given up"."""
        span = self._open.pop(work.attempt_id, NO_SPAN)
        span.set({"tokenmill.outcome": outcome})
        span.end(error)
        return log_fields(span.traceparent)

    def sample(self, shards: Sequence[HasWork]) -> Span | None:
        """Begin a span for the next step when the interval has passed; otherwise None."""
        if self._next_step == float("inf") or not shards:
            return None
        now = self._clock.monotonic()
        if now < self._next_step:
            return None
        self._next_step = now + self._step_seconds
        spans = [span for shard in shards if (span := self._open.get(shard.work.attempt_id)) is not None]
        contexts = [span.traceparent for span in spans if span.traceparent is not None]
        if not contexts:
            return None
        return self._traces.begin(
            "engine step", {"tokenmill.model": self._model}, parent=contexts[0], links=contexts[1:]
        )


def end_step(span: Span, before: EngineCounts, after: EngineCounts) -> None:
    """End the span of a step, with the rows and tokens that it computed."""
    span.set({"tokenmill.step.rows": after.step_rows - before.step_rows})
    span.set({"tokenmill.step.tokens": after.computed - before.computed})
    span.end()


class LaneSpans:
    """The spans of lane requests, from being taken until their last event is emitted. Threads share one object."""

    def __init__(self, model: str, traces: Traces) -> None:
        self._traces = traces
        self._model = model
        self._open: dict[tuple[str, int], Span] = {}

    def taken(self, request: LaneRequest) -> None:
        """Begin the request's span."""
        if self._traces.is_enabled:
            about: dict[str, str | int | float | bool | None] = {
                "tokenmill.request.id": request.id,
                "tokenmill.attempt": request.attempt,
                "tokenmill.tier": request.tier.value,
                "tokenmill.tenant": request.tenant,
                "tokenmill.model": self._model,
            }
            span = self._traces.begin("generate", about, kind="server", parent=request.traceparent)
            self._open[request.id, request.attempt] = span

    def first_token(self, request: LaneRequest) -> None:
        """Record the request's first token."""
        if self._open:
            self._open.get((request.id, request.attempt), NO_SPAN).event("first token")

    def ended(self, event: LaneEvent) -> None:
        """End the span with the last event of the attempt."""
        span = self._open.pop((event.request, event.attempt), None)
        if span is None:
            return
        if isinstance(event, EndEvent):
            usage = event.response.get("usage") or {}
            span.set({f"tokenmill.tokens.{kind}": usage.get(f"{kind}_tokens") for kind in ("prompt", "completion")})
            span.end()
        else:
            span.end(event.code if isinstance(event, ErrorEvent) else "handed_back")

    def discarded(self, request_id: str, attempt: int) -> None:
        """End the span of an attempt that ends without an event: it is unwanted, or another attempt replaced it."""
        self._open.pop((request_id, attempt), NO_SPAN).end("dropped")
