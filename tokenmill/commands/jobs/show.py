"""`tokenmill jobs`: looking at jobs, in folders of their own and in roots; what changes them has modules of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill import output
from tokenmill.commands.jobs.cancel import cancel
from tokenmill.commands.jobs.export import export
from tokenmill.commands.jobs.retry import retry
from tokenmill.commands.jobs.verify import verify
from tokenmill.config.cli_options import Debug, Every, GatewayUrl, JobGiven, Json, RootUrl
from tokenmill.errors import EXIT_USAGE, InputUnusable, UserError
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.jobs.summaries import JobSummary
    from schemas.settings.settings import Settings

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
    if url is not None:
        from tokenmill.jobs import http_backend
        from tokenmill.jobs.locator import check_alone

        check_alone(url, folder, root_url)
        http_backend.list_jobs(url, limit, active=active, as_json=as_json)
        return
    where, found = _jobs(folder, root_url, limit + 1, read_settings(), active=active)
    shown = found[:limit]
    if as_json:
        from tokenmill.jobs.views import document

        output.print_json([document(summary) for _, summary in shown])
    else:
        _print(shown)
    if len(found) > limit:
        output.say(f"only the newest {limit}; --limit shows more")
    if not found:
        output.say(f"no open jobs in {where}" if active else f"no jobs in {where}; 'tokenmill run' makes one")


@app.command("show", short_help="How a job stands, or how it ended.")
def show_job(
    job: JobGiven, root_url: RootUrl = None, url: GatewayUrl = None, as_json: Json = False, _debug: Debug = False
) -> None:
    """Show how a job stands, or how it ended.

    Exit code 1: the job has ended, and files of its results are missing or cut. 'jobs verify' compares their contents.
    """
    from pipeline.jobs.summaries import summarize_job
    from pipeline.results.verification import ResultsDamaged, check_files
    from tokenmill.jobs.locator import locate, open_job_readonly

    if url is not None:
        from tokenmill.jobs import http_backend
        from tokenmill.jobs.locator import check_alone

        check_alone(url, None, root_url)
        http_backend.show(url, job, as_json=as_json)
        return
    settings = read_settings()
    place = locate(job, root_url, settings)
    with open_job_readonly(place, settings) as ledger:
        # A dispatcher keeps the cache of a root's job fresh; to count it anew might be to read thousands of objects.
        summary = summarize_job(ledger, exact=place.folder is not None)
        damage: ResultsDamaged | None = None
        try:
            if summary.manifest is not None:
                check_files(ledger, summary.manifest)
        except ResultsDamaged as error:
            damage = error
    _show(summary, as_json=as_json)
    if damage is not None:
        raise damage


def _show(summary: JobSummary, *, as_json: bool) -> None:
    from tokenmill.jobs.views import document, facts
    from tokenmill.local.summary import summary_table

    if as_json:
        output.print_json(document(summary))
        return
    console = output.stdout()
    console.print(output.table(None, ("", ""), facts(summary)))
    if summary.manifest is not None:
        console.print(summary_table(summary.manifest))
        for wrong in summary.manifest.errors:
            console.print(f"line {wrong.line}: {wrong.code}: {wrong.message}", markup=False)


@app.command("watch", short_help="Tell how a job stands until it has ended.")
def watch_job(
    job: JobGiven,
    root_url: RootUrl = None,
    url: GatewayUrl = None,
    every: Every = 2.0,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Tell on stderr how a job stands until it has ended, then as 'run' does how it ended, and with --json as 'show'.

    It only looks: Ctrl-C ends the watching, with exit code 130, and the job goes on. Exit code 1: it failed as a whole.
    """
    from pipeline.jobs.summaries import summarize_job
    from tokenmill.jobs.locator import locate, open_job_readonly
    from tokenmill.jobs.views import document
    from tokenmill.jobs.watch import tell_end, watch

    if url is not None:
        from tokenmill.jobs import http_backend
        from tokenmill.jobs.locator import check_alone

        check_alone(url, None, root_url)
        http_backend.watch(url, job, every, as_json=as_json)
        return
    settings = read_settings()
    with open_job_readonly(locate(job, root_url, settings), settings) as ledger:
        manifest = watch(ledger, every=every)
        where = ledger.place()
        if as_json:
            output.print_json(document(summarize_job(ledger)))
    tell_end(manifest, where)


app.command("cancel", short_help="End a job before its time.")(cancel)
app.command("retry", short_help="Answer the rows that got no answer, as a new job.")(retry)
app.command("export", short_help="Results as JSONL.")(export)
app.command("verify", short_help="Compare results with the manifest.")(verify)


def _jobs(
    folder: str | None, root_url: str | None, limit: int, settings: Settings, *, active: bool
) -> tuple[str, list[tuple[str, JobSummary]]]:
    """Where was looked, and what was found there, each with its place."""
    from tokenmill.jobs.listing import jobs_below, jobs_in
    from tokenmill.root import S3, open_root

    if folder is not None and root_url is not None:
        raise UserError(f"{folder}: --root names another place; give one of them")
    if folder is not None and folder.startswith(S3):
        folder, root_url = None, folder
    if folder is None and (root_url or settings.root):
        with open_root(root_url, settings, read_only=True) as opened:
            return opened.url, [(opened.url, one) for one in jobs_in(opened.world.store, limit, active=active)]
    local = Path(folder or "").expanduser()
    if not local.is_dir():
        raise InputUnusable(f"{folder}: no such folder; give the OUT of a run, or name a root with --root ROOT")
    return str(local), [(str(place), one) for place, one in jobs_below(local, limit, active=active)]


def _print(found: list[tuple[str, JobSummary]]) -> None:
    """One line for each job, on stdout."""
    rows = []
    for place, summary in found:
        counts = summary.counts
        figures = ["-"] * 3
        if counts is not None:
            figures = [output.count(n) for n in (counts.total, counts.total - counts.pending, counts.failed)]
        due = summary.eta and summary.eta.isoformat(timespec="seconds")
        rows.append((place, summary.id, summary.status or summary.problem, *figures, due))
    columns = ("place", "job", "status", "rows", "done", "failed", "should be done")
    output.stdout().print(output.table(None, columns, rows, right=columns[3:6]))
