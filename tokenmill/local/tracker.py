"""Joins the counts of the plan, earlier runs and workers into snapshots for the progress display."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from schemas.jobs.outcome import Counts
from schemas.jobs.plan import PlanSegment
from tokenmill.local.progress import RunSnapshot, StepProgress
from tokenmill.local.remaining_time import RemainingTime, RunMeasurement
from workers.observability.progress import WorkerProgress


class WorkerUpdate(NamedTuple):
    """The counts of a worker for the display; see `WorkerProgress`. `running`: sequences that its engine
    computes.  `running_tokens`: their tokens so far."""

    rows: int
    failed: int
    restored: int
    running: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    running_tokens: int

    @classmethod
    def of(cls, progress: WorkerProgress) -> WorkerUpdate:
        counts = progress.counts
        generated = progress.engine.generated
        running = max(0, generated - counts.completion_tokens)  # resumed answers have tokens of an earlier run
        tokens = counts.prompt_tokens, counts.cached_tokens, generated, running
        return cls(progress.rows, counts.failed, counts.restored, progress.engine.running, *tokens)


class RotationObserver:
    """Reports a worker's progress in one of its turns (`workers.observability.progress.WorkerObserver`).

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
    """The progress of a run, updated by its threads and read by the display's. Snapshots are immutable; a lock keeps
    concurrent updates from overwriting each other.

    Args:
        price_per_hour: of this machine; None: unknown.
    """

    def __init__(self, price_per_hour: float | None = None) -> None:
        self._lock = threading.Lock()
        self._base = RunSnapshot("starting", price_per_hour=price_per_hour)
        self._began: float | None = None
        self._workers: dict[int, WorkerUpdate] = {}
        self._remaining = RemainingTime()
        self._steps: Callable[[], tuple[StepProgress, ...]] = tuple

    def phase(self, name: str) -> None:
        """Start a phase without counts."""
        self._replace(phase=name)

    def set_plan(self, counts: Counts, *, whole: bool = True) -> None:
        """Set the counts of the plan, or (not `whole`) of its first part: rows at the start of this run."""
        done = counts.total - counts.pending
        self._replace(total=counts.total, done=done, before=done, failed=counts.failed, planning=not whole)

    def add_segment(self, segment: PlanSegment) -> None:
        """Add a segment of the plan. Its refused and reused rows are not computed."""
        ended = segment.rejected + segment.reused
        with self._lock:
            base = self._base
            self._base = replace(
                base,
                total=base.total + segment.total,
                done=base.done + ended,
                before=base.before + ended,
                failed=base.failed + segment.rejected,
                planning=not segment.last,
            )

    def set_steps(self, progress: Callable[[], tuple[StepProgress, ...]]) -> None:
        """Set the steps of a pipeline: a function that returns their progress, from any thread. Their committed rows
        are the rows of the run."""
        self._replace(before=sum(step.done for step in progress()))
        self._steps = progress

    def computing(self) -> None:
        """Start computing, with the first model or another."""
        self._replace(phase="computing")
        self._began = self._began or time.monotonic()

    @property
    def is_computing(self) -> bool:
        """Whether the worker's loop runs, and can be stopped."""
        return self._began is not None

    def update(self, progress: WorkerUpdate, worker: int) -> None:
        """Store the progress of a worker, or of one turn of a worker with several models."""
        with self._lock:
            self._workers = self._workers | {worker: progress}
            workers, began = self._workers.values(), self._began
            if began is not None:
                self._remaining.add(
                    RunMeasurement(
                        time.monotonic() - began,
                        rows=sum(worker.rows for worker in workers),
                        running=sum(worker.running for worker in workers),
                        tokens=sum(worker.output_tokens for worker in workers),
                    )
                )

    def snapshot(self) -> RunSnapshot:
        """The current progress."""
        with self._lock:
            base, workers, began = self._base, self._workers.values(), self._began
        if not workers or began is None:
            return base
        if steps := self._steps():
            base = replace(
                base,
                steps=steps,
                total=sum(step.total for step in steps),
                done=sum(step.done for step in steps),
                planning=not all(step.is_planned for step in steps),
            )
        else:
            # A shard that is given up and taken again restores rows that this run counted when they ended.
            restored = min(sum(worker.restored for worker in workers), base.total - base.done)
            base = replace(
                base,
                done=min(base.total, base.done + restored + sum(worker.rows for worker in workers)),
                before=base.before + restored,
                failed=base.failed + sum(worker.failed for worker in workers),
            )
        with self._lock:
            left = (
                None if base.planning or base.done >= base.total else self._remaining.estimate(base.total - base.done)
            )
        return replace(
            base,
            seconds_left=left,
            prompt_tokens=sum(worker.prompt_tokens for worker in workers),
            cached_tokens=sum(worker.cached_tokens for worker in workers),
            output_tokens=sum(worker.output_tokens for worker in workers),
            running=sum(worker.running for worker in workers),
            running_tokens=sum(worker.running_tokens for worker in workers),
            seconds=time.monotonic() - began,
        )

    def _replace(self, **changes: Any) -> None:
        with self._lock:
            self._base = replace(self._base, **changes)
