"""Progress of a job on stderr until it has ended. Watching only reads: to stop it changes nothing about the job."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rich.live import Live
from rich.text import Text

from tokenmill import output
from tokenmill.errors import StoppedWatching, UserError
from tokenmill.jobs.backend import POLL_SECONDS, JobEnd, NewJob

if TYPE_CHECKING:
    from pipeline.jobs.summaries import JobSummary
    from pipeline.ledger.ledger import JobLedger
    from schemas.jobs.outcome import Manifest

WAITING: Final = "waits to be taken in"
MAX_ERROR_CHARACTERS: Final = 500
"""Of why a job failed."""

Outcome = TypeVar("Outcome")


def follow(name: str, poll: Callable[[], tuple[str, Outcome | None]], interval_seconds: float) -> Outcome:
    """Print a job's progress until it has ended; its outcome.

    In a terminal it is one line that changes, elsewhere a line whenever something has changed.

    Args:
        poll: a line about the job, and its outcome; None: it has not ended.
        interval_seconds: between two polls.

    Raises:
        StoppedWatching: the user pressed Ctrl-C.
    """
    console, printed = output.stderr(), ""
    try:
        with ExitStack() as closing:
            live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
            if live is not None:
                closing.enter_context(live)
            while True:
                state, outcome = poll()
                if outcome is not None:
                    return outcome
                line = f"{name}: {state}"
                if live is not None:
                    live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)
                elif line != printed:
                    console.print(Text(line))
                printed = line
                time.sleep(interval_seconds)
    except KeyboardInterrupt:
        raise StoppedWatching(f"{name}: no longer watched; the job goes on") from None


def follow_ledger(
    ledger: JobLedger, interval_seconds: float = POLL_SECONDS, *, missing: Callable[[], None] | None = None
) -> Manifest:
    """Print the progress of a job in a folder or root until it has ended; its outcome.

    Args:
        missing: called at each poll while there is no such job yet; raises when there will be none. None: a missing job
            is an error.

    Raises:
        JobNotFound: there is no job.  LedgerError: it can't be read.  StoreError: its store can't be reached.
        StoppedWatching: the user pressed Ctrl-C.
    """
    from pipeline.jobs.summaries import summarize_job
    from pipeline.ledger.ledger import JobNotFound

    def poll() -> tuple[str, Manifest | None]:
        try:
            summary = summarize_job(ledger, exact=False)
        except JobNotFound:
            if missing is None:
                raise
            missing()
            return WAITING, None
        return describe(summary), summary.manifest

    return follow(ledger.name or ledger.location().rstrip("/"), poll, interval_seconds)


def end_of(manifest: Manifest, where: str, batch: Callable[[], Any]) -> JobEnd:
    """The end of a job in a folder or root, with its last line as `run` has it."""
    from schemas.jobs.outcome import JobStatus
    from tokenmill.local.summary import last_line

    failure = None
    if manifest.status is JobStatus.FAILED:
        why = "; ".join(f"line {one.line}: {one.message}" if one.line else one.message for one in manifest.errors)
        why = why[:MAX_ERROR_CHARACTERS] or "its manifest does not say why"
        failure = f"{where}: the job failed as a whole: {why}"
    return JobEnd(batch, last_line(manifest.counts, where), failure)


def print_new_job(made: NewJob, *, watch: bool, as_json: bool) -> None:
    """Print the id of a new job at once, and its end if it is watched. Raises `UserError` for one that failed."""
    if not as_json:
        print(made.job, flush=True)
    elif not watch:
        output.print_json(made.document)
    for note in made.notes:
        output.say(note)
    if watch:
        print_end(made.follow(), as_json=as_json)


def print_end(end: JobEnd, *, as_json: bool) -> None:
    """Print how a job ended. Raises `UserError` for one that failed as a whole."""
    if as_json:
        output.print_json(end.batch())
    if end.failure is not None:
        raise UserError(end.failure)
    if end.table is not None:
        output.stderr().print(end.table)
    output.say(end.line)


def describe(summary: JobSummary, now: datetime | None = None) -> str:
    """A job's state, in a line without its name."""
    words = [str(summary.status)]
    counts = summary.counts
    if counts is not None and counts.total:
        words.append(f"{output.count(counts.total - counts.pending)} of {output.count(counts.total)} rows done")
        words.append(f"{output.count(counts.failed)} failed")
    if summary.eta is not None:
        left = (summary.eta - (now or datetime.now(UTC))).total_seconds()
        words.append(f"about {output.duration(left)} left" if left > 0 else "should be done now")
    return ", ".join(words)
