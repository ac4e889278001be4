"""The planner's two interfaces: the source of rows, and the sink of the plan. Both are narrow on purpose, so that the
planner itself is a pure function of the input and the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.planner.segment_sizes import SegmentSizes
from pipeline.ports import PipelineError
from schemas.jobs.outcome import JobError
from schemas.jobs.plan import PlanSegment
from schemas.requests.errors import RowError
from schemas.requests.parsing import Body

if TYPE_CHECKING:
    from pipeline.planner.validate import ValidRow

TokenCounter = Callable[[str], int]
"""Counts the tokens of a text with the job's tokenizer."""


ModelRouting = Callable[[str, Sequence[tuple[Body, int]]], Sequence[str]]
"""Chooses the model of each of these requests to a virtual model: takes its name, and bodies with the estimated tokens
of their longest prompts; returns names of the job's pinned models."""


class InputError(PipelineError):
    """Raised when an input as a whole can't be read: the job can't run."""


class BrokenInput(InputError):
    """Raised when the bytes of an input can't be decoded or are refused: reading it again gives the same error."""


class TooManyRows(BrokenInput):
    """Raised when an input has more rows than a job may have (`Limits.max_rows`).

    Args:
        where: the first position beyond the limit.
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
    """Raised when a committed segment covers other lines than this plan's would: it is from another input."""

    def __init__(self, committed: PlanSegment, due: str) -> None:
        covers = f"{committed.first_row} to {committed.end_row}" + (", the last ones" if committed.last else "")
        super().__init__(
            f"segment {committed.index} of the plan has rows {covers}, but rows {due} are due: it is of another plan; "
            "start anew with --fresh"
        )


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the input: its name for messages, and a function that opens it as a seekable byte stream."""

    name: str
    open: Callable[[], BinaryIO]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One line of the input, parsed.

    Attributes:
        row: index in the input, from 0; blank lines count.  line: number in its file, from 1.
        value: the parsed JSON, or the parse error.
    """

    row: int
    line: int
    value: object | RowError


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """Consecutive lines. Covers input rows `first_row` up to, not including, `end_row`; never crosses a segment.

    Attributes:
        rows: the non-blank lines, in order.
        carried: the columns carried through to the results, aligned with `rows`; None: the input has none.
        name: the lines' file; empty when the input is one file.
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
    """A stored shard: key relative to the job, sha256 in hex, size in bytes."""

    key: str
    sha256: str
    size: int


class FormerAnswers(Protocol):
    """The answers of a former job, by request key. An answer that was sampled without a seed is one draw of many, so it
    is given to one row only."""

    def find(self, keys: Sequence[bytes], shareable: Sequence[bool]) -> NDArray[np.int64]:
        """The index of an answer for each request, -1 where there is none (left).

        Args:
            keys: of the requests.  shareable: whether a request may have an answer that another one has, too.
        """
        ...

    def take(self, indices: NDArray[np.int64]) -> pa.Table:
        """The answers at `indices`, in that order: `RESULT_FIELDS`, as of their former rows."""
        ...

    def accepts(self, rows: Sequence[ValidRow], answers: pa.Table) -> list[bool]:
        """Whether each row may have its answer, which `take` returned."""
        ...

    def mark_given(self, keys: Sequence[bytes]) -> None:
        """Count answers with these keys as given, by an earlier planner."""
        ...


class PlanSink(Protocol):
    """The sink of a plan. Calls are in input order, segment by segment. Segments of other jobs are refused."""

    def existing_segment(self, index: int) -> PlanSegment | None:
        """The segment, if an earlier planner committed it; it is then not planned again."""
        ...

    def write_shard(self, number: int, table: pa.Table) -> StoredShard:
        """Store a shard under this planner's attempt. It counts only once its segment is committed.

        Args:
            table: `schemas.jobs.arrow_schemas.shard_schema(carried)`, with rows in start order.
        """
        ...

    def reused_keys(self, segment: PlanSegment) -> list[bytes]:
        """The request keys of a committed segment's rows that took answers of a former job."""
        ...

    def write_results(self, table: pa.Table) -> None:
        """Append results of the open segment that planning makes: errors of refused lines, and reused answers.

        Args:
            table: `schemas.jobs.arrow_schemas.result_schema(carried)`, sorted by row.
        """
        ...

    def store_results(self, number: int) -> StoredShard:
        """Store the results written since the last call as the future part `number`. It counts only once its segment
        is committed."""
        ...

    def commit_segment(self, segment: PlanSegment) -> PlanSegment:
        """Create the segment if absent; returns the committed one (another planner's, when the race was lost). Its
        results are a part from then on, and its shards may be computed."""
        ...


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """Totals of a planned job.

    Attributes:
        segments: the committed segments; the last of them records whether the plan is complete.
        total: rows that get a result.  rejected: of them, refused in planning.  reused: answered by a former job.
        unique: requests to compute.
        blank_lines: number of empty lines.
        prompt_tokens, expected_tokens: estimates for the computed requests; `max_tokens` is the most they may generate.
        shared_prefix_tokens: estimated prompt tokens that need no second computation.
    """

    segments: tuple[PlanSegment, ...]
    total: int
    rejected: int
    reused: int
    unique: int
    blank_lines: int
    prompt_tokens: int
    shared_prefix_tokens: int
    expected_tokens: int
    max_tokens: int
