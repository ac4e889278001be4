"""Jobs that stand still since something is wrong with them alone: why, and when each is tried again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeline.ledger.ledger import JobLedger

FIRST_PAUSE_SECONDS: Final = 5.0
MAX_PAUSE_SECONDS: Final = 300.0
"""Before a job is tried again; doubles from the first."""


@dataclass(slots=True)
class StalledJob:
    """Of one job.

    Attributes:
        reason: what is wrong, and what to do.
        tries: how often the job has failed in a row.
        again: when it is tried again, or counts as well if it is being tried (monotonic).
        is_tried: it was taken up again, and has not failed since.
    """

    ledger: JobLedger
    reason: str
    tries: int = 0
    pause_seconds: float = FIRST_PAUSE_SECONDS
    again: float = 0.0
    is_tried: bool = False


class Attention:
    """The jobs of one dispatcher that need somebody's attention, by id. For the thread that ticks."""

    def __init__(self) -> None:
        self._troubles: dict[str, StalledJob] = {}

    def __len__(self) -> int:
        return len(self._troubles)

    def note(self, job: str, ledger: JobLedger, reason: str, now: float) -> StalledJob:
        """The job has failed (again), and rests for a while."""
        trouble = self._troubles.get(job)
        if trouble is None:
            trouble = self._troubles[job] = StalledJob(ledger, reason)
        else:
            trouble.pause_seconds = min(2 * trouble.pause_seconds, MAX_PAUSE_SECONDS)
        trouble.tries += 1
        trouble.reason, trouble.is_tried, trouble.again = reason, False, now + trouble.pause_seconds
        return trouble

    def reason(self, job: str) -> str | None:
        """What is wrong with the job; None: nothing."""
        trouble = self._troubles.get(job)
        return None if trouble is None else trouble.reason

    def rests(self, job: str) -> bool:
        """Whether the job is not to be looked at now."""
        trouble = self._troubles.get(job)
        return trouble is not None and not trouble.is_tried

    def forget(self, job: str) -> None:
        """The job has ended, is gone, or is well."""
        self._troubles.pop(job, None)

    def due(self, now: float) -> list[tuple[str, StalledJob]]:
        """Jobs whose time has come: to be tried again, or well, if they are being tried."""
        return [(job, trouble) for job, trouble in self._troubles.items() if now >= trouble.again]

    def try_again(self, trouble: StalledJob, now: float) -> None:
        """The job is taken up again; without a further failure it is well after as long a pause."""
        trouble.is_tried, trouble.again = True, now + trouble.pause_seconds

    def postpone(self, trouble: StalledJob, now: float) -> None:
        """The job could not be taken up again now; it rests for as long a pause as before."""
        trouble.is_tried, trouble.again = False, now + trouble.pause_seconds
