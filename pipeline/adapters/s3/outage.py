"""Logs an outage of an S3 server: when it begins, while it lasts, and when it is over.

An operation is tried again for minutes before it raises. Without these lines nothing would show why all stands still.
They are limited in number, however many operations fail at once or however often the server comes and goes.
"""

from __future__ import annotations

import threading
from typing import Final

import structlog

from pipeline.ports import Clock

FIRST_REPEAT_SECONDS: Final = 5.0
MAX_REPEAT_SECONDS: Final = 60.0
"""Between two warnings; the time between them doubles from the one to the other."""

logger = structlog.get_logger(__name__)


class OutageLog:
    """Of one connection; threads may share it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._retried = 0  # operations that are being tried again
        self._since: float | None = None
        self._warned = False
        self._next_warning = 0.0
        self._interval = FIRST_REPEAT_SECONDS

    def begin_retrying(self) -> None:
        """An operation has failed, and is tried again."""
        with self._lock:
            self._retried += 1

    def end_retrying(self) -> None:
        """The operation succeeded, or is given up."""
        with self._lock:
            self._retried -= 1

    def note_failure(self, what: str, where: str, reason: str) -> None:
        """A try has failed."""
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

    def note_success(self) -> None:
        """An operation has succeeded; the outage is over if no other is being tried again."""
        if self._since is None:
            return
        with self._lock:
            if self._since is None or self._retried:
                return
            seconds, warned = round(self._clock.monotonic() - self._since, 1), self._warned
            self._since, self._warned = None, False
        if warned:
            logger.info("S3 answers again", seconds=seconds)
