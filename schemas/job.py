"""A job's papers: what was asked for, how it was cut, how it ended. Each is an object in the store, written once.

All carry `version`; a reader that meets a later one must refuse it rather than guess. Within a version fields may be
added: who doesn't know them refuses an order (`Paper`), and reads over them in a report (`Report`).
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from schemas.limits import Limits, PlanSettings
from schemas.names import Id, Traceparent
from schemas.selection import RowSelection

Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class Paper(BaseModel):
    """Base of what is stored as JSON. A field that isn't known is refused: it may say how to read the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=2, exclude_none=True).encode() + b"\n"


class Report(Paper):
    """Base of papers that say what was done, and order nothing. A later version may say more: it is left out by who
    doesn't know it, and what that one knows means what it always did."""

    model_config = ConfigDict(extra="ignore")


class Tier(StrEnum):
    """How urgent: the streaming lane, with a deadline, or whenever there is room."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"


class OnInvalid(StrEnum):
    """What an invalid line does: fail by itself, or stop the job before anything is computed."""

    ROW = "row"
    JOB = "job"


class InputFormat(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"


class FileStamp(Paper):
    """Changes whenever a file's bytes do, and sometimes when they don't. Times in nanoseconds since 1970; `ctime` is
    the system's own, which no program sets back."""

    mtime: int
    ctime: int
    inode: Count


class InputFile(Paper):
    """One file of an input. `size` in bytes; `sha256` where it was computed.

    `stamp` is what the file system said of the file when it was hashed: a file that still has it is not read again.
    `version` (where the bucket keeps versions) and `etag` fix an object in S3, which is not hashed: no other state of
    it is ever read.
    """

    uri: str
    size: Count
    sha256: Sha256 | None = None
    stamp: FileStamp | None = None
    version: Annotated[str, Field(min_length=1)] | None = None
    etag: Annotated[str, Field(min_length=1)] | None = None


class InputRef(Paper):
    """What a job reads: the uri as given, and the files behind it in reading order (one, unless it is a folder)."""

    uri: str
    format: InputFormat
    files: Annotated[tuple[InputFile, ...], Field(min_length=1)]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class ModelPin(Paper):
    """The very weights a job runs on. A worker that can't give exactly this refuses the shard.

    Attributes:
        name: what requests call it (`body.model`).
        source: folder, GGUF file or hub name it is loaded from.
        digest: of the weight files, "sha256:…".
        revision: of a hub repository.
        quantization: of the weights at load; "none": as they are stored, "int8" quantizes activations too.
        kv_dtype: of the KV cache; "auto" is the dtype's.
    """

    name: str
    source: str
    digest: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"]
    quantization: Literal["none", "dense", "int8", "int8-weight-only", "int4", "fp8"] = "none"
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"

    @property
    def key(self) -> str:
        """The same for all who compute the same: short, of letters and digits."""
        weights = self.digest or f"{self.name}\0{self.source}\0{self.revision}"
        facts = "\0".join((weights, self.dtype, self.quantization, self.kv_dtype))
        return sha256(facts.encode()).hexdigest()[:16]


class CatalogEntry(Paper):
    """A model that jobs can be submitted for.

    Attributes:
        pin: what they are pinned to.
        max_model_len: tokens of prompt and answer together.
        policies: the fingerprint of the content policies that judge its prompts and answers; None: there are none. No
            part of the pin: another policy doesn't strand the jobs that are open.
        published_at: since when it is served like this; None: it was written down before this was.
    """

    version: Literal[1] = 1
    pin: ModelPin
    max_model_len: Annotated[int, Field(ge=1)]
    policies: Annotated[str, Field(max_length=64)] | None = None
    published_at: AwareDatetime | None = None

    def same(self, other: CatalogEntry) -> bool:
        """Whether both describe the same, whenever they were published."""
        return self == other.model_copy(update={"published_at": self.published_at})


class JobSettings(Paper):
    """Everything that changes a job's answers or its plan; frozen at submission, so that planning twice is the same.

    Attributes:
        seed: of sampled requests that bring none; the draw of each row is keyed by it and the row.
        on_invalid: what an invalid line does.
        limit: read only so many rows of the input.
        rows: answer these only, under the index that they have in the input; None: all.
        default_max_tokens: for requests without max_tokens (or what is left of the context, if less).
        max_output_tokens: a request that asks for more is refused.
        url: of all requests; one that names another is invalid. None: each says its own.
        content_policies: the fingerprint of those that the order itself names, as `run` does; None: it names none. In a
            root they are the workers' matter.
    """

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    on_invalid: OnInvalid = OnInvalid.ROW
    limit: Annotated[int, Field(ge=1)] | None = None
    rows: RowSelection | None = None
    default_max_tokens: Annotated[int, Field(ge=1)] = 4_096
    max_output_tokens: Annotated[int, Field(ge=1)] = 131_072
    url: Annotated[str, Field(max_length=256)] | None = None
    content_policies: Annotated[str, Field(max_length=64)] | None = None
    limits: Limits = Limits()
    plan: PlanSettings = PlanSettings()


class Job(Paper):
    """`jobs/ID/job.json`: the order, as accepted.

    Attributes:
        deadline: rows that have no answer by then expire.
        max_cost: what it may cost; no shard is begun that would pass that. None: no limit.
        refuse_late: if it can't be done by then, as it looks before it is planned, nothing of it is done.
        output_expires_after: how long the results are kept after the end; None: as the installation says.
        traceparent: what the job belongs to, where its door traces; no part of the order.
    """

    version: Literal[1] = 1
    id: Id
    tenant: Annotated[str, Field(min_length=1, max_length=256)] = "default"
    tier: Tier = Tier.STANDARD
    input: InputRef
    models: Annotated[tuple[ModelPin, ...], Field(min_length=1)]
    settings: JobSettings = JobSettings()
    created_at: AwareDatetime
    deadline: AwareDatetime | None = None
    max_cost: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    refuse_late: bool = False
    output_expires_after: timedelta | None = None
    retry_of: str | None = None
    traceparent: Traceparent | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_pin_per_name(self) -> Job:
        names = [model.name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"models are pinned twice: {names}")
        return self

    def model_named(self, name: str) -> ModelPin | None:
        """The pin that requests with this `model` run on."""
        return next((model for model in self.models if model.name == name), None)


class ShardRef(Paper):
    """A shard that was written. Its number is its part's number.

    Attributes:
        key: the object, relative to the job.
        rows: results it will give.  computed_rows: requests it computes (the others are copies).
        prompt_tokens, expected_tokens: estimates for the computed rows.
    """

    number: Annotated[int, Field(ge=1)]
    key: str
    sha256: Sha256
    size: Count
    rows: Annotated[int, Field(ge=1)]
    computed_rows: Annotated[int, Field(ge=1)]
    model: str
    prompt_tokens: Count
    expected_tokens: Count


class RejectsRef(Paper):
    """The part of a segment's refused rows, as the planner stored it: anybody can make the part by copying it.

    Attributes:
        number: of the part; 0 in the first segment, which has such a part even if it is empty.
        key: the object, relative to the job.
    """

    number: Count
    key: str
    sha256: Sha256
    size: Count
    rows: Count


class PlanSegment(Paper):
    """`plan/NNNNN.json`: decides whose shards count for the input rows `first_row` up to, not including, `end_row`.

    Attributes:
        job: the id of the job that it is of.
        attempt: the planner's, under whose name the shards lie.
        blank_lines: lines without anything, skipped: they have a row index but no result.
        unselected: lines that the job leaves out.
        rejected: rows refused in planning.  rejects: their results; None when a segment behind the first has none.
        unique: requests that are computed.
        prefix_groups: groups of requests that share a prefix worth keeping.
        shared_prefix_tokens: estimated, of computed requests: prompt tokens that an earlier one shares.
        max_tokens: the most that the computed requests may generate.
        certain_tokens: of the longest answer that nothing can end before.
        sequences: of the computed requests, one for each choice.
        tokens_per_byte: what the first segment's planner learnt from a sample of its prompts; later segments are
            estimated with it, whoever plans them.
        last: no further segment follows.
    """

    version: Literal[1] = 1
    job: str
    index: Count
    attempt: str
    first_row: Count
    end_row: Count
    blank_lines: Count = 0
    unselected: Count = 0
    rejected: Count
    rejects: RejectsRef | None = None
    unique: Count
    prefix_groups: Count = 0
    shared_prefix_tokens: Count = 0
    max_tokens: Count = 0
    certain_tokens: Count = 0
    sequences: Count = 0
    tokens_per_byte: Annotated[float, Field(gt=0)] | None = None
    shards: tuple[ShardRef, ...]
    last: bool

    @model_validator(mode="after")
    def _adds_up(self) -> PlanSegment:
        planned = sum(shard.rows for shard in self.shards)
        if planned + self.rejected != self.total:
            raise ValueError(
                f"segment {self.index} covers {self.end_row - self.first_row} lines, but has {planned} in shards, "
                f"{self.rejected} rejected, {self.blank_lines} blank and {self.unselected} left out"
            )
        if sum(shard.computed_rows for shard in self.shards) != self.unique:
            raise ValueError(f"segment {self.index}: shards compute other than {self.unique} rows")
        if self.rejected != (self.rejects.rows if self.rejects else 0):
            raise ValueError(f"segment {self.index}: the part of its {self.rejected} refused rows is another")
        if self.index == 0 and (self.rejects is None or self.rejects.number != 0):
            raise ValueError("the first segment has no part 0")
        return self

    @property
    def total(self) -> int:
        """Rows that get a result."""
        return self.end_row - self.first_row - self.blank_lines - self.unselected

    @property
    def parts(self) -> dict[int, int]:
        """Rows of each part that the segment leads to, by the part's number."""
        rejects = {} if self.rejects is None else {self.rejects.number: self.rejects.rows}
        return rejects | {shard.number: shard.rows for shard in self.shards}


ClosedBy = Literal["cancel", "expire", "spend"]
"""Its user wanted it, its deadline passed, or it would cost more than it may."""


class Closing(Paper):
    """`closing.json`: why the job ends before its time. The first one written counts.

    Attributes:
        kind: what ends it.
        reason: more about that, for the rows that get no answer.
    """

    version: Literal[1] = 1
    kind: ClosedBy
    at: AwareDatetime
    reason: Annotated[str, Field(max_length=1_000)] | None = None


class Counts(Paper):
    """Rows by status; `pending` have no result yet. They always sum to `total`."""

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


class Usage(Report):
    """Tokens by kind. `cached` prompt tokens were not computed again; `repeated` were computed but not committed."""

    prompt: Count = 0
    cached: Count = 0
    completion: Count = 0
    repeated: Count = 0
    drafted: Count = 0
    accepted: Count = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in Usage.model_fields})


class Worked(Report):
    """What an attempt took of its worker.

    Attributes:
        seconds: of the engine's steps, its share of each: workers compute several shards side by side.
        price_per_hour: of the worker; None: it doesn't say.
    """

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    price_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def cost(self, otherwise: float | None) -> float | None:
        """What that is worth; `otherwise` is the price where the worker doesn't say. None: nobody knows."""
        price = otherwise if self.price_per_hour is None else self.price_per_hour
        if not self.seconds:
            return 0.0
        return None if price is None else self.seconds / 3600 * price


class ModelSpending(Report):
    """What the shards of one model have cost.

    Attributes:
        model: its name.
        busy_seconds: that workers computed for them, repeated work included.
        prompt, completion: tokens of their results, as in `Usage`.
        cost: None: of some of the time nobody knows what it cost.
        cost_per_million_tokens: prompts and answers.  cost_per_million_output_tokens: all of the cost, over answers.
    """

    model: str
    busy_seconds: Annotated[float, Field(ge=0)]
    prompt: Count
    completion: Count
    cost: Annotated[float, Field(ge=0)] | None = None
    cost_per_million_tokens: Annotated[float, Field(ge=0)] | None = None
    cost_per_million_output_tokens: Annotated[float, Field(ge=0)] | None = None


class FileEntry(Report):
    """A file of the results; `path` relative to the job, `size` in bytes."""

    path: str
    rows: Count
    size: Count
    sha256: Sha256


class JobStatus(StrEnum):
    """As OpenAI's batch object has it."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class JobError(Report):
    """Why a job could not run: one line of the input, or the input as a whole (`line` None)."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Manifest(Report):
    """`manifest.json`: the outcome, written once and last.

    Attributes:
        repeated_at_most: `usage.repeated`, and for each death twice the most that an engine was seen to sample between
            two checkpoints.
        wall_seconds: from acceptance to the last part, without the time when no run was at it.
        engine_seconds: from the first step to the last.
        tokens_per_second: output tokens over engine seconds.  total_tokens_per_second: with prompt tokens.
        busy_seconds: that workers computed for it, each by itself: two that worked for a minute make two.
        price_per_hour: what such an hour cost, on the mean.
        cost: of each worker's busy time at its own price; None: of some of it nobody knows the price.
        cost_per_million_tokens: prompts and answers.  spending: the same by model.
        ended_by: of a job that ended before its time, what ended it.
        errors: for a failed job, why.
    """

    version: Literal[1] = 1
    job: str
    status: Literal[JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED]
    counts: Counts
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
