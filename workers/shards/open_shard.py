"""The state of a shard in a worker: prepared by `shard_reader.py`, then open while the engine computes its rows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pipeline.worker_client.ports import ShardWork
from schemas.jobs.checkpoints import LoggedChoice
from schemas.jobs.outcome import Usage
from schemas.jobs.results import ResultRow
from workers.rows import FinishedRow, PreparedRow, RejectedRow


@dataclass(frozen=True, slots=True)
class PreparedShard:
    """A shard whose prompts are encoded. `waiting` are the rows for the engine, in the planner's order."""

    work: ShardWork
    waiting: tuple[PreparedRow, ...]
    rejected: tuple[RejectedRow, ...]


@dataclass(slots=True)
class OpenShard:
    """A shard that the engine computes.

    Attributes:
        waiting: rows not yet given to the engine.
        finished: rows with an outcome that are not results yet.  num_finished: all rows with an outcome.
        total: rows that are computed or rejected here (copies not counted).
        built_rows, built_usages: results, and the tokens that each cost.
        unlogged, generated: tokens sampled for the shard since the last snapshot, and before it.
        first_start, last_end: of its computed rows, on the engine's clock (seconds).
        retained: choices of rows that a failed step removed from the engine, for the next snapshot.
        is_begun: the attempt's begin record is durable, so rows of the shard may be in the engine.
        failure: why this attempt can't continue; it will be given up.
        num_in_engine: choices of its rows in the engine.  busy_seconds: its share of the engine's step time.
        expected_tokens, longest_tokens: tokens that its rows are expected to generate: the sum, and the longest answer.
    """

    work: ShardWork
    waiting: deque[PreparedRow]
    finished: list[FinishedRow]
    total: int
    num_finished: int
    built_rows: list[ResultRow] = field(default_factory=list)
    built_usages: list[Usage] = field(default_factory=list)
    unlogged: int = 0
    generated: int = 0
    first_start: float | None = None
    last_end: float | None = None
    retained: list[LoggedChoice] = field(default_factory=list)
    is_begun: bool = False
    failure: Exception | None = None
    num_in_engine: int = 0
    busy_seconds: float = 0.0
    expected_tokens: int = 0
    longest_tokens: int = 0

    @classmethod
    def open(cls, shard: PreparedShard) -> OpenShard:
        total = len(shard.waiting) + len(shard.rejected)
        opened = cls(shard.work, deque(shard.waiting), list(shard.rejected), total, len(shard.rejected))
        for row in shard.waiting:
            hint = row.request.expected_tokens
            length = row.request.params.max_tokens if hint is None else hint
            opened.expected_tokens += length * row.request.num_choices
            opened.longest_tokens = max(opened.longest_tokens, length)
        return opened

    @property
    def expected_tokens_left(self) -> float:
        """Tokens that the rows without an outcome are expected to generate."""
        return self.expected_tokens * self.unfinished

    @property
    def unfinished(self) -> float:
        """The share of its rows that have no outcome."""
        return 1 - self.num_finished / self.total if self.total else 0.0

    @property
    def is_asking_again(self) -> bool:
        """Whether the next row is to be asked again, which it is at once, while the blocks of its prompt are cached."""
        return self.is_begun and bool(self.waiting[0].tries)

    @property
    def is_done(self) -> bool:
        """Whether all rows have an outcome."""
        return self.num_finished == self.total

    def record_times(self, started: float, finished: float) -> None:
        """Record a computed row's start and end."""
        self.first_start = started if self.first_start is None else min(self.first_start, started)
        self.last_end = finished if self.last_end is None else max(self.last_end, finished)
