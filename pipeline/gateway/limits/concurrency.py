"""How many requests of a name are under way: counted in one place for all gateways, and never for longer than a request
can take, so that what a gateway left behind when it was killed is forgotten."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Protocol

from pipeline.ports import Clock


class ConcurrencySlots(Protocol):
    """Places that requests take. The Redis one raises `ServiceUnavailable`."""

    def enter(self, name: str, request: str, most: int, seconds: float, rows: int = 1) -> bool:
        """Take a place for each row for so many seconds at most; False, and none is taken, when fewer of `most` are
        free."""
        ...

    def leave(self, name: str, request: str, rows: int = 1) -> None:
        """Give the places back; harmless when there are none."""
        ...


class MemoryRunning:
    """Of one process. Threads may share it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taken: defaultdict[str, dict[str, tuple[float, int]]] = defaultdict(dict)  # until when, and rows
        self._lock = threading.Lock()

    def enter(self, name: str, request: str, most: int, seconds: float, rows: int = 1) -> bool:
        """Take a place for each row for so many seconds at most; False, and none is taken, when fewer of `most` are
        free."""
        now = self._clock.monotonic()
        with self._lock:
            taken = {one: place for one, place in self._taken[name].items() if place[0] > now}
            if sum(count for _, count in taken.values()) + rows <= most:
                taken[request] = now + seconds, rows
            self._taken[name] = taken
            return request in taken

    def leave(self, name: str, request: str, rows: int = 1) -> None:
        """Give the places back; harmless when there are none."""
        with self._lock:
            taken = self._taken.get(name, {})
            taken.pop(request, None)
            if not taken:
                self._taken.pop(name, None)
