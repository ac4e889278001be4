"""The default limit of running interactive rows of a tenant: a number for each live worker.

So the limit grows with the fleet, and one tenant never uses all of it."""

from __future__ import annotations

import contextlib
import math
import threading

from pipeline.ports import Clock, Heartbeats
from pipeline.runtime.availability import ServiceUnavailable

_REFRESH_SECONDS = 1.0


class TenantCapacity:
    """Counts the live workers by their heartbeats, at most once a second. Thread-safe.

    Args:
        rows_per_worker: running rows of one tenant for each worker.
    """

    def __init__(self, clock: Clock, heartbeats: Heartbeats, rows_per_worker: int) -> None:
        self._clock = clock
        self._heartbeats = heartbeats
        self._rows_per_worker = rows_per_worker
        self._workers = 1
        self._refresh_at = -math.inf
        self._lock = threading.Lock()

    def rows(self) -> int:
        """The limit of running rows. Without live workers it is that of one worker; while heartbeats can't be read it
        is the last known one."""
        with self._lock:
            if self._clock.monotonic() >= self._refresh_at:
                self._refresh_at = self._clock.monotonic() + _REFRESH_SECONDS
                with contextlib.suppress(ServiceUnavailable):
                    self._workers = max(1, len(self._heartbeats.workers()))
        return self._workers * self._rows_per_worker
