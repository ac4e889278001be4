"""What a worker logs of its open shards, so that an attempt that dies costs no more than the last second.

The snapshot is taken between two steps, on the thread that steps the engine: rows that have finished since the last
one, and the new tokens of those that run. Building results and writing happen on the helper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from engine.embedding.embedder import StepEngine
from engine.request import Completion, PartialChoice, Request
from engine.scheduler.resume import resumed_tokens
from pipeline.ports import StoreError
from pipeline.worker_client.protocol import CheckpointWork, ShardSink
from schemas.jobs.checkpoints import FinishedRows, LoggedChoice
from schemas.jobs.outcome import Usage
from workers.rows import ComputedRow, Envelope, FinishedRow, PreparedRow
from workers.shards.resume import logged_choice, unfinished
from workers.shards.state import OpenShard
from workers.translation.responses import ResponseBuilder

NO_USAGE: Final = Usage()


@dataclass(slots=True)
class LoggedRow:
    """How much of a running row is logged: choice -> tokens, the choices whose end is, how many end tokens these had,
    and tokens that were counted as sampled."""

    tokens: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    stops: int = 0
    counted: int = 0


@dataclass(frozen=True, slots=True)
class ShardSnapshot:
    """What is new in a shard, before its finished rows are results."""

    shard: OpenShard
    finished: list[FinishedRow]
    running: list[LoggedChoice]
    generated: int
    busy_seconds: float

    @property
    def empty(self) -> bool:
        return not (self.finished or self.running)


class Checkpointer:
    """Takes snapshots of the open shards of one worker, and writes them.

    Attributes:
        exposed: the most tokens that were sampled between two snapshots: what a death would have cost.
    """

    def __init__(self, engine: StepEngine, builder: ResponseBuilder, sink: ShardSink) -> None:
        self._engine = engine
        self._builder = builder
        self._sink = sink
        self._rows: dict[str, LoggedRow] = {}
        self._sampled = engine.stats().generated  # tokens, at the last snapshot; it was warmed up before the first
        self.exposed = 0

    def forget(self, request_id: str) -> None:
        """The row is gone."""
        self._rows.pop(request_id, None)

    def keep(self, shard: OpenShard, row: PreparedRow, completion: Completion) -> None:
        """The row left the engine without its outcome, and will go on from what it has."""
        name = row.request.request_id
        if name not in self._rows and completion.generated_tokens <= completion.resumed_tokens:
            return  # what it has is in an earlier attempt's log
        logged = self._rows.setdefault(name, LoggedRow(counted=completion.resumed_tokens))
        shard.kept += self._add(shard, logged, row.names[0].row, unfinished(completion, logged.tokens))

    def finish(self, shard: OpenShard, row: FinishedRow) -> None:
        """A row has its outcome."""
        shard.finished.append(row)
        shard.num_finished += 1
        if isinstance(row, ComputedRow):
            logged = self._rows.pop(row.completion.request_id, None)
            counted = row.completion.resumed_tokens if logged is None else logged.counted
            shard.unlogged += row.completion.generated_tokens - counted

    def snapshot(self, shard: OpenShard, running: Iterable[PreparedRow]) -> ShardSnapshot:
        """What is new since the shard's last snapshot; `running` are its rows in the engine. Between two steps only."""
        finished, shard.finished = shard.finished, []
        choices, shard.kept = shard.kept, []
        for row in running:
            choices += self._new_choices(shard, row.request, row.names[0].row)
        shard.generated += shard.unlogged
        shard.unlogged = 0
        return ShardSnapshot(shard, finished, choices, shard.generated, shard.busy_seconds)

    def _new_choices(self, shard: OpenShard, request: Request, row: int) -> list[LoggedChoice]:
        logged = self._rows.get(request.request_id)
        new = self._engine.partial(request, None if logged is None else logged.tokens)
        if logged is None:
            resumed = resumed_tokens(request)
            if _tokens(new) <= resumed:  # it waits for its turn; what it has is in an earlier attempt's log
                return []
            logged = self._rows[request.request_id] = LoggedRow(counted=resumed)
        return self._add(shard, logged, row, new)

    def _add(self, shard: OpenShard, logged: LoggedRow, row: int, new: Iterable[PartialChoice]) -> list[LoggedChoice]:
        """Log what a row got behind what is logged of it."""
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
        # Never less than before: a choice that had ended starts again when its prompt is scored a second time.
        sampled = max(logged.counted, sum(logged.tokens.values()) + logged.stops)
        shard.unlogged += sampled - logged.counted
        logged.counted = sampled
        return choices

    def sampled(self) -> int:
        """Tokens that the engine sampled since the last call, for all shards together."""
        generated = self._engine.stats().generated
        new, self._sampled = generated - self._sampled, generated
        self.exposed = max(self.exposed, new)
        return new

    def write(self, snapshots: Iterable[tuple[ShardSnapshot, Envelope]], exposed: int, *, final: bool = False) -> None:
        """On the helper: build the results of what has finished, and make everything durable. A shard for which that
        fails has its `failure`, and the others are written. Raises `StoreError`."""
        for snapshot, envelope in snapshots:
            if snapshot.shard.failure is not None:
                continue  # behind what is missing
            try:
                self._write(snapshot, envelope, exposed, final)
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - of one shard, whose attempt ends with it
                snapshot.shard.failure = error

    def _write(self, snapshot: ShardSnapshot, envelope: Envelope, exposed: int, final: bool) -> None:
        finished = self.build(snapshot.shard, snapshot.finished, envelope)
        if not snapshot.empty or (final and snapshot.shard.begun):
            work = CheckpointWork(finished, snapshot.running, snapshot.generated, exposed, final, snapshot.busy_seconds)
            self._sink.checkpoint(snapshot.shard.work, work)

    def build(self, shard: OpenShard, finished: list[FinishedRow], envelope: Envelope) -> FinishedRows:
        """On the helper: results of rows that have finished, which are also kept for the shard's part."""
        usages: dict[int, Usage] = {}
        for row in finished:
            if isinstance(row, ComputedRow):
                completion = row.completion
                usages[row.prepared.names[0].row] = Usage(
                    prompt=completion.prompt_tokens,
                    cached=completion.cached_tokens,
                    completion=completion.generated_tokens,
                    drafted=completion.drafted_tokens,
                    accepted=completion.accepted_tokens,
                )
                shard.note_times(completion.started_at, completion.finished_at)
        rows = self._builder.results(finished, envelope)
        costs = [usages.get(row.row, NO_USAGE) for row in rows]
        shard.built_rows += rows
        shard.built_usages += costs
        return FinishedRows(rows, costs)


def _tokens(choices: Iterable[PartialChoice]) -> int:
    """Tokens of all of them, end tokens included."""
    return sum(len(choice.token_ids) + (choice.stop_token_id is not None) for choice in choices)
