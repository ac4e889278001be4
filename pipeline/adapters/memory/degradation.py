"""Active degradation steps inside one process."""

from __future__ import annotations

import threading
from collections.abc import Collection

from pipeline.ports import Clock
from schemas.settings.overload import StepName


class MemoryDegradationBoard:
    """`DegradationBoard` for threads of one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[tuple[str, StepName], float] = {}

    def report(self, model: str, steps: Collection[StepName], lifetime_seconds: float) -> None:
        """See `DegradationBoard.report`."""
        now = self._clock.monotonic()
        with self._lock:
            self._until = {key: until for key, until in self._until.items() if until > now}
            self._until |= {(model, step): now + lifetime_seconds for step in steps}

    def active(self, model: str, among: Collection[StepName]) -> frozenset[StepName]:
        """See `DegradationBoard.active`."""
        now = self._clock.monotonic()
        with self._lock:
            return frozenset(step for step in among if self._until.get((model, step), now) > now)
