"""Processor time and memory of named processes over time, from /proc, and what others took meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from benchmarks.peers.process import busy_seconds

TICKS = os.sysconf("SC_CLK_TCK")


class Sample(NamedTuple):
    """Of one process: seconds since 1970, seconds of processor time so far, bytes resident."""

    at: float
    cpu: float
    rss: int


def sample(pid: int) -> Sample | None:
    """What a process has used so far, those of its children that it waited for included; None: it is gone."""
    try:
        # What stands behind the name, which may hold blanks and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = sum(int(field) for field in fields[11:15])
    return Sample(time.time(), ticks / TICKS, int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))


class Meter:
    """Samples the processes that `pids` names, until the block ends.

    Args:
        every: seconds between two samples.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]], every: float = 1.0) -> None:
        self._pids = pids
        self._every = every
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._busy = (0.0, 0.0)

    def __enter__(self) -> Meter:
        self._busy = (busy_seconds(), time.time())
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def report(self, begun: float, ended: float, rows: int) -> dict[str, Any]:
        """By process: processor time, also for 1,000 rows, and memory in MB by quarters of the time between `begun` and
        `ended` (seconds since 1970)."""
        found = {}
        for name, samples in self._samples.items():
            within = [one for one in samples if begun <= one.at <= ended]
            if len(within) < 2:
                continue
            cpu = within[-1].cpu - within[0].cpu
            quarters: list[list[int]] = [[], [], [], []]
            for one in within:
                quarters[min(3, int(4 * (one.at - begun) / (ended - begun)))].append(one.rss)
            means = [round(sum(part) / len(part) / 1e6, 1) if part else None for part in quarters]
            found[name] = {
                "cpu_seconds": round(cpu, 2),
                "cpu_seconds_per_1000_rows": round(1000 * cpu / rows, 4),
                "rss_mb_by_quarter": means,
                "rss_mb_peak": round(max(one.rss for one in within) / 1e6, 1),
                "last_quarter_over_second": None if not means[1] or not means[3] else round(means[3] / means[1], 3),
            }
        return found

    def others_cores(self) -> float:
        """Cores that processes which are not sampled used since the block began, in the mean. What the kernel did for
        nobody in particular counts to them."""
        before, since = self._busy
        own = sum(samples[-1].cpu - samples[0].cpu for samples in self._samples.values() if samples)
        return round(max(0.0, (busy_seconds() - before - own) / (time.time() - since)), 3)

    def _run(self) -> None:
        while not self._stop.is_set():
            for name, pid in self._pids().items():
                found = sample(pid)
                if found is not None:
                    self._samples[name].append(found)
            self._stop.wait(self._every)
