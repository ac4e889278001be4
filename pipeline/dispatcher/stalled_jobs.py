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
        again: when it is retried, or, during a retry, when it counts as recovered (monotonic).
        is_tried: it is being retried, and has not failed since.
    """

    ledger: JobLedger
    reason: str
    tries: int = 0
    pause_seconds: float = FIRST_PAUSE_SECONDS
    again: float = 0.0
    is_tried: bool = False


class Attention:
    """The stalled jobs of one dispatcher, by id. For the thread that ticks."""

    def __init__(self) -> None:
        self._troubles: dict[str, StalledJob] = {}

    def __len__(self) -> int:
        return len(self._troubles)

    def note(self, job: str, ledger: JobLedger, reason: str, now: float) -> StalledJob:
        """Record a failure of the job, and pause it."""
        trouble = self._troubles.get(job)
        if trouble is None:
            trouble = self._troubles[job] = StalledJob(ledger, reason)
        else:
            trouble.pause_seconds = min(2 * trouble.pause_seconds, MAX_PAUSE_SECONDS)
        trouble.tries += 1
        trouble.reason, trouble.is_tried, trouble.again = reason, False, now + trouble.pause_seconds
        return trouble

    def reason(self, job: str) -> str | None:
        """Why the job is stalled; None: it isn't."""
        trouble = self._troubles.get(job)
        return None if trouble is None else trouble.reason

    def rests(self, job: str) -> bool:
        """Whether the job is paused now."""
        trouble = self._troubles.get(job)
        return trouble is not None and not trouble.is_tried

    def forget(self, job: str) -> None:
        """Remove a job that has ended, was removed, or has recovered."""
        self._troubles.pop(job, None)

    def due(self, now: float) -> list[tuple[str, StalledJob]]:
        """Jobs whose pause is over: they are due for a retry, or have recovered if they are being retried."""
        return [(job, trouble) for job, trouble in self._troubles.items() if now >= trouble.again]

    def try_again(self, trouble: StalledJob, now: float) -> None:
        """Start a retry; without a further failure the job has recovered after as long a pause."""
        trouble.is_tried, trouble.again = True, now + trouble.pause_seconds

    def postpone(self, trouble: StalledJob, now: float) -> None:
        """Pause the job again, as long as before: the retry could not start."""
        trouble.is_tried, trouble.again = False, now + trouble.pause_seconds
