"""`tokenmill jobs`: looking at jobs in local folders, and writing their results in OpenAI's form."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill import output
from tokenmill.commands.retry import retry
from tokenmill.errors import EXIT_USAGE, InputError, UserError
from tokenmill.options import Debug, Json, Output
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.jobs import JobSummary

app = typer.Typer(help="Jobs in local folders: list them, show one, export its results.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Show the help when no command is given."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


@app.command("list", short_help="List the jobs in a folder.")
def list_jobs(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="A job's folder, or a folder that holds jobs' folders.")
    ] = Path(),
    active: Annotated[
        bool,
        typer.Option("--active", help="Only jobs that have not ended. In a root of jobs no others are looked at."),
    ] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """List the jobs in a folder: it may be one, or hold some."""
    found = [(place, summary) for place in _places(folder) for summary in _summaries(place, active)]
    if as_json:
        output.print_json([_document(summary) for _, summary in found])
        return
    rows = [
        (
            place,
            summary.id,
            summary.status or summary.problem,
            *(
                [None] * 3
                if (c := summary.counts) is None
                else [output.count(n) for n in (c.total, c.total - c.pending, c.failed)]
            ),
        )
        for place, summary in found
    ]
    columns = ("folder", "job", "status", "rows", "done", "failed")
    output.stdout().print(output.table(None, columns, rows, right=columns[3:]))
    if not found:
        output.say(f"no open jobs in {folder}" if active else f"no jobs in {folder}; 'tokenmill run' makes one")


@app.command("show", short_help="How a job stands, or how it ended.")
def show_job(out: Output, as_json: Json = False, _debug: Debug = False) -> None:
    """Show how a job stands, or how it ended."""
    from pipeline.adapters.folder import FolderStore
    from pipeline.jobs import find_ledger, summarize_job
    from tokenmill.summary import summary_table

    with FolderStore(_existing(out), read_only=True) as store:
        summary = summarize_job(find_ledger(store))
    if as_json:
        output.print_json(_document(summary))
        return
    console = output.stdout()
    console.print(output.table(None, ("", ""), _facts(summary)))
    if summary.manifest is not None:
        console.print(summary_table(summary.manifest))
        for wrong in summary.manifest.errors:
            console.print(f"line {wrong.line}: {wrong.code}: {wrong.message}", markup=False)


@app.command("cancel", short_help="End a job before its time.")
def cancel_job(out: Output, as_json: Json = False, _debug: Debug = False) -> None:
    """End a job before its time: what is finished is kept, and each other row says that it was cancelled.

    A run that is at the job ends it within seconds; else it is ended here, without a model. Cancelling a cancelled job
    again changes nothing; one that ended otherwise can't be cancelled any more, and the exit code is 1.
    """
    from schemas.job import JobStatus
    from tokenmill import summary
    from tokenmill.cancellation import cancel_job

    done = cancel_job(_existing(out), read_settings().price_per_hour)
    manifest = done.manifest
    if manifest is not None and manifest.status is not JobStatus.CANCELLED:
        when = "has ended already" if done.before else "ended before it could be cancelled"
        raise UserError(f"{out}: the job {when} ({manifest.status}), so there is nothing to cancel")
    if as_json:
        status = "cancelling" if manifest is None else manifest.status
        document = None if manifest is None else summary.as_document(manifest, out)
        output.print_json({"id": done.job, "status": status, "manifest": document})
    if manifest is None:
        output.say(f"{out}: cancelled, but the run at this job has not ended it yet; 'tokenmill jobs show' tells when")
        return
    if done.before:
        output.say(f"{out}: this job was cancelled before")
    output.stderr().print(summary.last_line(manifest.counts, out), markup=False)


app.command("retry", short_help="Answer the rows that got no answer, as a new job.")(retry)


@app.command("export", short_help="Results as JSONL.")
def export_job(
    out: Output,
    retries: Annotated[
        list[Path] | None, typer.Argument(metavar="RETRY", help="With --merged: the folders of its retries.")
    ] = None,
    *,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="JSONL in the form of OpenAI's batch output.")],
    errors_to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where rows that did not succeed go instead.")
    ] = None,
    in_input_order: Annotated[
        bool, typer.Option("--in-input-order", help="In the order of the input, not in that of the parts.")
    ] = False,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Join OUT and its retries: of each request the best result, in input order."),
    ] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Write what is committed so far as JSONL, one line a request.

    With --merged each line of OUT is there once: an answer if one of the jobs has it, else the last reason why not.
    """
    from pipeline.adapters.folder import FolderStore
    from pipeline.export import export
    from pipeline.jobs import find_ledger

    if merged != bool(retries):
        raise UserError(
            f"{out}: --merged joins a job with its retries; name their folders behind OUT"
            if merged
            else f"{out}: more than one folder is given; --merged joins them"
        )
    with ExitStack() as stack:
        stores = [
            stack.enter_context(FolderStore(_existing(place), read_only=True)) for place in [out, *(retries or ())]
        ]
        first, *others = [find_ledger(store) for store in stores]
        done = export(first, to, errors_to=errors_to, in_input_order=in_input_order, retries=others)
    if as_json:
        output.print_json({"to": to, "errors_to": errors_to, "succeeded": done.succeeded, "others": done.others})
        return
    output.say(f"{to}: {output.count(done.succeeded)} rows succeeded, {output.count(done.others)} did not")


def _existing(folder: Path) -> Path:
    folder = folder.expanduser()
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the OUT of a run")
    return folder


def _places(folder: Path) -> list[Path]:
    """The folder itself if it is a job or a root of jobs, else those directly in it that are."""
    folder = _existing(folder)
    if _is_place(folder):
        return [folder]
    return [place for place in sorted(folder.iterdir()) if place.is_dir() and _is_place(place)]


def _is_place(folder: Path) -> bool:
    return (folder / "job.json").is_file() or (folder / "jobs").is_dir()


def _summaries(place: Path, active: bool) -> list[JobSummary]:
    from pipeline.adapters.folder import FolderStore
    from pipeline.jobs import list_jobs

    with FolderStore(place, read_only=True) as store:
        return list(list_jobs(store, active=active))


def _facts(summary: JobSummary) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [("job", summary.id), ("status", summary.status), ("folder", summary.place)]
    if summary.job is not None:
        facts += [
            ("input", summary.job.input.uri),
            ("model", ", ".join(f"{pin.name} ({output.arithmetic(pin)})" for pin in summary.job.models)),
            ("tier", summary.job.tier),
            ("created", summary.job.created_at.isoformat(timespec="seconds")),
        ]
        if summary.job.deadline is not None:
            facts.append(("deadline", summary.job.deadline.isoformat(timespec="seconds")))
        if summary.job.retry_of is not None:
            facts.append(("retry of", summary.job.retry_of))
    if summary.results_removed_at is not None:
        facts.append(("results", f"removed at {summary.results_removed_at.isoformat(timespec='seconds')}"))
    if summary.manifest is None and summary.counts is not None:
        counts = summary.counts
        facts += [
            ("rows", f"{output.count(counts.total - counts.pending)} of {output.count(counts.total)} done"),
            ("failed", output.count(counts.failed)),
            ("shards", f"{summary.shards_done} of {summary.shards_total} done"),
        ]
    if summary.eta is not None:
        facts.append(("should be done", summary.eta.isoformat(timespec="seconds")))
    return facts


def _document(summary: JobSummary) -> dict[str, Any]:
    """A summary for programs."""
    return {
        "id": summary.id,
        "place": summary.place,
        "problem": summary.problem,
        "status": summary.status,
        "counts": summary.counts and summary.counts.model_dump(mode="json"),
        "usage": summary.usage and summary.usage.model_dump(mode="json"),
        "shards": {"done": summary.shards_done, "total": summary.shards_total},
        "eta": summary.eta and summary.eta.isoformat(),
        "job": summary.job and summary.job.model_dump(mode="json"),
        "manifest": summary.manifest and summary.manifest.model_dump(mode="json"),
        "results_removed_at": summary.results_removed_at and summary.results_removed_at.isoformat(),
    }
