"""Joins what the plan, earlier runs and the worker say into the snapshots that a progress display draws."""

from __future__ import annotations

import time
from dataclasses import replace

from schemas.job import Counts
from tokenmill.progress import RunSnapshot
from workers.progress import WorkerProgress


class RunTracker:
    """Told by the run's threads, asked by the display's; each hands over whole objects, so no lock is needed."""

    def __init__(self) -> None:
        self._base = RunSnapshot("starting")
        self._began: float | None = None
        self._progress: WorkerProgress | None = None

    def phase(self, name: str) -> None:
        """Something begins that has no figures yet."""
        self._base = replace(self._base, phase=name)

    def planned(self, counts: Counts, expected_tokens: int) -> None:
        """The plan stands: rows as they are when this run begins, and output tokens that the pending ones are expected
        to need."""
        done = counts.total - counts.pending
        self._base = replace(
            self._base,
            total=counts.total,
            done=done,
            before=done,
            failed=counts.failed,
            expected_tokens=expected_tokens,
        )

    def computing(self) -> None:
        """The engine is about to get its first row."""
        self._base = replace(self._base, phase="computing")
        self._began = time.monotonic()

    @property
    def is_computing(self) -> bool:
        """Whether the worker's loop runs: it can be told to stop."""
        return self._began is not None

    def progress(self, progress: WorkerProgress) -> None:
        """The worker's news (`workers.progress.WorkerObserver`)."""
        self._progress = progress

    def snapshot(self) -> RunSnapshot:
        """How far the run is."""
        base, progress, began = self._base, self._progress, self._began
        if progress is None or began is None:
            return base
        counts = progress.counts
        return replace(
            base,
            done=base.done + progress.rows,
            failed=base.failed + counts.failed,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            output_tokens=progress.engine.generated,
            seconds=time.monotonic() - began,
        )
