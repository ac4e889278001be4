"""Logging of an S3 server's outage: when it begins, while it lasts, and when it is over.

An operation is retried for minutes before it raises. Without these log lines nothing would show why work has stopped.
Their number is limited, even if many operations fail at once or the server fails repeatedly.
"""

from __future__ import annotations

import threading
from typing import Final

import structlog

from pipeline.ports import Clock

FIRST_REPEAT_SECONDS: Final = 5.0
MAX_REPEAT_SECONDS: Final = 60.0
"""Seconds between two warnings; the interval doubles from the first to the second value."""

logger = structlog.get_logger(__name__)


class OutageLog:
    """Logs the outages of one connection; threads may share it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._retried = 0  # number of operations that are being retried
        self._since: float | None = None
        self._warned = False
        self._next_warning = 0.0
        self._interval = FIRST_REPEAT_SECONDS

    def begin_retrying(self) -> None:
        """Record that a failed operation is being retried."""
        with self._lock:
            self._retried += 1

    def end_retrying(self) -> None:
        """Record that a retried operation succeeded, or is given up."""
        with self._lock:
            self._retried -= 1

    def record_failure(self, what: str, where: str, reason: str) -> None:
        """Record a failed attempt."""
        now = self._clock.monotonic()
        with self._lock:
            self._since = now if self._since is None else self._since
            if now < self._next_warning:
                return
            if now >= self._next_warning + MAX_REPEAT_SECONDS:
                self._interval = FIRST_REPEAT_SECONDS
            self._next_warning = now + self._interval
            self._interval = min(MAX_REPEAT_SECONDS, 2 * self._interval)
            self._warned, seconds = True, round(now - self._since, 1)
        logger.warning("S3 fails, and is tried again", at=where, operation=what, reason=reason, seconds=seconds)

    def record_success(self) -> None:
        """Record a successful operation; the outage is over if no other one is being retried."""
        if self._since is None:
            return
        with self._lock:
            if self._since is None or self._retried:
                return
            seconds, warned = round(self._clock.monotonic() - self._since, 1), self._warned
            self._since, self._warned = None, False
        if warned:
            logger.info("S3 answers again", seconds=seconds)
