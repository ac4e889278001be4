"""The store's clock, for machines whose own clock is wrong.

Deadlines and durations are compared between machines. One machine's clock that is an hour fast would expire jobs of
all. Each answer of an HTTP server carries the server's time, so the store is the clock that all processes share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

import structlog

from pipeline.ports import Clock

MAX_REQUEST_SECONDS: Final = 2.0
"""Answers to slower requests are not used to measure the offset."""

MIN_OFFSET: Final = timedelta(seconds=5)
"""Smaller offsets are ignored: answers carry whole seconds, and take some time."""

WARNED_OFFSET: Final = timedelta(seconds=60)

logger = structlog.get_logger(__name__)


class TimeOffset:
    """The store's time minus this machine's, measured from the store's answers. Threads may share it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._offset = timedelta()
        self._warned = False

    def __call__(self) -> timedelta:
        """The offset to add to this machine's time; 0 when the two agree."""
        return self._offset

    def record_answer(self, date: str | None, request_timeout_seconds: float) -> None:
        """Update the offset from an answer. `date`: its `Date` header."""
        if date is None or request_timeout_seconds > MAX_REQUEST_SECONDS:
            return
        try:
            server_time = parsedate_to_datetime(date)
        except ValueError:
            return
        now = self._clock.now()
        offset = server_time.replace(tzinfo=server_time.tzinfo or UTC) - now
        with self._lock:
            if abs(offset) < MIN_OFFSET:
                offset = timedelta()
            if abs(offset - self._offset) < MIN_OFFSET:
                return  # explained by whole seconds and the latency of an answer
            self._offset = offset
            warn = abs(offset) > WARNED_OFFSET
            was_warned, self._warned = self._warned, warn
        if warn:
            logger.warning(
                "this machine's clock differs from the store's: the store's time is used; set this machine's clock",
                own=now.isoformat(timespec="seconds"), store=server_time.isoformat(timespec="seconds"),
                seconds=round(offset.total_seconds()),
            )  # fmt: skip
        elif was_warned:
            logger.info("this machine's clock agrees with the store's again")


class StoreClock:
    """`Clock` of this machine whose wall time is the store's. `offset`: the store's time minus this machine's."""

    def __init__(self, clock: Clock, offset: Callable[[], timedelta]) -> None:
        self._clock = clock
        self._offset = offset

    def now(self) -> datetime:
        """The store's time, aware, UTC."""
        return self._clock.now() + self._offset()

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        return self._clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        self._clock.sleep(seconds)
