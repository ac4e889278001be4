"""Telling what happens in a job while it happens. Sinks only look: what they miss can be read from the ledger."""

from __future__ import annotations

from typing import Protocol

from schemas.events import JobChanged, ProgressMade, ShardCommitted
from schemas.job import Counts, Usage

JobEvent = JobChanged | ProgressMade | ShardCommitted


class EventSink(Protocol):
    """Gets each event, in order, from the dispatcher's thread; must be quick and must not raise."""

    def emit(self, event: JobEvent) -> None: ...


class NoEvents:
    """Where nobody listens."""

    def emit(self, event: JobEvent) -> None:
        """Nothing."""


class ProgressMeter:
    """Keeps what a progress display draws: `counts` by status, `usage` by kind of token, shards committed by now."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.usage = Usage()
        self.shards = 0

    def emit(self, event: JobEvent) -> None:
        """Take the newest figures from the event."""
        if isinstance(event, ShardCommitted):
            self.shards += 1
            return
        self.counts = event.counts
        if isinstance(event, ProgressMade):
            self.usage = event.usage
