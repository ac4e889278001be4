"""How many rows of a tenant's waiting callers may run where no limit is set: so many for each worker that lives, so
that a fleet that grows takes more, and one tenant never has all of it."""

from __future__ import annotations

import contextlib
import math
import threading

from pipeline.ports import Clock, Heartbeats
from pipeline.runtime.availability import ServiceUnavailable

_REFRESH_SECONDS = 1.0


class TenantCapacity:
    """Reads heartbeats, once in a while. Threads may share one.

    Args:
        rows_per_worker: for one tenant.
    """

    def __init__(self, clock: Clock, heartbeats: Heartbeats, rows_per_worker: int) -> None:
        self._clock = clock
        self._heartbeats = heartbeats
        self._rows_per_worker = rows_per_worker
        self._workers = 1
        self._refresh_at = -math.inf
        self._lock = threading.Lock()

    def rows(self) -> int:
        """Of one worker where none lives; what was read last where no heartbeat can be read."""
        with self._lock:
            if self._clock.monotonic() >= self._refresh_at:
                self._refresh_at = self._clock.monotonic() + _REFRESH_SECONDS
                with contextlib.suppress(ServiceUnavailable):
                    self._workers = max(1, len(self._heartbeats.workers()))
        return self._workers * self._rows_per_worker
