"""The default limit of running interactive rows of a tenant: a number for each live worker, half of its batch.

So the limit grows with the fleet, and one tenant never uses all of it."""

from __future__ import annotations

import contextlib
import math
import threading

from pipeline.ports import Clock, Heartbeats, WorkerState
from pipeline.runtime.availability import ServiceUnavailable

_REFRESH_SECONDS = 1.0

_UNKNOWN_BATCH_ROWS = 128
"""Rows of the batch of a worker that has loaded no model yet."""


class TenantCapacity:
    """Adds up the live workers by their heartbeats, at most once a second. Thread-safe.

    Args:
        rows_per_worker: running rows of one tenant for each worker; None: half of the worker's batch.
    """

    def __init__(self, clock: Clock, heartbeats: Heartbeats, rows_per_worker: int | None = None) -> None:
        self._clock = clock
        self._heartbeats = heartbeats
        self._rows_per_worker = rows_per_worker
        self._rows = self._rows_of(WorkerState("none"))
        self._refresh_at = -math.inf
        self._lock = threading.Lock()

    def rows(self) -> int:
        """The limit of running rows. Without live workers it is that of one worker; while heartbeats can't be read it
        is the last known one."""
        with self._lock:
            if self._clock.monotonic() >= self._refresh_at:
                self._refresh_at = self._clock.monotonic() + _REFRESH_SECONDS
                with contextlib.suppress(ServiceUnavailable):
                    workers = self._heartbeats.workers() or [WorkerState("none")]
                    self._rows = sum(map(self._rows_of, workers))
        return self._rows

    def _rows_of(self, worker: WorkerState) -> int:
        batch = _UNKNOWN_BATCH_ROWS if worker.max_num_seqs is None else worker.max_num_seqs
        return self._rows_per_worker or max(1, batch // 2)
