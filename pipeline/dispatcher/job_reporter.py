"""Reports one open job: it emits events, and writes the cached progress (`progress.json`) at a bounded rate."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from datetime import datetime
from typing import Final

from pipeline.jobs.event_sink import EventSink
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import Clock
from pipeline.results.part_files import PartEntry
from schemas.jobs.events import JobChanged, ProgressMade, ShardCommitted
from schemas.jobs.outcome import JobStatus
from schemas.jobs.progress import Progress

ETA_PRECISION: Final = 0.02
"""A forecast that moved by less than this fraction of the remaining time is not written again."""


class JobReporter:
    """Emits a job's events and caches its progress.

    Args:
        cache_interval_seconds, eta_interval_seconds: see `OpenJobSettings`.
        background: executor of the writes.
    """

    def __init__(
        self,
        ledger: JobLedger,
        events: EventSink,
        clock: Clock,
        background: Executor,
        cache_interval_seconds: float,
        eta_interval_seconds: float,
    ) -> None:
        self._ledger = ledger
        self._events = events
        self._clock = clock
        self._background = background
        self._cache_interval_seconds = cache_interval_seconds
        self._eta_interval_seconds = eta_interval_seconds
        self._write: Future[None] | None = None
        self._cached_at = float("-inf")
        self._cached_eta: datetime | None = None
        self._emitted_status: JobStatus | None = None  # the status emitted last
        self._has_changes = self._is_cache_stale = True

    def mark_changed(self) -> None:
        """The job has changed: the next `report` emits events."""
        self._has_changes = True

    def mark_eta(self, eta: datetime | None) -> None:
        """The forecast has changed: progress is written again if the difference matters to readers."""
        cached = self._cached_eta
        if eta is None or cached is None:
            self._is_cache_stale |= eta is not cached
        elif self._clock.monotonic() - self._cached_at >= self._eta_interval_seconds:
            ahead = (eta - self._clock.now()).total_seconds()
            self._is_cache_stale |= abs((eta - cached).total_seconds()) > max(1.0, ETA_PRECISION * ahead)

    def emit_part(self, job: str, entry: PartEntry) -> None:
        """Emit that a part is committed."""
        self._has_changes = True
        self._events.emit(
            ShardCommitted(
                id=f"{job}/part/{entry.number}",
                job=job,
                at=entry.summary.committed_at,
                shard=entry.number,
                rows=entry.rows,
                attempt=entry.summary.attempt,
                usage=entry.summary.usage,
            )
        )

    def report(self, read_progress: Callable[[], Progress], now: float) -> None:
        """Emit events if the job has changed, and write the cached progress if it is stale and due."""
        if self._has_changes:
            progress = read_progress()
            self._events.emit(_progress_event(progress, f"{progress.shards_done}"))
            if self._emitted_status is not progress.status:
                self._events.emit(_status_event(progress))
            self._emitted_status = progress.status
            self._has_changes, self._is_cache_stale = False, True
        is_due = now - self._cached_at >= self._cache_interval_seconds
        if self._is_cache_stale and is_due and self._is_write_done():
            progress = read_progress()
            self._is_cache_stale, self._cached_at, self._cached_eta = False, now, progress.eta
            self._write = self._background.submit(self._ledger.cache_progress, progress)

    def write(self, progress: Progress) -> None:
        """Write the cached progress now, after the write in progress, which could overwrite it."""
        self._is_write_done(wait=True)
        self._ledger.cache_progress(progress)

    def report_end(self, progress: Progress) -> None:
        """Write the final progress and emit the end."""
        self.write(progress)
        self._events.emit(_progress_event(progress, "end"))
        self._events.emit(_status_event(progress))

    def _is_write_done(self, *, wait: bool = False) -> bool:
        """Whether the last write of progress has ended; raises the exception that it raised."""
        if self._write is None or not (wait or self._write.done()):
            return self._write is None
        write, self._write = self._write, None
        write.result()
        return True


def _progress_event(progress: Progress, name: str) -> ProgressMade:
    return ProgressMade(
        id=f"{progress.job}/progress/{name}",
        job=progress.job,
        at=progress.as_of,
        counts=progress.counts,
        usage=progress.usage,
    )


def _status_event(progress: Progress) -> JobChanged:
    return JobChanged(
        id=f"{progress.job}/status/{progress.status.value}",
        job=progress.job,
        at=progress.as_of,
        status=progress.status,
        counts=progress.counts,
    )
