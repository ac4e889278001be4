"""The planner's two neighbours: where rows come from, and where the plan goes. Both are narrow on purpose, so that
the planner itself is a pure function of the input and the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import pyarrow as pa

from pipeline.planner.sizes import SegmentSizes
from pipeline.ports import PipelineError
from schemas.jobs.outcome import JobError
from schemas.jobs.plan import PlanSegment
from schemas.requests.errors import RowError

TokenCounter = Callable[[str], int]
"""Tokens of a text, by the job's tokenizer."""


class InputError(PipelineError):
    """Raised when an input as a whole can't be read: the job can't run."""


class BrokenInput(InputError):
    """Raised when the bytes of an input can't be decoded or are refused: reading it again gives the same error."""


class TooManyRows(BrokenInput):
    """Raised when an input has more rows than a job may have (`Limits.max_rows`).

    Args:
        where: the first place that is beyond.
    """

    def __init__(self, where: str, max_rows: int) -> None:
        super().__init__(
            f"{where}: the input has more than {max_rows:,} rows; split it into several jobs (limits.max_rows)"
        )


class InvalidInput(InputError):
    """Raised when invalid lines stop a job (`on_invalid` "job"); nothing was committed.

    Attributes:
        errors: the first of them, in line order.  count: how many there are.
    """

    def __init__(self, errors: tuple[JobError, ...], count: int) -> None:
        first = errors[0]
        lines = "1 line is" if count == 1 else f"{count} lines are"
        super().__init__(f"{lines} invalid; the first is line {first.line}: {first.message}")
        self.errors = errors
        self.count = count


class PlanMismatch(PipelineError):
    """Raised when a segment that stands covers other lines than this plan's would: it is from another input."""

    def __init__(self, standing: PlanSegment, due: str) -> None:
        covers = f"{standing.first_row} to {standing.end_row}" + (", the last ones" if standing.last else "")
        super().__init__(
            f"segment {standing.index} of the plan has rows {covers}, but rows {due} are due: it is of another plan; "
            "start anew with --fresh"
        )


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the input: its name for messages, and how to open it as a stream of bytes (seekable for Parquet)."""

    name: str
    open: Callable[[], BinaryIO]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One line of the input, parsed.

    Attributes:
        row: index in the input, from 0; blank lines count.  line: the same as people count, from 1, in its file.
        value: the parsed JSON, or the error that kept it from being parsed.
    """

    row: int
    line: int
    value: object | RowError


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """Consecutive lines. Covers input rows `first_row` up to, not including, `end_row`; never crosses a segment.

    Attributes:
        rows: the lines that are not blank, in order.
        carried: the columns carried through to the results, aligned with `rows`; None: the input has none.
        name: the file the lines are from; empty when the input is one file.
    """

    first_row: int
    end_row: int
    rows: list[SourceRow]
    carried: pa.Table | None = None
    name: str = ""


class RowSource(Protocol):
    """An input that can be read from the start any number of times, with the same batches each time."""

    @property
    def carried(self) -> pa.Schema | None:
        """Columns carried through to the results, under their input names."""
        ...

    def batches(self, sizes: SegmentSizes) -> Iterator[SourceBatch]:
        """The lines in order; a batch ends wherever a segment does."""
        ...


@dataclass(frozen=True, slots=True)
class StoredShard:
    """Where a shard was put: key relative to the job, sha256 in hex, size in bytes."""

    key: str
    sha256: str
    size: int


class PlanSink(Protocol):
    """Where a plan goes. Calls come in input order, segment by segment. Segments of other jobs are refused."""

    def existing_segment(self, index: int) -> PlanSegment | None:
        """The segment, if an earlier planner committed it; it is then not planned again."""
        ...

    def write_shard(self, number: int, table: pa.Table) -> StoredShard:
        """Store a shard under this planner's attempt; `table` has `schemas.tables.shard_schema(carried)`, rows in the
        order they should start. Binding only once its segment is committed."""
        ...

    def write_rejected(self, table: pa.Table) -> None:
        """Append rows that the open segment refuses; `table` has `schemas.tables.result_schema(carried)`, sorted by
        row."""
        ...

    def store_rejects(self, number: int) -> StoredShard:
        """Store what was refused since the last call as it will be part `number`. Binding only once its segment is
        committed."""
        ...

    def commit_segment(self, segment: PlanSegment) -> PlanSegment:
        """Create the segment if absent; returns the one that stands (another planner's, when the race was lost). Its
        refused rows are a part from then on, and its shards may be worked on."""
        ...


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a planned job amounts to.

    Attributes:
        segments: those that stand; the last of them says whether the plan is whole.
        total: rows that get a result.  rejected: of them, refused in planning.  unique: requests to compute.
        blank_lines: lines without anything.
        prompt_tokens, expected_tokens: estimates for the computed requests; `max_tokens` is the most they may generate.
        shared_prefix_tokens: estimated prompt tokens that need no computing again.
    """

    segments: tuple[PlanSegment, ...]
    total: int
    rejected: int
    unique: int
    blank_lines: int
    prompt_tokens: int
    shared_prefix_tokens: int
    expected_tokens: int
    max_tokens: int
