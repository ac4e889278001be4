"""The oracle's checks of temporary files: the marker of an open job, and leftovers of attempts."""

from __future__ import annotations

from pathlib import Path

from tests.simulation.machine import InvariantViolated


def check_marker(job: Path) -> None:
    """At any moment a job that was accepted and has not ended is marked, or no dispatcher would find it again."""
    if (job / "job.json").exists() and not (job / "manifest.json").exists() and not _marker(job).exists():
        raise InvariantViolated(f"I7: the job is open, but {_marker(job).name} is not in active/")


def check_ended(job: Path) -> None:
    """When the job has ended, and its order has come once more: all that only an open job needs is gone."""
    if _marker(job).exists():
        raise InvariantViolated("I7: the job has ended, and is marked as open")
    left = sorted(str(path.relative_to(job)) for path in job.glob("work/[0-9]*/*"))
    if left:
        raise InvariantViolated(f"I7: the job has ended, and {left} are left")


def _marker(job: Path) -> Path:
    return job.parent.parent / "active" / job.name
