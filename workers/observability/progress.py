"""The progress of a worker: counters, engine state and throughput, as its loop reports them to an observer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp
from typing import Final, Protocol

from engine.engine import EngineStats
from engine.request import Completion

RATE_SECONDS: Final = 30.0
"""Time constant of the throughput: a measurement this old weighs about a third of a current one."""


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Counters since the worker's start. Rows include copies; tokens are those of finished computed rows.

    Attributes:
        succeeded, failed: rows with an outcome.  committed: rows in durable parts.
        restored: further rows, whose outcome an earlier attempt had logged.
        shards_committed: parts that this worker wrote.  shards_lost: shards that another attempt committed first.
        prompt_tokens, cached_tokens, completion_tokens: of finished rows.
        first_start, last_end: of computed rows, on the engine's clock (seconds).
    """

    succeeded: int = 0
    failed: int = 0
    committed: int = 0
    shards_committed: int = 0
    shards_lost: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_start: float | None = None
    last_end: float | None = None
    restored: int = 0

    def with_refused(self, rows: int) -> WorkerCounts:
        """Add refused rows."""
        return replace(self, failed=self.failed + rows)

    def with_restored(self, rows: int) -> WorkerCounts:
        """Add rows of a shard whose outcome an earlier attempt had logged."""
        return replace(self, restored=self.restored + rows)

    def with_computed(self, succeeded: int, failed: int, completion: Completion) -> WorkerCounts:
        """Add one computed request, which answers so many rows."""
        start, end = completion.started_at, completion.finished_at
        return replace(
            self,
            succeeded=self.succeeded + succeeded,
            failed=self.failed + failed,
            prompt_tokens=self.prompt_tokens + completion.prompt_tokens,
            cached_tokens=self.cached_tokens + completion.cached_tokens,
            completion_tokens=self.completion_tokens + completion.generated_tokens,
            first_start=start if self.first_start is None else min(self.first_start, start),
            last_end=end if self.last_end is None else max(self.last_end, end),
        )

    def with_part(self, rows: int, committed: bool) -> WorkerCounts:
        """Add a shard whose part is durable; `committed`: this worker wrote it."""
        if not committed:
            return replace(self, shards_lost=self.shards_lost + 1)
        return replace(self, committed=self.committed + rows, shards_committed=self.shards_committed + 1)


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """The state of a worker.

    Attributes:
        engine: live counters of the engine, running rows included; `engine.running` and `engine.waiting` are its rows.
        queued: rows of open shards that the engine doesn't have yet.
        shards_open: shards that are taken and not yet committed.
        stopped: the worker was stopped, and has released its unfinished shards.
    """

    counts: WorkerCounts
    engine: EngineStats
    queued: int
    shards_open: int
    stopped: bool = False

    @property
    def rows(self) -> int:
        """Rows with an outcome, copies included."""
        return self.counts.succeeded + self.counts.failed

    @property
    def engine_seconds(self) -> float:
        """From the first row's start to the last finished row's end."""
        counts = self.counts
        return 0.0 if counts.first_start is None or counts.last_end is None else counts.last_end - counts.first_start


class RateMeter:
    """Measures tokens per second while the engine has work, as an exponential average over about half a minute.

    The time between two measurements counts only if the engine had work at the first one, so that idle time doesn't
    lower the rate.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._last: tuple[float, int] | None = None  # the last measurement with work: time and tokens

    def measure(self, now: float, engine: EngineStats) -> float | None:
        """Tokens per second; None: not measured yet. `now`: seconds, monotonic."""
        tokens = engine.computed - engine.recomputed + engine.cached
        if self._last is not None and now > self._last[0]:
            seconds = now - self._last[0]
            decay = exp(-seconds / RATE_SECONDS)
            self._tokens = decay * self._tokens + (tokens - self._last[1])
            self._seconds = decay * self._seconds + seconds
        self._last = (now, tokens) if engine.running or engine.waiting else None
        return self._tokens / self._seconds if self._seconds else None


class WorkerObserver(Protocol):
    """Receives a worker's progress on the thread that steps the engine, so it must return quickly."""

    def progress(self, progress: WorkerProgress) -> None:
        """Called every `WorkerSettings.report_interval_seconds`, and once at the end."""
        ...
