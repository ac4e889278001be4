"""How many requests of a name are under way: counted in one place for all gateways, and never for longer than a request
can take, so that what a gateway left behind when it was killed is forgotten."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Protocol

from pipeline.ports import Clock


class Running(Protocol):
    """Places that requests take. The Redis one raises `ServiceUnavailable`."""

    def enter(self, name: str, request: str, most: int, seconds: float) -> bool:
        """Take a place for so many seconds at most; False when `most` are taken."""
        ...

    def leave(self, name: str, request: str) -> None:
        """Give the place back; harmless when there is none."""
        ...


class MemoryRunning:
    """Of one process. Threads may share it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._lock = threading.Lock()

    def enter(self, name: str, request: str, most: int, seconds: float) -> bool:
        """Take a place for so many seconds at most; False when `most` are taken."""
        now = self._clock.monotonic()
        with self._lock:
            taken = {one: until for one, until in self._until[name].items() if until > now}
            if len(taken) < most:
                taken[request] = now + seconds
            self._until[name] = taken
            return request in taken

    def leave(self, name: str, request: str) -> None:
        """Give the place back; harmless when there is none."""
        with self._lock:
            taken = self._until.get(name, {})
            taken.pop(request, None)
            if not taken:
                self._until.pop(name, None)
