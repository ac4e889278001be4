"""Heartbeats inside one process."""

from __future__ import annotations

import threading

from pipeline.ports import Clock, WorkerState
from schemas.workers.metrics import WorkerMetrics


class MemoryHeartbeats:
    """`Heartbeats` for threads of one process. `lifetime`: seconds after which a silent worker counts as dead."""

    def __init__(self, clock: Clock, lifetime: float) -> None:
        self._clock = clock
        self.lifetime = lifetime
        self._lock = threading.Lock()
        self._began = clock.monotonic()
        self._beats: dict[str, tuple[float, WorkerState]] = {}
        self._metrics: dict[str, tuple[float, WorkerMetrics]] = {}

    def send_heartbeat(self, state: WorkerState) -> None:
        """See `Heartbeats.send_heartbeat`."""
        with self._lock:
            self._beats[state.name] = (self._clock.monotonic(), state)

    def leave(self, worker: str) -> None:
        """See `Heartbeats.leave`."""
        with self._lock:
            self._beats.pop(worker, None)
            self._metrics.pop(worker, None)

    def report_metrics(self, worker: str, metrics: WorkerMetrics) -> None:
        """See `Heartbeats.report_metrics`."""
        with self._lock:
            self._metrics[worker] = (self._clock.monotonic(), metrics)

    def metrics(self) -> dict[str, WorkerMetrics]:
        """The latest metrics of each live worker, by name."""
        living = {state.name for state in self.workers()}
        now = self._clock.monotonic()
        with self._lock:
            self._metrics = {name: report for name, report in self._metrics.items() if now - report[0] <= self.lifetime}
            return {name: self._metrics[name][1] for name in sorted(living & self._metrics.keys())}

    def workers(self) -> list[WorkerState]:
        """The states of live workers, by name; dead ones are dropped."""
        now = self._clock.monotonic()
        with self._lock:
            self._beats = {name: beat for name, beat in self._beats.items() if now - beat[0] <= self.lifetime}
            return [self._beats[name][1] for name in sorted(self._beats)]

    def since(self) -> float:
        """Seconds since this object was made."""
        return self._clock.monotonic() - self._began
