"""Spans of a worker's loop: each shard from being taken to its end, and now and then a step of the engine.

A step takes milliseconds and there are millions, so one is looked at every so often. It belongs to the most urgent
shard that is open, and is linked with the others: rows of all of them are in it. In an engine's step with nothing but
requests whose callers wait no shard is open, and it isn't looked at: those have spans of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipeline.ports import Clock
from pipeline.tracing import NO_SPAN, Span, Traces, about_job, log_fields
from pipeline.worker_client.protocol import ShardWork
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest


class HasWork(Protocol):
    """A shard that is open."""

    @property
    def work(self) -> ShardWork: ...


class EngineCounts(Protocol):
    """What an engine has counted since it began."""

    @property
    def computed(self) -> int: ...

    @property
    def step_rows(self) -> int: ...


class ShardSpans:
    """The spans of one worker's loop, and used by its thread only.

    Args:
        model: its name.
        step_seconds: between two steps that are looked at; 0: none is.
    """

    def __init__(self, clock: Clock, model: str, traces: Traces, step_seconds: float) -> None:
        self._traces = traces
        self._clock = clock
        self._model = model
        self._open: dict[str, Span] = {}  # by the attempt's id
        self._step_seconds = step_seconds if traces.on else 0.0
        self._next_step = 0.0 if self._step_seconds else float("inf")

    def taken(self, work: ShardWork) -> dict[str, str]:
        """The shard is here; what its lines in the log say besides."""
        if not self._traces.on:
            return {}
        about = {
            **about_job(work.job),
            "tokenmill.shard": work.shard,
            "tokenmill.attempt": work.attempt,
            "tokenmill.model": self._model,
            "tokenmill.rows": len(work.table),
        }
        span = self._traces.begin("shard", about, kind="consumer", parent=self._traces.of_job(work.job))
        self._open[work.attempt_id] = span
        return log_fields(span.traceparent)

    def ended(self, work: ShardWork, outcome: str, error: str | None = None) -> dict[str, str]:
        """It is no more here: "committed", "repeated" (another's part stands), "given back". As `taken`."""
        span = self._open.pop(work.attempt_id, NO_SPAN)
        span.set({"tokenmill.outcome": outcome})
        span.end(error)
        return log_fields(span.traceparent)

    def sample(self, shards: Sequence[HasWork]) -> Span | None:
        """A span for the step that is about to be made; nearly always none."""
        if self._next_step == float("inf") or not shards:
            return None
        now = self._clock.monotonic()
        if now < self._next_step:
            return None
        self._next_step = now + self._step_seconds
        places = [span.traceparent for one in shards if (span := self._open.get(one.work.attempt_id)) is not None]
        known = [place for place in places if place is not None]
        if not known:
            return None
        return self._traces.begin("engine step", {"tokenmill.model": self._model}, parent=known[0], links=known[1:])


def end_step(span: Span, before: EngineCounts, after: EngineCounts) -> None:
    """The step was made; what it computed."""
    span.set({"tokenmill.step.rows": after.step_rows - before.step_rows})
    span.set({"tokenmill.step.tokens": after.computed - before.computed})
    span.end()


class LaneSpans:
    """The spans of requests whose callers wait, from being taken until their end is told. Threads share one."""

    def __init__(self, model: str, traces: Traces) -> None:
        self._traces = traces
        self._model = model
        self._open: dict[tuple[str, int], Span] = {}

    def taken(self, request: LaneRequest) -> None:
        """A request is here."""
        if self._traces.on:
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
        """Its first token is here."""
        if self._open:
            self._open.get((request.id, request.attempt), NO_SPAN).event("first token")

    def told(self, event: LaneEvent) -> None:
        """The last event of an attempt has been told."""
        span = self._open.pop((event.request, event.attempt), None)
        if span is None:
            return
        if isinstance(event, EndEvent):
            usage = event.response.get("usage") or {}
            span.set({f"tokenmill.tokens.{kind}": usage.get(f"{kind}_tokens") for kind in ("prompt", "completion")})
            span.end()
        else:
            span.end(event.code if isinstance(event, ErrorEvent) else "handed_back")

    def dropped(self, request_id: str, attempt: int) -> None:
        """It is no longer here, and nothing is told of it: nobody wants it, or another attempt came."""
        self._open.pop((request_id, attempt), NO_SPAN).end("dropped")
