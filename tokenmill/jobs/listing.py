"""The jobs in a folder or root, the newest first. They are read concurrently, because each request to a bucket is slow
but many may run at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from pipeline.jobs.summaries import JobSummary
    from pipeline.ledger.ledger import JobLedger
    from pipeline.ports import ObjectStore
    from schemas.jobs.batch import Batch, UnreadableJob

READERS: Final = 16
CHUNK_JOBS: Final = 32

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class ListedJob:
    """A job in a list. `location`: its folder, or the root's URL. `batch`: the job as JSON, if it was requested."""

    location: str
    summary: JobSummary
    batch: Batch | UnreadableJob | None = None


def jobs_in(store: ObjectStore, location: str, limit: int, *, active: bool, as_json: bool) -> list[ListedJob]:
    """The newest `limit` jobs of a root, or the one that the store's folder is.

    Args:
        active: only those that have not ended; in a root the others aren't read.
        as_json: read the batches, too.
    """
    from pipeline.jobs.summaries import find_ledgers
    from pipeline.ledger.active_index import marked_jobs
    from pipeline.ledger.ledger import JOB

    marked = active and store.info(JOB) is None
    ledgers = marked_jobs(store) if marked else find_ledgers(store)
    read = partial(_read, location=location, active=active, as_json=as_json)
    with closing(_map_concurrently(read, ledgers)) as jobs:
        found = islice((job for job in jobs if job is not None), limit)
        return sorted(found, key=_age)  # a retry's id sorts next to that of its first job


def jobs_below(folder: Path, limit: int, *, active: bool, as_json: bool) -> list[ListedJob]:
    """The newest `limit` jobs of a local folder: the folder itself if it is a job or a root, else its subfolders that
    are."""
    from pipeline.adapters.folder.store import FolderStore

    found: list[ListedJob] = []
    for location in _locations(folder):
        with FolderStore(location, read_only=True) as store:
            found += jobs_in(store, str(location), limit, active=active, as_json=as_json)
    return sorted(found, key=_age)[:limit]


def _read(ledger: JobLedger, *, location: str, active: bool, as_json: bool) -> ListedJob | None:
    from pipeline.gateway.batches.serialization import serialize_batch
    from pipeline.jobs.summaries import summarize_for_listing
    from pipeline.ledger.active_index import is_open
    from pipeline.ports import PipelineError
    from schemas.jobs.batch import UnreadableJob

    if active and not is_open(ledger):
        return None
    summary = summarize_for_listing(ledger)
    if not as_json:
        return ListedJob(location, summary)
    try:
        if summary.problem is None:
            return ListedJob(location, summary, serialize_batch(ledger, summary))
        problem = summary.problem
    except PipelineError as error:
        problem = str(error)
    return ListedJob(location, summary, UnreadableJob(id=summary.id, problem=problem))


def _map_concurrently(work: Callable[[Given], Made], items: Iterable[Given]) -> Generator[Made]:
    """Like `map`, on threads, a chunk at a time."""
    left = iter(items)
    with ThreadPoolExecutor(READERS, thread_name_prefix="reader") as pool:
        while chunk := list(islice(left, CHUNK_JOBS)):
            yield from pool.map(work, chunk)


def _age(listed: ListedJob) -> float:
    """A sort key, less for newer jobs; unreadable ones come first, so that they are seen."""
    job = listed.summary.job
    return float("-inf") if job is None else -job.created_at.timestamp()


def _locations(folder: Path) -> list[Path]:
    if _holds_jobs(folder):
        return [folder]
    return [child for child in sorted(folder.iterdir()) if child.is_dir() and _holds_jobs(child)]


def _holds_jobs(folder: Path) -> bool:
    return (folder / "job.json").is_file() or (folder / "jobs").is_dir()
