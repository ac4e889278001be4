"""Opens the backend of a job, or of the jobs to list, by the location that a command was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.errors import UserError
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from tokenmill.jobs.backend import JobsBackend


def open_jobs(job: str, root_url: str | None, url: str | None) -> JobsBackend:
    """The backend of one job: a gateway if `url` names one, else the job's own folder or its root.

    Raises:
        InputUnusable: it is no folder, and no root is named or it can't be an id.  UserError: two locations are named.
        JobNotFound: there is no job in the folder, or there are several.
    """
    if url is not None:
        return _open_gateway_jobs(url, job, None, root_url)
    from tokenmill.jobs.ledger_backend import locate

    return locate(job, root_url, read_settings())


def open_job_list(folder: str | None, root_url: str | None, url: str | None) -> JobsBackend:
    """The backend whose jobs are listed: a gateway, the root that is named, else a folder (default: the current one).

    Raises:
        UserError: two locations are named.  InputUnusable: there is no such folder.
    """
    if url is not None:
        return _open_gateway_jobs(url, "", folder, root_url)
    from tokenmill.jobs.ledger_backend import locate_list

    return locate_list(folder, root_url, read_settings())


def _open_gateway_jobs(url: str, job: str, folder: str | None, root_url: str | None) -> JobsBackend:
    from tokenmill.jobs.http_backend import HttpJobs

    if folder is not None or root_url is not None:
        other = folder if folder is not None else f"--root {root_url}"
        raise UserError(f"{other}: --url {url} names another root; give one of them")
    return HttpJobs(url, job)
