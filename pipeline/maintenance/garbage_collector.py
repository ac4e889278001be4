"""Collections in an installation that runs: one every so often, by one of those that could do it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import structlog

from pipeline.maintenance.retention import RetentionSettings, RetentionSweep
from pipeline.ports import Lease, World
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.runtime.supervision import reason_of

_LOOK_SECONDS: Final = 1.0
_TRIES: Final = 8
"""Between two collections, where one fails."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GarbageCollectorSettings:
    """Times in seconds.

    Attributes:
        every: between two collections.
        again: at most, until it is asked again whether another has collected; and before the first look: whoever has
            just started has other things to do.
    """

    every: float = 86_400.0
    again: float = 600.0


class GarbageCollector:
    """Collects again and again. Several may run.

    Args:
        lease: one that lasts for `every`: while another holds it, that one has collected. None: nobody else is there.
    """

    def __init__(
        self,
        world: World,
        retention: RetentionSettings,
        settings: GarbageCollectorSettings | None = None,
        lease: Lease | None = None,
    ) -> None:
        self._world = world
        self._retention = retention
        self._settings = settings or GarbageCollectorSettings()
        self._lease = lease
        self._again = min(self._settings.every, self._settings.again)
        self._next = world.clock.monotonic() + self._again

    def run(self, stop: threading.Event) -> None:
        """Collect until `stop`, which also ends a collection under way; the next one goes on with it."""
        while not stop.wait(_LOOK_SECONDS):
            self.look(stop)

    def look(self, stop: threading.Event) -> bool:
        """Collect if it is time, and nobody else did; whether it was done. Failures are logged."""
        if self._world.clock.monotonic() < self._next:
            return False
        wait, done = self._again, False
        if self._is_ours():
            done = self._collect(stop)
            # To look through all jobs that ever were is dear, also when it fails.
            wait = self._settings.every if done else self._settings.every / _TRIES
        self._next = self._world.clock.monotonic() + wait
        return done

    def _is_ours(self) -> bool:
        """Without an answer it isn't: there is no hurry."""
        try:
            return self._lease is None or self._lease.renew()
        except ServiceUnavailable as error:
            logger.warning("the lease can't be asked for", reason=str(error))
            return False

    def _collect(self, stop: threading.Event) -> bool:
        try:
            found = RetentionSweep(self._world, self._retention, stopped=stop.is_set).run()
        except Exception as error:  # noqa: BLE001 - the next collection goes on with it
            logger.error("not all was collected", reason=reason_of(error, "housekeeping", self._world))
            return False
        logger.info(
            "collected",
            objects=found.objects.total(),
            size=found.num_bytes.total(),
            results_of_jobs=len(found.jobs),
        )
        return True
