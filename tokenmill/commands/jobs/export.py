"""`tokenmill jobs export`: results in OpenAI's form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmill import output
from tokenmill.config.cli_options import Debug, GatewayUrl, JobGiven, Json, RootUrl
from tokenmill.errors import UserError
from tokenmill.jobs.backend import ExportRequest
from tokenmill.jobs.job_location import locate, open_jobs
from tokenmill.settings import read_settings


def export(
    job: JobGiven,
    retries: Annotated[
        list[str] | None, typer.Argument(metavar="RETRY", help="With --merged: its retries, folders or ids.")
    ] = None,
    *,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="JSONL in the form of OpenAI's batch output.")],
    root_url: RootUrl = None,
    url: GatewayUrl = None,
    errors_to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where rows that did not succeed go instead.")
    ] = None,
    in_input_order: Annotated[
        bool, typer.Option("--in-input-order", help="In the order of the input, not in that of the parts.")
    ] = False,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Join JOB and its retries: of each request the best result, in input order."),
    ] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Write what is committed so far as JSONL, one line a request.

    With --merged each line of JOB is there once: an answer if one of the jobs has it, else the last reason why not.
    """
    if (retries and not merged) or (url is None and merged and not retries):
        raise UserError(
            f"{job}: --merged joins a job with its retries; name their folders or ids behind JOB"
            if merged
            else f"{job}: more than one job is given; --merged joins them"
        )
    source = open_jobs(job, root_url, url)
    others = () if url is not None else [locate(retry, root_url, read_settings()) for retry in retries or ()]
    done = source.export(ExportRequest(to, errors_to, in_input_order, merged, others))
    if as_json:
        output.print_json({"to": to, "errors_to": errors_to, "succeeded": done.succeeded, "others": done.others})
        return
    output.say(f"{to}: {output.count(done.succeeded)} rows succeeded, {output.count(done.others)} did not")
    if done.note is not None:
        output.say(done.note)
