"""Resident memory of processes and their children, from /proc: the current value, and the maximum since the last
read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

EVERY_SECONDS: Final = 0.2
RESET_PEAK: Final = "5"


def status_bytes(pid: int, name: str) -> int | None:
    """A line of /proc/PID/status that counts kB, such as VmRSS; None: the process is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    except OSError:
        return None
    return None


def children(pid: int) -> list[int]:
    """Of all threads of a process."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(child) for found in lists for child in found.split()]


class Memory:
    """Watches the processes that `pids` names, on a thread of its own between `start` and `close`.

    Attributes:
        peaks: process name -> most bytes resident since `reset`, as the kernel counts them.
        child_peaks: of all children of a process together, sampled.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._lock = threading.Lock()
        self.peaks: dict[str, int] = {}
        self.child_peaks: dict[str, int] = {}

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> dict[str, int]:
        """Bytes resident."""
        return {name: status_bytes(pid, "VmRSS") or 0 for name, pid in self._pids().items()}

    def reset(self) -> None:
        """Begin anew with the peaks."""
        with self._lock:
            for pid in self._pids().values():
                try:
                    Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)
                except OSError:
                    continue  # it has just ended
            self.peaks.clear()
            self.child_peaks.clear()

    def sample(self) -> None:
        with self._lock:
            for name, pid in self._pids().items():
                peak = status_bytes(pid, "VmHWM") or 0
                self.peaks[name] = max(peak, self.peaks.get(name, 0))
                below = sum(status_bytes(child, "VmRSS") or 0 for child in children(pid))
                self.child_peaks[name] = max(below, self.child_peaks.get(name, 0))

    def _run(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            self.sample()
