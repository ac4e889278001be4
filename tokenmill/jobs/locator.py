"""Which job a command means: an existing folder is itself, anything else is the id of a job in a root.

A job's own folder below a local root (`ROOT/jobs/ID`) is the root's job: others work at it, so it is steered as they
expect, by way of its root.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import InputUnusable, UserError
from tokenmill.root import open_root

if TYPE_CHECKING:
    from pipeline.ledger.ledger import JobLedger
    from schemas.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class JobLocation:
    """Where a job lies: in a folder of its own, or under an id in a root.

    Attributes:
        given: what the user called it.  folder: its own; None: it is in `root`, under the id `job`.
    """

    given: str
    folder: Path | None = None
    root: str = ""
    job: str = ""

    def __str__(self) -> str:
        return self.given if self.folder is not None else self.job


def locate(given: str, root_url: str | None, settings: Settings) -> JobLocation:
    """Where the job is that the user calls `given`. That there is a job isn't checked yet, except in a folder.

    Raises:
        InputError: it is no folder, and no root is named or it can't be an id.
        JobNotFound: there is no job in the folder, or there are several.
    """
    folder = Path(given).expanduser()
    if given and folder.is_dir():
        return _of_folder(given, folder)
    url = root_url or settings.root
    if not url:
        raise InputUnusable(
            f"{given}: no such folder, and no root is named; give a job's folder, or its id with --root ROOT "
            "(or TOKENMILL_ROOT)"
        )
    if not is_id(given):
        raise InputUnusable(
            f"{given}: no such folder, and not a job's id; 'tokenmill jobs list --root {url}' shows them"
        )
    return JobLocation(given, root=url, job=given)


def check_alone(url: str, folder: str | None, root_url: str | None) -> None:
    """Raises `UserError` where a gateway is named, and another place as well."""
    if folder is not None or root_url is not None:
        other = folder if folder is not None else f"--root {root_url}"
        raise UserError(f"{other}: --url {url} names another place; give one of them")


@contextmanager
def open_job_readonly(place: JobLocation, settings: Settings) -> Iterator[JobLedger]:
    """The job, to be looked at only. Raises `InputUnusable` when the root holds no such job, or `StoreError`."""
    from pipeline.adapters.folder.store import FolderStore
    from pipeline.ledger.ledger import JOB, JobLedger

    if place.folder is not None:
        with FolderStore(place.folder, read_only=True) as store:
            yield JobLedger(store)
        return
    with open_root(place.root, settings, read_only=True) as root:
        ledger = root.ledger(place.job)
        if root.world.store.info(ledger.prefix + JOB) is None:
            raise InputUnusable(
                f"{root.url}: holds no job {place.job}; 'tokenmill jobs list --root {root.url}' shows those that it has"
            )
        yield ledger


def local_results(place: JobLocation) -> Path | None:
    """The folder that holds the job's parts; None: it is in a bucket."""
    from pipeline.ledger.ledger import JOBS, RESULTS

    if place.folder is not None:
        return (place.folder / RESULTS).resolve()
    return None if "://" in place.root else (Path(place.root).expanduser() / JOBS / place.job / RESULTS).resolve()


def _of_folder(given: str, folder: Path) -> JobLocation:
    from pipeline.adapters.folder.store import FolderStore
    from pipeline.jobs.summaries import find_ledger
    from pipeline.ledger.ledger import JOBS

    with FolderStore(folder, read_only=True) as store:
        ledger = find_ledger(store)
        if ledger.in_root:
            return JobLocation(given, root=str(store.root), job=ledger.name)
        above = store.root.parent
        if above.name == JOBS.rstrip("/") and _is_called(ledger, store.root.name):
            return JobLocation(given, root=str(above.parent), job=store.root.name)
    return JobLocation(given, folder=folder)


def _is_called(ledger: JobLedger, name: str) -> bool:
    """Whether the job's id is its folder's name, as in a root. A job that can't be read isn't known to be in one."""
    from pipeline.ledger.ledger import LedgerError

    try:
        return ledger.job().id == name
    except LedgerError:
        return False


def is_id(given: str) -> bool:
    """Whether a job can be called so."""
    from pydantic import TypeAdapter, ValidationError

    from schemas.identifiers import Id

    try:
        TypeAdapter[str](Id).validate_python(given, strict=True)
    except ValidationError:
        return False
    return True
