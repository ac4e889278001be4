"""The plan of a job: segments of its input, and their shards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from schemas.stored import Count, Sha256, StoredModel


class ShardRef(StoredModel):
    """A shard that was written. Its number is its part's number.

    Attributes:
        key: the object, relative to the job.
        rows: results of the shard.  computed_rows: requests that are computed (the others are copies).
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


class RejectsRef(StoredModel):
    """The part of a segment's rows that planning ends: refused ones, and those that take answers of a former job, as
    the planner stored it. Any process can commit the part by copying it.

    Attributes:
        number: of the part; 0 in the first segment, which has such a part even if it is empty.
        key: the object, relative to the job.
    """

    number: Count
    key: str
    sha256: Sha256
    size: Count
    rows: Count


class PlanSegment(StoredModel):
    """`plan/NNNNN.json`: decides whose shards count for the input rows `first_row` up to, not including, `end_row`.

    Attributes:
        job: the id of its job.
        attempt: of the planner; prefix of the shards' keys.
        blank_lines: empty lines, which have a row index but no result.
        unselected: lines that the job doesn't select.
        rejected: rows refused in planning.  reused: rows that take answers of a former job.
        rejects: the results of both; None when a segment behind the first has none.
        unique: requests that are computed.
        prefix_groups: groups of requests that share a prefix worth caching.
        shared_prefix_tokens: estimated, of computed requests: prompt tokens that an earlier one shares.
        max_tokens: the most that the computed requests may generate.
        certain_tokens: of the longest answer that can't end early.
        sequences: of the computed requests, one for each choice.
        tokens_per_byte: measured by the first segment's planner on a sample of its prompts; the estimates of later
            segments use it, whichever process plans them.
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
    reused: Count = 0
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
        if planned + self.rejected + self.reused != self.total:
            raise ValueError(
                f"segment {self.index} covers {self.end_row - self.first_row} lines, but has {planned} in shards, "
                f"{self.rejected} rejected, {self.reused} reused, {self.blank_lines} blank and {self.unselected} left "
                "out"
            )
        if sum(shard.computed_rows for shard in self.shards) != self.unique:
            raise ValueError(f"segment {self.index}: shards compute other than {self.unique} rows")
        if self.rejected + self.reused != (self.rejects.rows if self.rejects else 0):
            raise ValueError(
                f"segment {self.index}: the part of its {self.rejected} refused and {self.reused} reused rows is "
                "another"
            )
        if self.index == 0 and (self.rejects is None or self.rejects.number != 0):
            raise ValueError("the first segment has no part 0")
        return self

    @property
    def total(self) -> int:
        """Rows that get a result."""
        return self.end_row - self.first_row - self.blank_lines - self.unselected

    @property
    def parts(self) -> dict[int, int]:
        """Rows of each of the segment's parts, by the part's number."""
        rejects = {} if self.rejects is None else {self.rejects.number: self.rejects.rows}
        return rejects | {shard.number: shard.rows for shard in self.shards}
