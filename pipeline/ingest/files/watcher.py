"""Keeping the doors of dropped files: events as they come, where there are any, and a sweep every now and then."""

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

_REST = 10
"""So many times as long as a sweep took there is none."""

logger = structlog.get_logger(__name__)


class EventSource(Protocol):
    """Events, as `BucketEvents` gives them."""

    def poll(self) -> int | None:
        """Wait for some and handle them; None when there is no room for any."""
        ...


class OverlappingPrefixes(PipelineError):
    """Raised when a drop place lies in another one."""


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Times in seconds.

    Attributes:
        sweep_every: between two sweeps. Where there are events these only find what got lost.
        pause: after a failure, and while there is no room.
    """

    sweep_every: float = 60.0
    pause: float = 2.0


class FileIngestWatcher:
    """Takes what is dropped, until it is told to stop. What fails is logged, and tried again.

    Raises:
        OverlappingPlaces: a file could be dropped into two of the places at once.
    """

    def __init__(
        self,
        doors: Sequence[FileIngestSource],
        world: World,
        settings: WatchSettings | None = None,
        events: EventSource | None = None,
    ) -> None:
        _check_places([door.inbox.uri("").rstrip("/") + "/" for door in doors])
        self._doors = tuple(doors)
        self._world = world
        self._clock = world.clock
        self._settings = settings or WatchSettings()
        self._events = events
        self._next_sweep = float("-inf")

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; that takes as long as a look at the queue waits."""
        while not stop.is_set():
            self.step()

    def step(self) -> None:
        """Sweep if it is time, then wait for events, or for the next sweep, for a while."""
        began = self._clock.monotonic()
        if began >= self._next_sweep:
            for door in self._doors:
                try:
                    door.sweep()
                except Exception as error:  # noqa: BLE001 - of one door; the others go on
                    reason = reason_of(error, "drops", self._world, door=door.inbox.door)
                    logger.warning("sweep_failed", door=door.inbox.door, reason=reason)
            ended = self._clock.monotonic()
            # Where very many files lie, looking at them must not become the work.
            self._next_sweep = ended + max(self._settings.sweep_every, _REST * (ended - began))
        if not self._heard():
            self._clock.sleep(min(self._settings.pause, max(0.0, self._next_sweep - self._clock.monotonic())))

    def _heard(self) -> bool:
        """Whether events were waited for."""
        if self._events is None:
            return False
        try:
            return self._events.poll() is not None
        except Exception as error:  # noqa: BLE001 - the next look goes on
            logger.warning("events_not_read", reason=reason_of(error, "drops", self._world))
            return False


def _check_places(places: Sequence[str]) -> None:
    ordered = sorted(places)
    for outer, inner in pairwise(ordered):
        if inner.startswith(outer):
            raise OverlappingPrefixes(f"the drop place {inner} lies in {outer}; give places that don't overlap")
