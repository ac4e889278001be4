"""The jobs that stand in a folder or in a root, the newest first: read side by side, for a bucket answers each question
late but many at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from pipeline.jobs.summaries import JobSummary
    from pipeline.ledger.ledger import JobLedger
    from pipeline.ports import ObjectStore

LOOKERS: Final = 16
AT_ONCE: Final = 32

Given = TypeVar("Given")
Made = TypeVar("Made")


def jobs_in(store: ObjectStore, limit: int, *, active: bool) -> list[JobSummary]:
    """The newest `limit` jobs of a root, or the one that the store's folder is.

    Args:
        active: only those that have not ended; of a root the others aren't looked at.
    """
    from pipeline.jobs.summaries import find_ledgers
    from pipeline.ledger.active_index import marked_jobs
    from pipeline.ledger.ledger import JOB

    marked = active and store.info(JOB) is None
    ledgers = marked_jobs(store) if marked else find_ledgers(store)
    with closing(_side_by_side(partial(_glance, active=active), ledgers)) as summaries:
        found = islice((summary for summary in summaries if summary is not None), limit)
        return sorted(found, key=_age)  # a retry's id stands beside that of its first job


def jobs_below(folder: Path, limit: int, *, active: bool) -> list[tuple[Path, JobSummary]]:
    """The newest `limit` jobs of a local folder, with the place where each was found: the folder itself if it is a job
    or a root of jobs, else those directly in it that are."""
    from pipeline.adapters.folder.store import FolderStore

    found: list[tuple[Path, JobSummary]] = []
    for place in _places(folder):
        with FolderStore(place, read_only=True) as store:
            found += [(place, summary) for summary in jobs_in(store, limit, active=active)]
    return sorted(found, key=lambda one: _age(one[1]))[:limit]


def _glance(ledger: JobLedger, *, active: bool) -> JobSummary | None:
    from pipeline.jobs.summaries import glance
    from pipeline.ledger.active_index import is_open

    return None if active and not is_open(ledger) else glance(ledger)


def _side_by_side(work: Callable[[Given], Made], items: Iterable[Given]) -> Generator[Made]:
    """Like `map`, on threads, some items ahead."""
    left = iter(items)
    with ThreadPoolExecutor(LOOKERS, thread_name_prefix="looker") as pool:
        while chunk := list(islice(left, AT_ONCE)):
            yield from pool.map(work, chunk)


def _age(summary: JobSummary) -> float:
    """Less for newer jobs; those that can't be read come first, so that they are seen."""
    return float("-inf") if summary.job is None else -summary.job.created_at.timestamp()


def _places(folder: Path) -> list[Path]:
    if _is_place(folder):
        return [folder]
    return [place for place in sorted(folder.iterdir()) if place.is_dir() and _is_place(place)]


def _is_place(folder: Path) -> bool:
    return (folder / "job.json").is_file() or (folder / "jobs").is_dir()
