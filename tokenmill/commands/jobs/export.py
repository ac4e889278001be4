"""`tokenmill jobs export`: results in OpenAI's form."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tokenmill import output
from tokenmill.config.cli_options import Debug, GatewayUrl, JobGiven, Json, RootUrl
from tokenmill.errors import UserError
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
    from pipeline.results.export import export
    from tokenmill.jobs.locator import check_alone, local_results, locate, open_job_readonly

    if url is not None:
        from tokenmill.jobs import http_backend

        check_alone(url, None, root_url)
        if merged or retries or in_input_order:
            raise UserError("--merged and --in-input-order need the job's folder or root; leave them out with --url")
        http_backend.export(url, job, to, errors_to, as_json=as_json)
        return
    if merged != bool(retries):
        raise UserError(
            f"{job}: --merged joins a job with its retries; name their folders or ids behind JOB"
            if merged
            else f"{job}: more than one job is given; --merged joins them"
        )
    settings = read_settings()
    places = [locate(given, root_url, settings) for given in [job, *(retries or ())]]
    for place in places:
        results = local_results(place)
        for file in (to, errors_to):
            if results is not None and file is not None and file.resolve().is_relative_to(results):
                raise UserError(f"{file}: lies among the job's results, which programs read as one; name another place")
    with ExitStack() as stack:
        first, *others = [stack.enter_context(open_job_readonly(place, settings)) for place in places]
        done = export(first, to, errors_to=errors_to, in_input_order=in_input_order, retries=others)
    if as_json:
        output.print_json({"to": to, "errors_to": errors_to, "succeeded": done.succeeded, "others": done.others})
        return
    output.say(f"{to}: {output.count(done.succeeded)} rows succeeded, {output.count(done.others)} did not")
