"""Concurrency slots: the running requests of a name (a tenant or a key), counted for all gateways together.
`admission.py` has the limits.

A slot expires after the longest time that a request can take, so slots of a gateway that was killed are released."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Protocol

from pipeline.ports import Clock


class ConcurrencySlots(Protocol):
    """Concurrency slots by name. The Redis implementation raises `ServiceUnavailable`."""

    def enter(self, name: str, request: str, most: int, seconds: float, rows: int = 1) -> bool:
        """Take a slot for each row, which expires after `seconds`. Returns False, and takes none, when fewer than
        `rows` of the `most` slots are free."""
        ...

    def leave(self, name: str, request: str, rows: int = 1) -> None:
        """Release the request's slots; does nothing when it holds none."""
        ...


class MemoryConcurrencySlots:
    """The concurrency slots of one process. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taken: defaultdict[str, dict[str, tuple[float, int]]] = defaultdict(dict)  # (expiry time, rows)
        self._lock = threading.Lock()

    def enter(self, name: str, request: str, most: int, seconds: float, rows: int = 1) -> bool:
        """Take a slot for each row, which expires after `seconds`. Returns False, and takes none, when fewer than
        `rows` of the `most` slots are free."""
        now = self._clock.monotonic()
        with self._lock:
            taken = {one: slot for one, slot in self._taken[name].items() if slot[0] > now}
            if sum(count for _, count in taken.values()) + rows <= most:
                taken[request] = now + seconds, rows
            self._taken[name] = taken
            return request in taken

    def leave(self, name: str, request: str, rows: int = 1) -> None:
        """Release the request's slots; does nothing when it holds none."""
        with self._lock:
            taken = self._taken.get(name, {})
            taken.pop(request, None)
            if not taken:
                self._taken.pop(name, None)
