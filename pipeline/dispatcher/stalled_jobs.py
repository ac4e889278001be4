"""Jobs that are paused after an error that concerns them alone: the reason, and when each is retried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeline.ledger.ledger import JobLedger

FIRST_PAUSE_SECONDS: Final = 5.0
MAX_PAUSE_SECONDS: Final = 300.0
"""Pause before a job is retried; doubles from the first."""


@dataclass(slots=True)
class StalledJob:
    """The failures of one job.

    Attributes:
        reason: what is wrong, and what to do.
        tries: failures in a row.
        retry_at: when it is retried, or, during a retry, when it counts as recovered (monotonic).
        is_retrying: it is being retried, and has not failed since.
    """

    ledger: JobLedger
    reason: str
    tries: int = 0
    pause_seconds: float = FIRST_PAUSE_SECONDS
    retry_at: float = 0.0
    is_retrying: bool = False


class StalledJobs:
    """The stalled jobs of one dispatcher, by id. For the thread that ticks."""

    def __init__(self) -> None:
        self._stalled: dict[str, StalledJob] = {}

    def __len__(self) -> int:
        return len(self._stalled)

    def record_failure(self, job: str, ledger: JobLedger, reason: str, now: float) -> StalledJob:
        """Record a failure of the job, and pause it."""
        stalled = self._stalled.get(job)
        if stalled is None:
            stalled = self._stalled[job] = StalledJob(ledger, reason)
        else:
            stalled.pause_seconds = min(2 * stalled.pause_seconds, MAX_PAUSE_SECONDS)
        stalled.tries += 1
        stalled.reason, stalled.is_retrying, stalled.retry_at = reason, False, now + stalled.pause_seconds
        return stalled

    def reason(self, job: str) -> str | None:
        """Why the job is stalled; None: it isn't."""
        stalled = self._stalled.get(job)
        return None if stalled is None else stalled.reason

    def is_paused(self, job: str) -> bool:
        """Whether the job is paused now."""
        stalled = self._stalled.get(job)
        return stalled is not None and not stalled.is_retrying

    def forget(self, job: str) -> None:
        """Remove a job that has ended, was removed, or has recovered."""
        self._stalled.pop(job, None)

    def due(self, now: float) -> list[tuple[str, StalledJob]]:
        """Jobs whose pause is over: they are due for a retry, or have recovered if they are being retried."""
        return [(job, stalled) for job, stalled in self._stalled.items() if now >= stalled.retry_at]

    def start_retry(self, stalled: StalledJob, now: float) -> None:
        """Start a retry; without a further failure the job has recovered after as long a pause."""
        stalled.is_retrying, stalled.retry_at = True, now + stalled.pause_seconds

    def postpone(self, stalled: StalledJob, now: float) -> None:
        """Pause the job again, as long as before: the retry could not start."""
        stalled.is_retrying, stalled.retry_at = False, now + stalled.pause_seconds
