"""A simulated worker: shards flow through its batch one after the other, more urgent ones first.

A clock has the time at which the next row gets a slot in the batch. A shard advances it by its rows over the rows per
second of a full batch; its last row ends one row's duration after it began. With an empty batch the clock is one row's
duration in the past, since a whole batch of rows may begin at once. So a shard costs two events, however many rows it
has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Final

from pipeline.simulator.worker_model import WorkerModel
from pipeline.worker_client.bulk_reserve import BulkReserve
from schemas.jobs.job import Tier

MAX_HELD: Final = 5
"""Shards that a worker holds: four open and one prepared, as in `workers.settings.WorkerSettings`."""

WATERMARK: Final = 2.0
"""A worker opens another shard when fewer batches of rows than this wait."""


@dataclass(frozen=True, slots=True)
class SimulatedJobOrder:
    """The fields of a job that the dispatcher's rules need."""

    id: str
    tenant: str
    tier: Tier
    deadline: datetime | None
    created_at: datetime


@dataclass(eq=False, slots=True)
class SimJob:
    """An open job.

    Attributes:
        arrival: seconds.  due: seconds; None: no deadline.
        rows_in_shard: of each but the last.  fresh: shards that were never put; returned: that came back, with their
            rows.
        answer: tokens of an answer, as they turn out.  planned_tokens: of a row, as they are estimated.
        rows_left, rows_open: rows without a part, and rows whose shards are not on a queue.
        ready: when its first shards are planned.  begun: when one of them was taken.  full: see `full_seconds`.
    """

    order: SimulatedJobOrder
    arrival: float
    due: float | None
    rows: int
    rows_in_shard: int
    prompt: float
    answer: float
    planned_tokens: float
    shards: int = 0
    fresh: int = 0
    returned: dict[int, float] = field(default_factory=dict)
    rows_left: float = 0.0
    ready: float = 0.0
    begun: float | None = None
    full: float | None = None
    ended: float | None = None

    def __post_init__(self) -> None:
        self.shards = -(-self.rows // self.rows_in_shard)
        self.rows_left = float(self.rows)

    def full_seconds(self, model: WorkerModel) -> float:
        """That each of its rows is in a full batch."""
        if self.full is None:
            self.full = model.row_seconds(model.batch, self.prompt, self.answer)
        return self.full

    def rows_of(self, number: int) -> float:
        """Rows of a shard that are still to be computed."""
        if number in self.returned:
            return self.returned[number]
        return float(min(self.rows_in_shard, self.rows - number * self.rows_in_shard))

    def unput(self, most: int) -> list[int]:
        """The next shards to be put, the first one last."""
        found = list(self.returned)[:most]
        found += range(self.fresh, min(self.shards, self.fresh + most - len(found)))
        return found[::-1]

    def put(self, number: int) -> float:
        """It is on a queue now; its rows."""
        rows = self.rows_of(number)
        if self.returned.pop(number, None) is None:
            self.fresh = number + 1
        return rows


@dataclass(eq=False, slots=True)
class HeldShard:
    """A shard that a worker holds. `urgent`: it goes before the others."""

    job: SimJob
    number: int
    rows: float
    urgent: bool
    taken: float
    finish: float = 0.0
    flow: float = 0.0


class SimWorker:
    """One worker.

    Attributes:
        launched: when it was asked for, and paid from.  ready: when it computed first.
        busy: seconds with a shard in hand.  take_serial: number of the latest scheduled take; older ones are cancelled.
    """

    __slots__ = (
        "_busy_since", "_clock", "_urgent", "busy", "floor", "held", "last_begin", "launched", "model", "name",
        "ready", "take_serial",
    )  # fmt: skip

    def __init__(self, name: int, model: WorkerModel, launched: float, ready: float) -> None:
        self.name = name
        self.model = model
        self.launched = launched
        self.ready = ready
        self.held: list[HeldShard] = []
        self.floor = BulkReserve()
        self.busy = 0.0
        self.take_serial = 0
        self._clock = self._urgent = self.last_begin = float("-inf")
        self._busy_since = 0.0

    def take(self, job: SimJob, number: int, rows: float, urgent: bool, now: float) -> HeldShard:
        """Begin with a shard; it says when it will be finished, as it looks now."""
        model, prompt, answer = self.model, job.prompt, job.answer
        full = job.full_seconds(model)
        flow = rows * full / model.batch
        in_hand = rows + sum(one.rows for one in self.held)
        latency = full if in_hand >= model.batch else model.row_seconds(in_hand, prompt, answer)
        if not self.held:
            self._busy_since = now
        clock = self._urgent if urgent else max(self._clock, self._urgent)
        begin = max(clock, now - full)
        shard = HeldShard(job, number, rows, urgent, now, max(begin + flow, now) + latency, flow)
        if urgent:
            self._urgent = begin + flow
            for one in self.held:
                if not one.urgent:
                    one.finish += flow
            self._clock = max(self._clock, now - full) + flow
        else:
            self._clock = begin + flow
        self.last_begin = begin
        self.held.append(shard)
        return shard

    def wants_at(self, job: SimJob, now: float) -> float:
        """When it opens its next shard, as things are: too few rows wait by then. Infinity: when one is finished."""
        if len(self.held) >= MAX_HELD:
            return inf
        full = job.full_seconds(self.model)
        return max(now, self.last_begin - WATERMARK * full)

    def wants_urgent(self) -> bool:
        """An urgent shard would be opened at once."""
        return len(self.held) < MAX_HELD and not any(one.urgent for one in self.held)

    def paid_until(self, now: float) -> float:
        """Seconds with a shard in hand until now."""
        return self.busy + (now - self._busy_since if self.held else 0.0)

    def let_go(self, shard: HeldShard, now: float) -> None:
        """It is finished, or given back."""
        self.held.remove(shard)
        if not self.held:
            self.busy += now - self._busy_since

    def drop(self, shard: HeldShard, now: float, lost: float = 0.0) -> float:
        """Release a shard; the number of its rows that are still to be computed. `lost`: seconds of unlogged work."""
        span = max(1e-9, shard.finish - shard.taken)
        done = min(max(0.0, now - lost - shard.taken) / span, 1.0) * shard.rows
        left = max(0.0, shard.rows - done)
        flow = shard.flow * left / shard.rows
        self._clock -= flow
        if shard.urgent:
            self._urgent -= flow
        self.let_go(shard, now)
        return left
