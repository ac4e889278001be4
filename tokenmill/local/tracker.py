"""Joins what the plan, earlier runs and the worker say into the snapshots that a progress display draws."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from schemas.jobs.outcome import Counts
from schemas.jobs.plan import PlanSegment
from tokenmill.local.progress import RunSnapshot
from workers.observability.progress import WorkerProgress


class WorkerUpdate(NamedTuple):
    """What a display needs of a worker's news; see `WorkerProgress`."""

    rows: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, progress: WorkerProgress) -> WorkerUpdate:
        counts = progress.counts
        tokens = counts.prompt_tokens, counts.cached_tokens, progress.engine.generated
        return cls(progress.rows, counts.failed, *tokens)


class RotationObserver:
    """Tells `report` a worker's progress in one of its turns (`workers.observability.progress.WorkerObserver`).

    Args:
        number: of the turn, among those of all workers.
    """

    def __init__(self, report: Callable[[WorkerUpdate, int], object], number: int) -> None:
        self._report = report
        self._number = number

    def progress(self, progress: WorkerProgress) -> None:
        """The worker's counts since its turn began."""
        self._report(WorkerUpdate.of(progress), self._number)


class RunTracker:
    """Told by the run's threads, asked by the display's. Snapshots are whole objects; a lock keeps one teller from
    taking back what another has just told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._base = RunSnapshot("starting")
        self._began: float | None = None
        self._workers: dict[int, WorkerUpdate] = {}

    def phase(self, name: str) -> None:
        """Something begins that has no figures yet."""
        self._tell(phase=name)

    def planned(self, counts: Counts, expected_tokens: int, *, whole: bool = True) -> None:
        """The plan stands, or (not `whole`) its beginning: rows as they are when this run begins, and output tokens
        that the pending ones are expected to need."""
        done = counts.total - counts.pending
        self._tell(
            total=counts.total,
            done=done,
            before=done,
            failed=counts.failed,
            expected_tokens=expected_tokens,
            planning=not whole,
        )

    def more(self, segment: PlanSegment) -> None:
        """One more segment of the plan stands."""
        expected = sum(shard.expected_tokens for shard in segment.shards)
        with self._lock:
            base = self._base
            self._base = replace(
                base,
                total=base.total + segment.total,
                expected_tokens=base.expected_tokens + expected,
                planning=not segment.last,
            )

    def computing(self) -> None:
        """The engine is about to get its first row, or the first one of another model."""
        self._tell(phase="computing")
        self._began = self._began or time.monotonic()

    @property
    def is_computing(self) -> bool:
        """Whether the worker's loop runs: it can be told to stop."""
        return self._began is not None

    def told(self, told: WorkerUpdate, worker: int) -> None:
        """The news of one of several workers, or of one of a worker's turns with several models."""
        with self._lock:
            self._workers = self._workers | {worker: told}

    def snapshot(self) -> RunSnapshot:
        """How far the run is."""
        base, told, began = self._base, self._workers.values(), self._began
        if not told or began is None:
            return base
        return replace(
            base,
            done=base.done + sum(worker.rows for worker in told),
            failed=base.failed + sum(worker.failed for worker in told),
            prompt_tokens=sum(worker.prompt_tokens for worker in told),
            cached_tokens=sum(worker.cached_tokens for worker in told),
            output_tokens=sum(worker.output_tokens for worker in told),
            seconds=time.monotonic() - began,
        )

    def _tell(self, **changes: Any) -> None:
        with self._lock:
            self._base = replace(self._base, **changes)
