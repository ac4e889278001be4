"""Heartbeats inside one process."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from pipeline.ports import Clock


class MemoryHeartbeats:
    """`Heartbeats` for threads of one process. `lifetime`: seconds after which a silent worker counts as dead."""

    def __init__(self, clock: Clock, lifetime: float) -> None:
        self._clock = clock
        self._lifetime = lifetime
        self._lock = threading.Lock()
        self._beats: dict[str, tuple[float, frozenset[tuple[str, int]]]] = {}

    def beat(self, worker: str, held: Iterable[tuple[str, int]]) -> None:
        """The worker lives, and holds exactly these shards."""
        with self._lock:
            self._beats[worker] = (self._clock.monotonic(), frozenset(held))

    def held(self) -> set[tuple[str, int]]:
        """Shards held by workers that live; the dead are forgotten."""
        now = self._clock.monotonic()
        with self._lock:
            self._beats = {name: beat for name, beat in self._beats.items() if now - beat[0] <= self._lifetime}
            return {shard for _, shards in self._beats.values() for shard in shards}
