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
        self._figures: dict[str, tuple[float, WorkerMetrics]] = {}

    def beat(self, state: WorkerState) -> None:
        """The worker lives, and this is how it stands."""
        with self._lock:
            self._beats[state.name] = (self._clock.monotonic(), state)

    def leave(self, worker: str) -> None:
        """The worker ends in order."""
        with self._lock:
            self._beats.pop(worker, None)
            self._figures.pop(worker, None)

    def tell(self, worker: str, figures: WorkerMetrics) -> None:
        """What the worker has to tell."""
        with self._lock:
            self._figures[worker] = (self._clock.monotonic(), figures)

    def figures(self) -> dict[str, WorkerMetrics]:
        """What workers that live have told, by name."""
        living = {state.name for state in self.workers()}
        now = self._clock.monotonic()
        with self._lock:
            self._figures = {name: told for name, told in self._figures.items() if now - told[0] <= self.lifetime}
            return {name: self._figures[name][1] for name in sorted(living & self._figures.keys())}

    def workers(self) -> list[WorkerState]:
        """Workers that live, by name; the dead are forgotten."""
        now = self._clock.monotonic()
        with self._lock:
            self._beats = {name: beat for name, beat in self._beats.items() if now - beat[0] <= self.lifetime}
            return [self._beats[name][1] for name in sorted(self._beats)]

    def since(self) -> float:
        """Seconds since this object was made."""
        return self._clock.monotonic() - self._began
