"""Telling what happens in a job while it happens. Sinks only look: what they miss can be read from the ledger."""

from __future__ import annotations

from typing import Protocol

from schemas.jobs.events import JobChanged, ProgressMade, ShardCommitted

JobEvent = JobChanged | ProgressMade | ShardCommitted


class EventSink(Protocol):
    """Gets each event, in order, from the dispatcher's thread; must be quick and must not raise."""

    def emit(self, event: JobEvent) -> None: ...


class NoEvents:
    """Where nobody listens."""

    def emit(self, event: JobEvent) -> None:
        """Nothing."""
