"""Jobs whose ledger can be opened: in a folder of their own, or in the root of an installation.

`tokenmill.jobs.job_location` decides which of them a command means.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pipeline.adapters.folder.store import FolderStore
from pipeline.gateway.batches.serialization import serialize_batch
from pipeline.ingest.intake import Intake
from pipeline.jobs.summaries import JobSummary, summarize_job
from pipeline.ledger.ledger import JOB, JOBS, RESULTS, JobLedger
from schemas.jobs.batch import Batch
from schemas.jobs.job import Job, Tier
from schemas.jobs.outcome import JobStatus, Manifest
from schemas.jobs.results import RowStatus
from tokenmill import output
from tokenmill.config.job_options import check_cap
from tokenmill.errors import InputUnusable, UserError
from tokenmill.jobs.backend import (
    POLL_SECONDS,
    CancelResult,
    ExportRequest,
    ExportResult,
    ExportSource,
    JobEnd,
    JobList,
    JobView,
    NewJob,
    RetryRequest,
)
from tokenmill.jobs.listing import ListedJob, jobs_below, jobs_in
from tokenmill.jobs.watch import end_of, follow_ledger
from tokenmill.local.summary import last_line, summary_table
from tokenmill.root import intake_settings, open_root

if TYPE_CHECKING:
    from pipeline.jobs.retry import Retry
    from pipeline.ports import ObjectStore
    from schemas.settings.settings import Settings
    from tokenmill.jobs.cancel import Cancelled


class _LedgerJobs(ABC):
    """What a folder and a root have in common.

    Attributes:
        name: of the job, in messages.  location: the folder, or the root's URL.
    """

    name: str
    location: str

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @abstractmethod
    def open_ledger(self) -> AbstractContextManager[JobLedger]:
        """The job, read-only. Raises `InputUnusable` when the root holds no such job, or `StoreError`."""

    @abstractmethod
    def results_folder(self) -> Path | None:
        """The folder that holds the job's parts; None: it is in a bucket."""

    @abstractmethod
    def _cancel(self) -> tuple[Cancelled, str]:
        """The outcome, and where the job lies."""

    @abstractmethod
    def _cancelling(self) -> str:
        """The message while a cancelled job has not ended."""

    @abstractmethod
    def _found(self, limit: int, *, active: bool, as_json: bool) -> tuple[str, list[ListedJob]]:
        """The listed folder or root, and its jobs."""

    exact = True
    """Whether `show` reads the footers of all parts."""

    def list_jobs(self, limit: int, *, active: bool, as_json: bool) -> JobList:
        where, found = self._found(limit, active=active, as_json=as_json)
        rows = []
        for job in found:
            summary = job.summary
            counts = summary.counts
            numbers = ["-"] * 3
            if counts is not None:
                numbers = [output.count(n) for n in (counts.total, counts.total - counts.pending, counts.failed)]
            due = summary.eta and summary.eta.isoformat(timespec="seconds")
            rows.append((job.location, summary.id, summary.status or summary.problem, *numbers, due))
        return JobList(
            [job.batch for job in found if job.batch is not None],
            ("location", "job", "status", "rows", "done", "failed", "should be done"),
            rows,
            f"no open jobs in {where}" if active else f"no jobs in {where}; 'tokenmill run' makes one",
        )

    def show(self) -> JobView:
        from pipeline.results.verification import ResultsDamaged, check_files

        with self.open_ledger() as ledger:
            summary, damage = summarize_job(ledger, exact=self.exact), None
            batch = serialize_batch(ledger, summary)
            try:
                if summary.manifest is not None:
                    check_files(ledger, summary.manifest)
            except ResultsDamaged as error:
                damage = error
        tables, errors = [output.table(None, ("", ""), _facts(summary))], []
        if summary.manifest is not None:
            tables.append(summary_table(summary.manifest))
            errors = [f"line {wrong.line}: {wrong.code}: {wrong.message}" for wrong in summary.manifest.errors]
        return JobView(batch, tables, errors, damage)

    def watch(self, interval_seconds: float = POLL_SECONDS) -> JobEnd:
        with self.open_ledger() as ledger:
            return end_of(follow_ledger(ledger, interval_seconds), ledger.location(), self._batch)

    def _batch(self) -> Batch:
        with self.open_ledger() as ledger:
            return serialize_batch(ledger)

    def cancel(self) -> CancelResult:
        done, where = self._cancel()
        manifest = done.manifest
        if manifest is None:
            lines = [f"{self.name}: cancelled, but {self._cancelling()}; 'tokenmill jobs watch' shows when"]
            return CancelResult(self._batch(), lines)
        if manifest.status is not JobStatus.CANCELLED:
            when = "has ended already" if done.before else "ended before it could be cancelled"
            raise UserError(f"{self.name}: the job {when} ({manifest.status}), so there is nothing to cancel")
        lines = [f"{self.name}: this job was cancelled before"] if done.before else []
        return CancelResult(self._batch(), [*lines, last_line(manifest.counts, where)])

    def export(self, request: ExportRequest) -> ExportResult:
        from pipeline.results.export import export

        jobs: list[ExportSource] = [self, *request.retries]
        for job in jobs:
            results = job.results_folder()
            for file in (request.to, request.errors_to):
                if results is not None and file is not None and file.resolve().is_relative_to(results):
                    raise UserError(
                        f"{file}: lies among the job's results, which programs read as one; name another file"
                    )
        with ExitStack() as stack:
            first, *others = [stack.enter_context(job.open_ledger()) for job in jobs]
            done = export(
                first, request.to, errors_to=request.errors_to, in_input_order=request.in_input_order, retries=others
            )
        return ExportResult(done.succeeded, done.others)

    def verify(self) -> tuple[Manifest, str, int]:
        """Compare an ended job's result files with its manifest; returns that, the job's location and a file count.

        Raises:
            UserError: the job has not ended.  ResultsDamaged: a file is missing or is another.
        """
        from pipeline.results.verification import check_files

        with self.open_ledger() as ledger:
            manifest = ledger.manifest()
            if manifest is None:
                raise UserError(
                    f"{ledger.location()}: the job has not ended, and has no manifest yet; wait for its end"
                )
            return manifest, ledger.location(), check_files(ledger, manifest, hashes=True)


class FolderJobs(_LedgerJobs):
    """A job in a folder of its own, or a folder of such folders."""

    def __init__(self, given: str, folder: Path, settings: Settings) -> None:
        super().__init__(settings)
        self.name, self.location, self.folder = given, str(folder), folder

    @contextmanager
    def open_ledger(self) -> Iterator[JobLedger]:
        with FolderStore(self.folder, read_only=True) as store:
            yield JobLedger(store)

    def results_folder(self) -> Path:
        return (self.folder / RESULTS).resolve()

    def retry(self, request: RetryRequest) -> NewJob:
        raise typer.BadParameter("a folder's job is tried again in a folder; name it", param_hint="--output")

    def _cancel(self) -> tuple[Cancelled, str]:
        from tokenmill.jobs.cancel import cancel_job

        return cancel_job(self.folder, self._settings.price_per_hour), self.location

    def _cancelling(self) -> str:
        return "the run at this job has not ended it yet"

    def _found(self, limit: int, *, active: bool, as_json: bool) -> tuple[str, list[ListedJob]]:
        return self.location, jobs_below(self.folder, limit, active=active, as_json=as_json)


class RootJobs(_LedgerJobs):
    """A job with an id in the root of an installation, or all of the root's jobs."""

    exact = False  # A dispatcher keeps the cached progress fresh; an exact count might read thousands of objects.

    def __init__(self, root_url: str, job: str, settings: Settings) -> None:
        super().__init__(settings)
        self.name, self.location = job, root_url

    @contextmanager
    def open_ledger(self) -> Iterator[JobLedger]:
        with open_root(self.location, self._settings, read_only=True) as root:
            ledger = root.ledger(self.name)
            if root.world.store.info(ledger.prefix + JOB) is None:
                raise InputUnusable(
                    f"{root.url}: holds no job {self.name}; 'tokenmill jobs list --root {root.url}' shows those that "
                    "it has"
                )
            yield ledger

    def results_folder(self) -> Path | None:
        if "://" in self.location:
            return None
        return (Path(self.location).expanduser() / JOBS / self.name / RESULTS).resolve()

    def retry(self, request: RetryRequest) -> NewJob:
        from pipeline.jobs.retry import RETRIED, NothingToRetry, RetryOverrides, choose_rows, submit_retry

        request.refuse_local_option(self.name, self.location)
        statuses = RETRIED if request.only is None else frozenset(RowStatus(status) for status in request.only)
        with self.open_ledger() as ledger:
            first = choose_rows(ledger, statuses, include_invalid=request.include_invalid)
            ended = ledger.manifest()
            _say_missing_models(first.job, ledger.store)
        if ended is None:
            raise NothingToRetry(f"{self.name}: the job has not ended")
        tier = None if request.tier is None else Tier(request.tier)
        if request.max_output_tokens is not None:
            chosen = tier or first.job.tier
            check_cap(request.max_output_tokens, self._settings.max_output_tokens.of(chosen), chosen)
        overrides = RetryOverrides(tier, request.deadline, request.max_output_tokens, request.max_cost)
        with open_root(self.location, self._settings) as root:
            intake = Intake(root.world, intake_settings(self._settings))
            made = submit_retry(first, ended, overrides, root.world, partial(intake.expect, first.job.tenant))
            batch = serialize_batch(root.ledger(made.job.id))
        found = [f"{made.job.id}: was made before by the same command; a retry of it tries what it left"]
        notes = retry_notes(first) if made.created else found
        return NewJob(made.job.id, batch, notes, RootJobs(self.location, made.job.id, self._settings).watch)

    def _cancel(self) -> tuple[Cancelled, str]:
        from tokenmill.jobs.cancel import cancel_in_root

        with self.open_ledger() as ledger:  # before anything is written, even where a root is probed
            where = ledger.location().rstrip("/")
            ledger.job()
        with open_root(self.location, self._settings) as root:
            return cancel_in_root(root, self.name), where

    def _cancelling(self) -> str:
        return "no dispatcher has ended it yet (does one run?)"

    def _found(self, limit: int, *, active: bool, as_json: bool) -> tuple[str, list[ListedJob]]:
        with open_root(self.location, self._settings, read_only=True) as root:
            return root.url, jobs_in(root.world.store, root.url, limit, active=active, as_json=as_json)


def retry_notes(first: Retry) -> Sequence[str]:
    """Which rows are tried again, and which aren't."""
    rows = "all rows" if first.count is None else f"{output.count(first.count)} rows"
    notes = [f"trying {rows} of {first.job.id} again"]
    if first.left_out:
        why = ", ".join(f"{output.count(count)} {code}" for code, count in sorted(first.left_out.items()))
        notes.append(f"left out, since they would be refused again: {why}; --include-invalid tries them all the same")
    return notes


def _say_missing_models(job: Job, store: ObjectStore) -> None:
    """A retry needs the same models as its first job; its rows wait for a worker that serves them."""
    from pipeline.models.catalog import Catalog

    served = {entry.pin.key for entry in Catalog(store).entries()}
    for pin in job.models:
        if pin.key not in served:
            output.say(f"no worker offers {pin.name} as it answered in {job.id}: the rows wait until one does")


def _facts(summary: JobSummary) -> list[tuple[str, object]]:
    """A summary for people: names and values."""
    found: list[tuple[str, object]] = [("job", summary.id), ("status", summary.status), ("location", summary.location)]
    if summary.attention is not None:
        found.append(("needs attention", summary.attention))
    if summary.job is not None:
        found += [
            ("input", summary.job.input.uri),
            ("model", ", ".join(f"{pin.name} ({output.arithmetic(pin)})" for pin in summary.job.models)),
            ("tier", summary.job.tier),
            ("created", summary.job.created_at.isoformat(timespec="seconds")),
        ]
        if summary.job.deadline is not None:
            found.append(("deadline", summary.job.deadline.isoformat(timespec="seconds")))
        if summary.job.max_cost is not None:
            found.append(("cost limit", f"{summary.job.max_cost:g}"))
        if summary.job.retry_of is not None:
            found.append(("retry of", summary.job.retry_of))
    if summary.results_removed_at is not None:
        found.append(("results", f"removed at {summary.results_removed_at.isoformat(timespec='seconds')}"))
    if summary.manifest is None and summary.counts is not None:
        counts = summary.counts
        found += [
            ("rows", f"{output.count(counts.total - counts.pending)} of {output.count(counts.total)} done"),
            ("failed", output.count(counts.failed)),
            ("shards", f"{summary.shards_done} of {summary.shards_total} done"),
        ]
        if summary.as_of is not None:
            found.append(("as of", summary.as_of.isoformat(timespec="seconds")))
        if summary.cost is not None:
            found.append(("cost", f"{summary.cost:.4f}"))
    if summary.eta is not None:
        found.append(("should be done", summary.eta.isoformat(timespec="seconds")))
    return found
