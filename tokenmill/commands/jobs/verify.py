"""`tokenmill jobs verify`: whether a job's results are still those that were committed."""

from __future__ import annotations

from tokenmill import output
from tokenmill.config.cli_options import Debug, JobGiven, Json, RootUrl
from tokenmill.errors import UserError
from tokenmill.settings import read_settings


def verify(job: JobGiven, root_url: RootUrl = None, as_json: Json = False, _debug: Debug = False) -> None:
    """Compare the files of an ended job's results with its manifest: names, sizes and SHA-256.

    Reads every byte. Exit code 1: a file is missing or is another, or the job has not ended.
    """
    from pipeline.results.verification import check_files
    from tokenmill.jobs.locator import locate, open_job_readonly

    settings = read_settings()
    with open_job_readonly(locate(job, root_url, settings), settings) as ledger:
        manifest = ledger.manifest()
        if manifest is None:
            raise UserError(f"{ledger.place()}: the job has not ended, and has no manifest yet; wait for its end")
        files = check_files(ledger, manifest, hashes=True)
        where = ledger.place()
    if as_json:
        output.print_json({"job": manifest.job, "place": where, "files": files, "rows": manifest.counts.total})
    else:
        output.stdout().print(
            f"{where}: {output.count(files)} files with {output.count(manifest.counts.total)} rows are as committed",
            markup=False,
        )
