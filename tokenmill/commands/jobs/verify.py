"""`tokenmill jobs verify`: a comparison of a job's results with its manifest."""

from __future__ import annotations

from tokenmill import output
from tokenmill.config.cli_options import Debug, JobGiven, Json, RootUrl
from tokenmill.settings import read_settings


def verify(job: JobGiven, root_url: RootUrl = None, as_json: Json = False, _debug: Debug = False) -> None:
    """Compare the files of an ended job's results with its manifest: names, sizes and SHA-256.

    Reads every byte. Exit code 1: a file is missing or is another, or the job has not ended.
    """
    from tokenmill.jobs.job_location import locate

    manifest, where, files = locate(job, root_url, read_settings()).verify()
    if as_json:
        output.print_json({"job": manifest.job, "location": where, "files": files, "rows": manifest.counts.total})
    else:
        output.stdout().print(
            f"{where}: {output.count(files)} files with {output.count(manifest.counts.total)} rows are as committed",
            markup=False,
        )
