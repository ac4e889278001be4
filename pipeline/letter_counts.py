"""How many dead letters this process has written, for whoever watches."""

from __future__ import annotations

import threading
from collections import Counter


class LetterCounts:
    """By door. Threads share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: Counter[str] = Counter()

    def note(self, door: str) -> None:
        """One more."""
        with self._lock:
            self._written[door] += 1

    def read(self) -> dict[str, int]:
        """Door -> letters."""
        with self._lock:
            return dict(self._written)
