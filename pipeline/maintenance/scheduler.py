"""The retention scheduler runs the retention sweep periodically, in one of the processes that could run it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import structlog

from pipeline.maintenance.retention import RetentionSettings, RetentionSweep
from pipeline.ports import Lease, World
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.runtime.supervision import reason_of

_POLL_INTERVAL_SECONDS: Final = 1.0
_TRIES: Final = 8
"""Retries within one interval when collections fail."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RetentionSchedulerSettings:
    """Intervals of the retention scheduler; times in seconds.

    Attributes:
        interval_seconds: interval between two collections.
        check_interval_seconds: longest interval between two checks whether another process has collected, and the delay
            before the first check: a process that has just started has other work.
    """

    interval_seconds: float = 86_400.0
    check_interval_seconds: float = 600.0


class RetentionScheduler:
    """Collects periodically. Several may run.

    Args:
        lease: a lease that lasts for `every`: while another process holds it, that process has collected. None: this is
            the only process.
    """

    def __init__(
        self,
        world: World,
        retention: RetentionSettings,
        settings: RetentionSchedulerSettings | None = None,
        lease: Lease | None = None,
    ) -> None:
        self._world = world
        self._retention = retention
        self._settings = settings or RetentionSchedulerSettings()
        self._lease = lease
        self._again = min(self._settings.interval_seconds, self._settings.check_interval_seconds)
        self._next = world.clock.monotonic() + self._again

    def run(self, stop: threading.Event) -> None:
        """Collect periodically until `stop` is set, which also interrupts a running collection; the next one resumes
        it."""
        while not stop.wait(_POLL_INTERVAL_SECONDS):
            self.poll(stop)

    def poll(self, stop: threading.Event) -> bool:
        """Collect if it is due and no other process has; returns whether it succeeded. Failures are logged."""
        if self._world.clock.monotonic() < self._next:
            return False
        wait, done = self._again, False
        if self._is_ours():
            done = self._collect(stop)
            # A sweep over all jobs is expensive, also when it fails.
            wait = self._settings.interval_seconds if done else self._settings.interval_seconds / _TRIES
        self._next = self._world.clock.monotonic() + wait
        return done

    def _is_ours(self) -> bool:
        """Whether this process holds the lease. Without an answer it doesn't: collections aren't urgent."""
        try:
            return self._lease is None or self._lease.renew()
        except ServiceUnavailable as error:
            logger.warning("the lease can't be requested", reason=str(error))
            return False

    def _collect(self, stop: threading.Event) -> bool:
        try:
            found = RetentionSweep(self._world, self._retention, stopped=stop.is_set).run()
        except Exception as error:  # noqa: BLE001 - the next collection resumes
            logger.error("the collection is incomplete", reason=reason_of(error, "housekeeping", self._world))
            return False
        logger.info(
            "collected",
            objects=found.objects.total(),
            size=found.num_bytes.total(),
            results_of_jobs=len(found.jobs),
        )
        return True
