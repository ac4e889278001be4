"""Checkpoints of a worker's open shards, so that the death of an attempt costs no more than about a second of work.

The loop's thread takes a snapshot between two steps: the rows that have finished since the last snapshot, and the new
tokens of the running ones. The writer thread builds the results and writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from engine.request import Completion, PartialChoice
from engine.scheduler.resume import resumed_tokens
from engine.step_engine import StepEngine
from pipeline.ports import StoreError
from pipeline.worker_client.ports import CheckpointWork, ShardSink
from schemas.jobs.checkpoints import FinishedRows, LoggedChoice
from schemas.jobs.outcome import Usage
from workers.rows import ComputedRow, Envelope, FinishedRow, PreparedRow
from workers.shards.open_shard import OpenShard
from workers.shards.resume import logged_choice, unfinished
from workers.translation.responses import ResponseBuilder
from workers.translation.tries import total_usage, usage_of

NO_USAGE: Final = Usage()


@dataclass(slots=True)
class LoggedRow:
    """How much of a running row is logged.

    Attributes:
        tokens: choice -> number of logged tokens.
        ended: choices whose end is logged.  stops: end tokens that these had.
        counted: tokens that were counted as sampled.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    stops: int = 0
    counted: int = 0


@dataclass(frozen=True, slots=True)
class ShardSnapshot:
    """A shard's new outcomes and tokens since its last snapshot. Its finished rows are not results yet."""

    shard: OpenShard
    finished: list[FinishedRow]
    running: list[LoggedChoice]
    generated: int
    busy_seconds: float

    @property
    def is_empty(self) -> bool:
        return not (self.finished or self.running)


class Checkpointer:
    """Takes snapshots of the open shards of one worker, and writes them.

    Attributes:
        exposed: the largest number of tokens sampled between two snapshots, which a death would have cost.
    """

    def __init__(self, engine: StepEngine, builder: ResponseBuilder, sink: ShardSink) -> None:
        self._engine = engine
        self._builder = builder
        self._sink = sink
        self._rows: dict[str, LoggedRow] = {}
        self._sampled = engine.stats().generated  # tokens at the last snapshot; warm-up comes before the first
        self.exposed = 0

    def forget(self, request_id: str) -> None:
        """Stop tracking the row."""
        self._rows.pop(request_id, None)

    def retain(self, shard: OpenShard, row: PreparedRow, completion: Completion) -> None:
        """The row left the engine without an outcome, and will resume from its tokens: log these with the next
        snapshot."""
        name = row.request.request_id
        if name not in self._rows and completion.generated_tokens <= completion.resumed_tokens:
            return  # its tokens are in an earlier attempt's log
        logged = self._rows.setdefault(name, LoggedRow(counted=completion.resumed_tokens))
        shard.retained += self._add(shard, logged, row, unfinished(completion, logged.tokens))

    def end_try(self, shard: OpenShard, row: PreparedRow, completion: Completion) -> None:
        """The row left the engine, and its answer was not accepted: log this with the next snapshot. `row`: as it is
        asked again."""
        self._count_sampled(shard, completion)
        nothing = np.zeros(0, np.int32)
        shard.retained.append(LoggedChoice(row.names[0].row, 0, 0, nothing, tries=row.tries))

    def finish(self, shard: OpenShard, row: FinishedRow) -> None:
        """Record that a row has its outcome."""
        shard.finished.append(row)
        shard.num_finished += 1
        if isinstance(row, ComputedRow):
            self._count_sampled(shard, row.completion)

    def _count_sampled(self, shard: OpenShard, completion: Completion) -> None:
        """Count the tokens that a request has sampled since the last snapshot; it is not tracked any more."""
        logged = self._rows.pop(completion.request_id, None)
        counted = completion.resumed_tokens if logged is None else logged.counted
        shard.unlogged += completion.generated_tokens - counted

    def snapshot(self, shard: OpenShard, running: Iterable[PreparedRow]) -> ShardSnapshot:
        """New outcomes and tokens since the shard's last snapshot; `running` are its rows in the engine. Call it
        between two steps only."""
        finished, shard.finished = shard.finished, []
        choices, shard.retained = shard.retained, []
        for row in running:
            choices += self._new_choices(shard, row)
        shard.generated += shard.unlogged
        shard.unlogged = 0
        return ShardSnapshot(shard, finished, choices, shard.generated, shard.busy_seconds)

    def _new_choices(self, shard: OpenShard, row: PreparedRow) -> list[LoggedChoice]:
        request = row.request
        logged = self._rows.get(request.request_id)
        new = self._engine.partial(request, None if logged is None else logged.tokens)
        if logged is None:
            resumed = resumed_tokens(request)
            if _tokens(new) <= resumed:  # it waits in the engine; its tokens are in an earlier attempt's log
                return []
            logged = self._rows[request.request_id] = LoggedRow(counted=resumed)
        return self._add(shard, logged, row, new)

    def _add(
        self, shard: OpenShard, logged: LoggedRow, row: PreparedRow, new: Iterable[PartialChoice]
    ) -> list[LoggedChoice]:
        """The row's tokens that follow the logged ones, as log records; they count as logged from now on."""
        choices = []
        for partial in new:
            if partial.index in logged.ended:
                continue
            start = logged.tokens.get(partial.index, 0)
            choices.append(logged_choice(row, start, partial))
            logged.tokens[partial.index] = start + len(partial.token_ids)
            if partial.finish_reason is not None:
                logged.ended.add(partial.index)
                logged.stops += partial.stop_token_id is not None
        # The count never decreases: a choice that had ended restarts when its prompt is scored a second time.
        sampled = max(logged.counted, sum(logged.tokens.values()) + logged.stops)
        shard.unlogged += sampled - logged.counted
        logged.counted = sampled
        return choices

    def sampled(self) -> int:
        """Tokens that the engine sampled for all shards since the last call."""
        generated = self._engine.stats().generated
        new, self._sampled = generated - self._sampled, generated
        self.exposed = max(self.exposed, new)
        return new

    def write(self, snapshots: Iterable[tuple[ShardSnapshot, Envelope]], exposed: int, *, final: bool = False) -> None:
        """Build the results of finished rows and write the checkpoints. Runs on the writer thread. When one shard
        fails, its `failure` is set and the others are written. Raises `StoreError`."""
        for snapshot, envelope in snapshots:
            if snapshot.shard.failure is not None:
                continue  # an earlier checkpoint of it is missing
            try:
                self._write(snapshot, envelope, exposed, final)
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - it concerns one shard, whose attempt ends
                snapshot.shard.failure = error

    def _write(self, snapshot: ShardSnapshot, envelope: Envelope, exposed: int, final: bool) -> None:
        finished = self.build(snapshot.shard, snapshot.finished, envelope)
        if not snapshot.is_empty or (final and snapshot.shard.is_begun):
            work = CheckpointWork(finished, snapshot.running, snapshot.generated, exposed, final, snapshot.busy_seconds)
            self._sink.checkpoint(snapshot.shard.work, work)

    def build(self, shard: OpenShard, finished: list[FinishedRow], envelope: Envelope) -> FinishedRows:
        """Build the results of finished rows, and collect them for the shard's part. Runs on the writer thread."""
        usages: dict[int, Usage] = {}
        for row in finished:
            if isinstance(row, ComputedRow):
                completion = row.completion
                usages[row.prepared.names[0].row] = total_usage(row.prepared.tries, usage_of(completion))
                shard.record_times(completion.started_at, completion.finished_at)
            elif row.tries:
                usages[row.names[0].row] = total_usage(row.tries)
        rows = self._builder.results(finished, envelope)
        costs = [usages.get(row.row, NO_USAGE) for row in rows]
        shard.built_rows += rows
        shard.built_usages += costs
        return FinishedRows(rows, costs)


def _tokens(choices: Iterable[PartialChoice]) -> int:
    """Tokens of all choices, end tokens included."""
    return sum(len(choice.token_ids) + (choice.stop_token_id is not None) for choice in choices)
