"""The loop of file ingest: handles upload events, if there are any, and sweeps the inboxes periodically."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import structlog

from pipeline.ingest.files.source import FileIngestSource
from pipeline.ports import PipelineError, World
from pipeline.runtime.supervision import reason_of

_SWEEP_PAUSE_FACTOR = 10
"""Minimum pause between sweeps, as a multiple of the last sweep's duration."""

logger = structlog.get_logger(__name__)


class EventSource(Protocol):
    """A source of upload events, such as `BucketEvents`."""

    def poll(self) -> int | None:
        """Wait for events and handle them; returns their number, or None when there is no room for any."""
        ...


class OverlappingPrefixes(PipelineError):
    """Raised when an inbox is inside another one."""


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Times in seconds.

    Attributes:
        sweep_interval_seconds: between two sweeps. With events, sweeps only find files whose events were lost.
        retry_seconds: after a failure, and while there is no room.
    """

    sweep_interval_seconds: float = 60.0
    retry_seconds: float = 2.0


class FileIngestWatcher:
    """Ingests the files of all inboxes until it is stopped. Failures are logged and retried.

    Raises:
        OverlappingPrefixes: a file could be in two of the inboxes at once.
    """

    def __init__(
        self,
        sources: Sequence[FileIngestSource],
        world: World,
        settings: WatchSettings | None = None,
        events: EventSource | None = None,
    ) -> None:
        _check_overlap([source.inbox.uri("").rstrip("/") + "/" for source in sources])
        self._sources = tuple(sources)
        self._world = world
        self._clock = world.clock
        self._settings = settings or WatchSettings()
        self._events = events
        self._next_sweep = float("-inf")

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; stopping takes as long as one poll of the queue."""
        while not stop.is_set():
            self.step()

    def step(self) -> None:
        """Sweep if a sweep is due, then wait for events, or for the next sweep, for a while."""
        began = self._clock.monotonic()
        if began >= self._next_sweep:
            for source in self._sources:
                try:
                    source.sweep()
                except Exception as error:  # noqa: BLE001 - of one source; the others go on
                    reason = reason_of(error, "drops", self._world, source=source.inbox.kind)
                    logger.warning("sweep_failed", source=source.inbox.kind, reason=reason)
            ended = self._clock.monotonic()
            # With very many files, sweeps must not take up all the time.
            self._next_sweep = ended + max(self._settings.sweep_interval_seconds, _SWEEP_PAUSE_FACTOR * (ended - began))
        if not self._poll_events():
            self._clock.sleep(min(self._settings.retry_seconds, max(0.0, self._next_sweep - self._clock.monotonic())))

    def _poll_events(self) -> bool:
        """Poll for events, if there is a source of them; returns whether the poll waited."""
        if self._events is None:
            return False
        try:
            return self._events.poll() is not None
        except Exception as error:  # noqa: BLE001 - the next poll goes on
            logger.warning("events_not_read", reason=reason_of(error, "drops", self._world))
            return False


def _check_overlap(prefixes: Sequence[str]) -> None:
    ordered = sorted(prefixes)
    for outer, inner in pairwise(ordered):
        if inner.startswith(outer):
            raise OverlappingPrefixes(f"the inbox {inner} is inside {outer}; give prefixes that don't overlap")
