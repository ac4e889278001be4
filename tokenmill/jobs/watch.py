"""Telling on stderr how a job stands until it has ended, wherever it lies and whoever works at it.

Only looks: to stop watching changes nothing about the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from rich.live import Live
from rich.text import Text

from tokenmill import output
from tokenmill.errors import StoppedWatching, UserError

if TYPE_CHECKING:
    from pipeline.jobs.summaries import JobSummary
    from pipeline.ledger.ledger import JobLedger
    from schemas.jobs.outcome import Manifest

LOOK_SECONDS: Final = 2.0
WAITING: Final = "waits to be taken in"
MOST_ERRORS: Final = 500
"""Characters of why a job failed."""


def watch(ledger: JobLedger, *, every: float = LOOK_SECONDS, missing: Callable[[], None] | None = None) -> Manifest:
    """Tell how the job stands until it has ended; its outcome.

    In a terminal it is one line that changes, elsewhere a line whenever something has changed.

    Args:
        every: seconds between two looks.
        missing: asked at each look while there is no such job yet; raises when there will be none. None: a job that
            isn't there is an error.

    Raises:
        JobNotFound: there is no job.  LedgerError: it can't be read.  StoreError: its store can't be reached.
        StoppedWatching: the user pressed Ctrl-C.
    """
    try:
        return _watch(ledger, every, missing)
    except KeyboardInterrupt:
        raise StoppedWatching(f"{_name(ledger)}: no longer watched; the job goes on") from None


def tell_end(manifest: Manifest, place: str) -> None:
    """The last line of a job that has ended, as `run` has it. Raises `UserError` for one that failed as a whole."""
    from schemas.jobs.outcome import JobStatus
    from tokenmill.local.summary import last_line

    if manifest.status is JobStatus.FAILED:
        why = "; ".join(f"line {one.line}: {one.message}" if one.line else one.message for one in manifest.errors)
        raise UserError(f"{place}: the job failed as a whole: {why[:MOST_ERRORS] or 'its manifest does not say why'}")
    output.stderr().print(last_line(manifest.counts, place), markup=False)


def describe(summary: JobSummary, now: datetime | None = None) -> str:
    """How a job stands, in a line without its name."""
    words = [str(summary.status)]
    counts = summary.counts
    if counts is not None and counts.total:
        words.append(f"{output.count(counts.total - counts.pending)} of {output.count(counts.total)} rows done")
        words.append(f"{output.count(counts.failed)} failed")
    if summary.eta is not None:
        left = (summary.eta - (now or datetime.now(UTC))).total_seconds()
        words.append(f"about {output.duration(left)} left" if left > 0 else "should be done now")
    return ", ".join(words)


def _watch(ledger: JobLedger, every: float, missing: Callable[[], None] | None) -> Manifest:
    console = output.stderr()
    told = ""
    with ExitStack() as closing:
        live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        if live is not None:
            closing.enter_context(live)
        while True:
            summary = _look(ledger, missing)
            if summary is not None and summary.manifest is not None:
                return summary.manifest
            line = f"{_name(ledger)}: {WAITING if summary is None else describe(summary)}"
            if live is not None:
                live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)
            elif line != told:
                console.print(Text(line))
            told = line
            time.sleep(every)


def _name(ledger: JobLedger) -> str:
    return ledger.name or ledger.place().rstrip("/")


def _look(ledger: JobLedger, missing: Callable[[], None] | None) -> JobSummary | None:
    from pipeline.jobs.summaries import summarize_job
    from pipeline.ledger.ledger import JobNotFound

    try:
        return summarize_job(ledger, exact=False)
    except JobNotFound:
        if missing is None:
            raise
        missing()
        return None
