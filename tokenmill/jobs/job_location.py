"""Decides which job a command means, and opens its backend: a folder, an id in a root, or an id behind a gateway's URL.

A job's own folder below a local root (`ROOT/jobs/ID`) is the root's job: dispatcher and workers compute it, so commands
reach it through its root.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import InputUnusable, UserError
from tokenmill.jobs.backend import is_id
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.ledger.ledger import JobLedger
    from schemas.settings.settings import Settings
    from tokenmill.jobs.backend import JobsBackend
    from tokenmill.jobs.ledger_backend import FolderJobs, RootJobs


def open_jobs(job: str, root_url: str | None, url: str | None) -> JobsBackend:
    """The backend of one job: a gateway if `url` names one, else the job's own folder or its root.

    Raises:
        InputUnusable: it is no folder, and no root is named or it can't be an id.  UserError: two locations are named.
        JobNotFound: there is no job in the folder, or there are several.
    """
    if url is not None:
        return _open_gateway_jobs(url, job, None, root_url)
    return locate(job, root_url, read_settings())


def open_job_list(folder: str | None, root_url: str | None, url: str | None) -> JobsBackend:
    """The backend whose jobs are listed: a gateway, the root that is named, else a folder (default: the current one).

    Raises:
        UserError: two locations are named.  InputUnusable: there is no such folder.
    """
    if url is not None:
        return _open_gateway_jobs(url, "", folder, root_url)
    return locate_list(folder, root_url, read_settings())


def locate(given: str, root_url: str | None, settings: Settings) -> FolderJobs | RootJobs:
    """The job that the user calls `given`: an existing folder is itself, anything else is an id in a root. Only in a
    folder it is checked that there is a job.

    Raises:
        InputUnusable: it is no folder, and no root is named or it can't be an id.
        JobNotFound: there is no job in the folder, or there are several.
    """
    from tokenmill.jobs.ledger_backend import RootJobs

    folder = Path(given).expanduser()
    if given and folder.is_dir():
        return _of_folder(given, folder, settings)
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
    return RootJobs(url, given, settings)


def locate_list(folder: str | None, root_url: str | None, settings: Settings) -> FolderJobs | RootJobs:
    """The folder or root whose jobs are listed. Raises `UserError` for both, `InputUnusable` for a missing folder."""
    from tokenmill.jobs.ledger_backend import FolderJobs, RootJobs
    from tokenmill.root import S3

    if folder is not None and root_url is not None:
        raise UserError(f"{folder}: --root names another root; give one of them")
    if folder is not None and folder.startswith(S3):
        folder, root_url = None, folder
    url = root_url or settings.root
    if folder is None and url:
        return RootJobs(url, "", settings)
    local = Path(folder or "").expanduser()
    if not local.is_dir():
        raise InputUnusable(f"{folder}: no such folder; give the OUT of a run, or name a root with --root ROOT")
    return FolderJobs(str(local), local, settings)


def _open_gateway_jobs(url: str, job: str, folder: str | None, root_url: str | None) -> JobsBackend:
    from tokenmill.jobs.http_backend import HttpJobs

    if folder is not None or root_url is not None:
        other = folder if folder is not None else f"--root {root_url}"
        raise UserError(f"{other}: --url {url} names another root; give one of them")
    return HttpJobs(url, job)


def _of_folder(given: str, folder: Path, settings: Settings) -> FolderJobs | RootJobs:
    from pipeline.adapters.folder.store import FolderStore
    from pipeline.jobs.summaries import find_ledger
    from pipeline.ledger.ledger import JOBS
    from tokenmill.jobs.ledger_backend import FolderJobs, RootJobs

    with FolderStore(folder, read_only=True) as store:
        ledger = find_ledger(store)
        if ledger.in_root:
            return RootJobs(str(store.root), ledger.name, settings)
        above = store.root.parent
        if above.name == JOBS.rstrip("/") and _is_called(ledger, store.root.name):
            return RootJobs(str(above.parent), store.root.name, settings)
    return FolderJobs(given, folder, settings)


def _is_called(ledger: JobLedger, name: str) -> bool:
    """Whether the job's id is its folder's name, as in a root. A job that can't be read isn't known to be in one."""
    from pipeline.ledger.ledger import LedgerError

    try:
        return ledger.job().id == name
    except LedgerError:
        return False
