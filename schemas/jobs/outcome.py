"""The outcome of a job: counts, usage and cost."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from schemas.jobs.job import ClosedBy
from schemas.models import ModelPin
from schemas.stored import Count, Sha256, StoredModel, StoredReport


class Counts(StoredModel):
    """Numbers of rows by status; `pending` have no result yet. They always sum to `total`."""

    total: Count = 0
    succeeded: Count = 0
    failed: Count = 0
    expired: Count = 0
    cancelled: Count = 0
    pending: Count = 0

    @model_validator(mode="after")
    def _adds_up(self) -> Counts:
        parts = self.succeeded + self.failed + self.expired + self.cancelled + self.pending
        if parts != self.total:
            raise ValueError(f"counts sum to {parts}, but total is {self.total}")
        return self


class Usage(StoredReport):
    """Tokens by kind. `cached` prompt tokens were not computed again; `repeated` were computed but not committed."""

    prompt: Count = 0
    cached: Count = 0
    completion: Count = 0
    repeated: Count = 0
    drafted: Count = 0
    accepted: Count = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in Usage.model_fields})


class WorkerTime(StoredReport):
    """The worker time of an attempt.

    Attributes:
        seconds: its share of the engine's steps, in which workers compute several shards concurrently.
        price_per_hour: of the worker; None: it reports none.
    """

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    price_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def cost(self, otherwise: float | None) -> float | None:
        """The cost; `otherwise` is the price where the worker reports none. None: unknown."""
        price = otherwise if self.price_per_hour is None else self.price_per_hour
        if not self.seconds:
            return 0.0
        return None if price is None else self.seconds / 3600 * price


class ModelSpending(StoredReport):
    """The cost of one model's shards.

    Attributes:
        model: its name.
        busy_seconds: worker time spent on them, repeated work included.
        prompt, completion: tokens of their results, as in `Usage`.
        cost: None: the price of some of the time is unknown.
        cost_per_million_tokens: prompts and answers.  cost_per_million_output_tokens: all of the cost, over answers.
    """

    model: str
    busy_seconds: Annotated[float, Field(ge=0)]
    prompt: Count
    completion: Count
    cost: Annotated[float, Field(ge=0)] | None = None
    cost_per_million_tokens: Annotated[float, Field(ge=0)] | None = None
    cost_per_million_output_tokens: Annotated[float, Field(ge=0)] | None = None


class FileEntry(StoredReport):
    """A file of the results; `path` relative to the job, `size` in bytes."""

    path: str
    rows: Count
    size: Count
    sha256: Sha256


class JobStatus(StrEnum):
    """The statuses of OpenAI's batch object."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the status is final."""
        return self in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED)


class JobError(StoredReport):
    """Why a job could not run: one line of the input, or the input as a whole (`line` None)."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Manifest(StoredReport):
    """`manifest.json`: the outcome, written once and last.

    Attributes:
        reused: rows that took the answer of a former job: no tokens of theirs are in `usage`.
        repeated_at_most: `usage.repeated`, plus for each crash twice the largest number of tokens that an engine was
            observed to sample between two checkpoints.
        wall_seconds: from acceptance to the last part, without the time when no run was active.
        engine_seconds: from the first step to the last.
        tokens_per_second: output tokens over engine seconds.  total_tokens_per_second: with prompt tokens.
        busy_seconds: worker time, summed over workers: two that computed for a minute make two minutes.
        price_per_hour: the mean price of such an hour.
        cost: of each worker's busy time at its own price; None: the price of some of it is unknown.
        cost_per_million_tokens: prompts and answers.  spending: the same by model.
        ended_by: the cause of an early end.
        errors: the causes of a failure.
    """

    version: Literal[1] = 1
    job: str
    status: Literal[JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED]
    counts: Counts
    reused: Count = 0
    usage: Usage = Usage()
    repeated_at_most: Count = 0
    created_at: AwareDatetime
    finished_at: AwareDatetime
    wall_seconds: Annotated[float, Field(ge=0)]
    engine_seconds: Annotated[float, Field(ge=0)] = 0.0
    tokens_per_second: Annotated[float, Field(ge=0)] | None = None
    total_tokens_per_second: Annotated[float, Field(ge=0)] | None = None
    busy_seconds: Annotated[float, Field(ge=0)] = 0.0
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    cost: Annotated[float, Field(ge=0)] | None = None
    cost_per_million_tokens: Annotated[float, Field(ge=0)] | None = None
    spending: tuple[ModelSpending, ...] = ()
    files: tuple[FileEntry, ...] = ()
    models: tuple[ModelPin, ...] = ()
    engine: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    ended_by: ClosedBy | None = None
    errors: tuple[JobError, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Manifest:
        if self.status != JobStatus.FAILED:
            if self.counts.pending:
                raise ValueError(f"{self.counts.pending} rows have no result yet")
            if self.files and sum(file.rows for file in self.files) != self.counts.total:
                raise ValueError(f"files do not hold the job's {self.counts.total} rows")
        return self
