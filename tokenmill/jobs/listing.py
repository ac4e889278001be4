"""The jobs in a folder or root, the newest first. They are read concurrently, because each request to a bucket is slow
but many may run at once."""

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

READERS: Final = 16
CHUNK_JOBS: Final = 32

Given = TypeVar("Given")
Made = TypeVar("Made")


def jobs_in(store: ObjectStore, limit: int, *, active: bool) -> list[JobSummary]:
    """The newest `limit` jobs of a root, or the one that the store's folder is.

    Args:
        active: only those that have not ended; in a root the others aren't read.
    """
    from pipeline.jobs.summaries import find_ledgers
    from pipeline.ledger.active_index import marked_jobs
    from pipeline.ledger.ledger import JOB

    marked = active and store.info(JOB) is None
    ledgers = marked_jobs(store) if marked else find_ledgers(store)
    with closing(_map_concurrently(partial(_glance, active=active), ledgers)) as summaries:
        found = islice((summary for summary in summaries if summary is not None), limit)
        return sorted(found, key=_age)  # a retry's id sorts next to that of its first job


def jobs_below(folder: Path, limit: int, *, active: bool) -> list[tuple[Path, JobSummary]]:
    """The newest `limit` jobs of a local folder, each with its location: the folder itself if it is a job or a root,
    else its subfolders that are."""
    from pipeline.adapters.folder.store import FolderStore

    found: list[tuple[Path, JobSummary]] = []
    for location in _locations(folder):
        with FolderStore(location, read_only=True) as store:
            found += [(location, summary) for summary in jobs_in(store, limit, active=active)]
    return sorted(found, key=lambda one: _age(one[1]))[:limit]


def _glance(ledger: JobLedger, *, active: bool) -> JobSummary | None:
    from pipeline.jobs.summaries import summarize_for_listing
    from pipeline.ledger.active_index import is_open

    return None if active and not is_open(ledger) else summarize_for_listing(ledger)


def _map_concurrently(work: Callable[[Given], Made], items: Iterable[Given]) -> Generator[Made]:
    """Like `map`, on threads, a chunk at a time."""
    left = iter(items)
    with ThreadPoolExecutor(READERS, thread_name_prefix="reader") as pool:
        while chunk := list(islice(left, CHUNK_JOBS)):
            yield from pool.map(work, chunk)


def _age(summary: JobSummary) -> float:
    """A sort key, less for newer jobs; unreadable ones come first, so that they are seen."""
    return float("-inf") if summary.job is None else -summary.job.created_at.timestamp()


def _locations(folder: Path) -> list[Path]:
    if _holds_jobs(folder):
        return [folder]
    return [child for child in sorted(folder.iterdir()) if child.is_dir() and _holds_jobs(child)]


def _holds_jobs(folder: Path) -> bool:
    return (folder / "job.json").is_file() or (folder / "jobs").is_dir()
