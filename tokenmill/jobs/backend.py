"""The `jobs` commands' port: a job in a folder of its own, in the root of an installation, or behind a gateway.

An implementation is bound to one job, or to a location whose jobs are listed; see `tokenmill.jobs.job_location`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.errors import UserError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.table import Table

    from pipeline.ledger.ledger import JobLedger

JsonBatch = Any
"""A job as JSON: OpenAI's batch object (`schemas.jobs.batch`): the model, or what a gateway has sent."""

POLL_SECONDS = 2.0
"""Between two requests for the state of a job that is watched."""


@dataclass(frozen=True, slots=True)
class JobList:
    """The newest jobs.

    Attributes:
        batches: for JSON; empty unless they were requested.
        columns, rows: for people; the three columns of numbers begin with the fourth.
        empty: the message where there is none.
    """

    batches: Sequence[JsonBatch]
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    empty: str


@dataclass(frozen=True, slots=True)
class JobView:
    """One job.

    Attributes:
        batch: for JSON.  tables, errors: for people.
        damage: raised after it is shown: files of its results are missing or cut.
    """

    batch: JsonBatch
    tables: Sequence[Table]
    errors: Sequence[str]
    damage: Exception | None = None


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended.

    Attributes:
        batch: reads the JSON.  line: how it ended, for people.
        failure: why it failed as a whole; None: it did not.  table: its counts.
    """

    batch: Callable[[], JsonBatch]
    line: str
    failure: str | None = None
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job that a command made.

    Attributes:
        document: for JSON.  notes: for people.  follow: reports its progress until it has ended.
    """

    job: str
    document: Any
    notes: Sequence[str]
    follow: Callable[[], JobEnd]


@dataclass(frozen=True, slots=True)
class CancelResult:
    """The outcome of a cancellation: for JSON, and for people."""

    batch: JsonBatch
    lines: Sequence[str]


class ExportSource(Protocol):
    """A job whose results are exported from its ledger."""

    def open_ledger(self) -> AbstractContextManager[JobLedger]: ...

    def results_folder(self) -> Path | None: ...


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The options of an export; `retries` are joined with the job if it is `merged`."""

    to: Path
    errors_to: Path | None
    in_input_order: bool
    merged: bool
    retries: Sequence[ExportSource]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Numbers of exported rows; `note` says what may be missing."""

    succeeded: int
    others: int
    note: str | None = None


@dataclass(frozen=True, slots=True)
class RetryRequest:
    """The options of a retry that workers compute.

    Attributes:
        only: statuses of the rows; None: the default.  tier to max_cost: None: as in the job.
        local_option: a given option that only a retry in a folder has.
    """

    only: Collection[str] | None
    include_invalid: bool
    tier: str | None
    deadline: timedelta | None
    max_output_tokens: int | None
    max_cost: float | None
    local_option: str | None

    def refuse_local_option(self, job: str, where: str) -> None:
        """Raises `UserError` for an option that the workers' own settings decide."""
        if self.local_option is not None:
            raise UserError(
                f"{self.local_option}: {job} is tried again at {where}, by its workers with their models and engines; "
                "leave it out"
            )


class JobsBackend(Protocol):
    """Operations on a job at its location. Each raises `UserError` or `PipelineError`, also if it isn't supported."""

    def list_jobs(self, limit: int, *, active: bool, as_json: bool) -> JobList:
        """The newest `limit` jobs.

        Args:
            active: only those that have not ended; in a root the others aren't read.
            as_json: read the batches, too.
        """
        ...

    def show(self) -> JobView:
        """The job's state or outcome."""
        ...

    def watch(self, interval_seconds: float = POLL_SECONDS) -> JobEnd:
        """Report the job's progress on stderr until it has ended. Raises `StoppedWatching` for Ctrl-C."""
        ...

    def cancel(self) -> CancelResult:
        """End the job before its time."""
        ...

    def retry(self, request: RetryRequest) -> NewJob:
        """Make a job of the rows that got no answer; the same request again returns the same job."""
        ...

    def export(self, request: ExportRequest) -> ExportResult:
        """Write the committed results as JSONL."""
        ...


def is_id(given: str) -> bool:
    """Whether a job can be called so."""
    from pydantic import TypeAdapter, ValidationError

    from schemas.identifiers import Id

    try:
        TypeAdapter[str](Id).validate_python(given, strict=True)
    except ValidationError:
        return False
    return True
