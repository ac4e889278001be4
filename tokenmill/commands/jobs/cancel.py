"""`tokenmill jobs cancel`: ending a job before its time."""

from __future__ import annotations

from tokenmill import output
from tokenmill.config.cli_options import Debug, GatewayUrl, JobGiven, Json, RootUrl
from tokenmill.jobs.job_location import open_jobs


def cancel(
    job: JobGiven, root_url: RootUrl = None, url: GatewayUrl = None, as_json: Json = False, _debug: Debug = False
) -> None:
    """End a job before its time: what is finished is kept, and each other row says that it was cancelled.

    A run that computes the job ends it within seconds, and in a root its dispatcher; a folder's job without a run is
    ended here, without a model. Cancelling a cancelled job again changes nothing; one that ended otherwise can't be
    cancelled any more, and the exit code is 1.
    """
    done = open_jobs(job, root_url, url).cancel()
    if as_json:
        output.print_json(done.batch)
    for line in done.lines:
        output.say(line)
