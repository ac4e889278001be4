"""`tokenmill jobs list`, `show` and `watch`, and the registration of the other subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill import output
from tokenmill.commands.jobs.cancel import cancel
from tokenmill.commands.jobs.export import export
from tokenmill.commands.jobs.retry import retry
from tokenmill.commands.jobs.verify import verify
from tokenmill.config.cli_options import Debug, Every, GatewayUrl, JobGiven, Json, RootUrl
from tokenmill.errors import EXIT_USAGE
from tokenmill.jobs.job_location import open_job_list, open_jobs

app = typer.Typer(help="Jobs in local folders, and in the root of an installation.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Show the help when no command is given."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


@app.command("list", short_help="List jobs, the newest first.")
def list_jobs(
    folder: Annotated[
        str | None,
        typer.Argument(
            metavar="[FOLDER]",
            help="A job's folder, or a folder that holds jobs' folders. Default: the root that is named, else the "
            "current folder.",
        ),
    ] = None,
    root_url: RootUrl = None,
    url: GatewayUrl = None,
    active: Annotated[
        bool,
        typer.Option("--active", help="Only jobs that have not ended. In a root of jobs no others are looked at."),
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 100,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """List the jobs in a root or a folder, or those that a gateway has for your key, the newest first.

    How open jobs stand comes from their caches, some seconds old.
    """
    found = open_job_list(folder, root_url, url).list_jobs(limit + 1, active=active, as_json=as_json)
    if as_json:
        output.print_json(found.batches[:limit])
    else:
        output.stdout().print(output.table(None, found.columns, found.rows[:limit], right=found.columns[3:6]))
    if len(found.rows) > limit:
        output.say(f"only the newest {limit}; --limit shows more")
    if not found.rows:
        output.say(found.empty)


@app.command("show", short_help="How a job stands, or how it ended.")
def show_job(
    job: JobGiven, root_url: RootUrl = None, url: GatewayUrl = None, as_json: Json = False, _debug: Debug = False
) -> None:
    """Show how a job stands, or how it ended.

    Exit code 1: the job has ended, and files of its results are missing or cut. 'jobs verify' compares their contents.
    """
    view = open_jobs(job, root_url, url).show()
    if as_json:
        output.print_json(view.batch)
    else:
        for table in view.tables:
            output.stdout().print(table)
        for error in view.errors:
            output.stdout().print(error, markup=False, emoji=False)
    if view.damage is not None:
        raise view.damage


@app.command("watch", short_help="Report a job's progress until it has ended.")
def watch_job(
    job: JobGiven,
    root_url: RootUrl = None,
    url: GatewayUrl = None,
    every: Every = 2.0,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Report a job's progress on stderr until it has ended, then its summary as 'run' does, and with --json as 'show'.

    Ctrl-C ends the watching, with exit code 130, and the job goes on. Exit code 1: it failed as a whole.
    """
    from tokenmill.jobs.watch import print_end

    print_end(open_jobs(job, root_url, url).watch(every), as_json=as_json)


app.command("cancel", short_help="End a job before its time.")(cancel)
app.command("retry", short_help="Answer the rows that got no answer, as a new job.")(retry)
app.command("export", short_help="Results as JSONL.")(export)
app.command("verify", short_help="Compare results with the manifest.")(verify)
