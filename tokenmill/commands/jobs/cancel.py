"""`tokenmill jobs cancel`: ending a job before its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill import output
from tokenmill.config.cli_options import Debug, GatewayUrl, JobGiven, Json, RootUrl
from tokenmill.errors import UserError
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from schemas.settings.settings import Settings
    from tokenmill.jobs.cancel import Cancelled
    from tokenmill.jobs.locator import JobLocation


def cancel(
    job: JobGiven, root_url: RootUrl = None, url: GatewayUrl = None, as_json: Json = False, _debug: Debug = False
) -> None:
    """End a job before its time: what is finished is kept, and each other row says that it was cancelled.

    A run that is at the job ends it within seconds, and in a root its dispatcher; a folder's job that nobody is at is
    ended here, without a model. Cancelling a cancelled job again changes nothing; one that ended otherwise can't be
    cancelled any more, and the exit code is 1.
    """
    from schemas.jobs.outcome import JobStatus
    from tokenmill.jobs.locator import check_alone, locate
    from tokenmill.local import summary

    if url is not None:
        from tokenmill.jobs import http_backend

        check_alone(url, None, root_url)
        http_backend.cancel(url, job, as_json=as_json)
        return
    settings = read_settings()
    place = locate(job, root_url, settings)
    done, where = _cancel(place, settings)
    manifest = done.manifest
    if manifest is not None and manifest.status is not JobStatus.CANCELLED:
        when = "has ended already" if done.before else "ended before it could be cancelled"
        raise UserError(f"{place}: the job {when} ({manifest.status}), so there is nothing to cancel")
    if as_json:
        status = "cancelling" if manifest is None else manifest.status
        document = None if manifest is None else summary.as_document(manifest, where)
        output.print_json({"id": done.job, "status": status, "manifest": document})
    if manifest is None:
        who = "the run at this job" if place.folder is not None else "no dispatcher"
        has = "has not ended it yet" if place.folder is not None else "has ended it yet (does one run?)"
        output.say(f"{place}: cancelled, but {who} {has}; 'tokenmill jobs watch' tells when")
        return
    if done.before:
        output.say(f"{place}: this job was cancelled before")
    output.stderr().print(summary.last_line(manifest.counts, where), markup=False)


def _cancel(place: JobLocation, settings: Settings) -> tuple[Cancelled, str]:
    """What came of it, and where the job lies."""
    from tokenmill.jobs.cancel import cancel_in_root, cancel_job
    from tokenmill.jobs.locator import open_job_readonly
    from tokenmill.root import open_root

    if place.folder is not None:
        return cancel_job(place.folder, settings.price_per_hour), str(place.folder)
    with open_job_readonly(place, settings) as ledger:  # before anything is written, even where a root is probed
        where = ledger.place().rstrip("/")
        ledger.job()
    with open_root(place.root, settings) as root:
        return cancel_in_root(root, place.job), where
