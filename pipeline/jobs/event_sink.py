"""Sinks for a job's live events. Sinks only observe: an event that one misses can be read from the ledger."""

from __future__ import annotations

from typing import Protocol

from schemas.jobs.events import JobChanged, ProgressMade, ShardCommitted

JobEvent = JobChanged | ProgressMade | ShardCommitted


class EventSink(Protocol):
    """Receives each event, in order, on the dispatcher's thread; must be quick and must not raise."""

    def emit(self, event: JobEvent) -> None: ...


class NoEvents:
    """A sink that discards all events."""

    def emit(self, event: JobEvent) -> None:
        """Discard the event."""
