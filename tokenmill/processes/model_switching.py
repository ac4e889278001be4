"""A worker of several models has one of them loaded, and changes to another when that one is asked for.

It changes when it has nothing to do, or after a while where there is always something, so that no model waits for ever.
What it has begun it ends before. That another model is asked for shows in its queues, and on the lane. What was taken
to see that is put back: a shard's name once the model is loaded (or it comes again by the dispatcher's doing), a
request at once, and its caller sends it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import structlog

from pipeline.lane.protocol import LaneWorker
from pipeline.ports import Clock, ShardQueue, ShardTask, queue_name
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.worker_client.protocol import BY_URGENCY, ShardSource, ShardWork
from schemas.jobs.job import Tier
from schemas.workers.lane import HandBackEvent

LOOK_SECONDS: Final = 1.0
"""Between two looks into the queues of the other models."""

logger = structlog.get_logger(__name__)


class ModelRotation:
    """Whose turn it is of several models, each by its `ModelPin.key`.

    Args:
        models: in the order in which they follow each other.
        lane: None: no caller waits for any of them.
        switch_after: seconds after which a loaded model makes room for another that is asked for, though it has work.
    """

    def __init__(
        self, models: Sequence[str], queue: ShardQueue, lane: LaneWorker | None, clock: Clock, switch_after: float
    ) -> None:
        self._models = tuple(models)
        self._queue = queue
        self._lane = lane
        self._clock = clock
        self._switch_after = switch_after
        self._next_look = self._until = 0.0
        self._over = False
        self._asked: tuple[str, ShardTask] | None = None  # its queue, and what was taken from it
        self.loaded = self._models[0]

    def begin(self) -> None:
        """The model whose turn it is has been loaded."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            try:
                self._queue.put(*asked)
            except ServiceUnavailable as error:
                logger.warning("a shard's name is lost until it is put again", reason=str(error))
        self._over = False
        self._until = self._clock.monotonic() + self._switch_after

    def over(self, *, idle: bool) -> bool:
        """Whether the loaded model's turn is over: another's has come, and is to be loaded."""
        now = self._clock.monotonic()
        if not self._over and (idle or now >= self._until) and now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look()
        return self._over

    def _look(self) -> None:
        at = self._models.index(self.loaded)
        for model in self._models[at + 1 :] + self._models[:at]:
            for queue in (queue_name(model, tier) for tier in BY_URGENCY):
                try:
                    task = self._queue.take([queue], 0.0)
                except ServiceUnavailable:  # whoever takes the loaded model's shards says so
                    return
                if task is not None:
                    self.loaded, self._asked, self._over = model, (queue, task), True
                    return
        others = [model for model in self._models if model != self.loaded]
        if others and self._lane is not None:
            self._look_at_lane(self._lane, others)

    def _look_at_lane(self, lane: LaneWorker, others: Sequence[str]) -> None:
        try:
            for request in lane.take(others, 1, 0.0):
                lane.emit([HandBackEvent(request.id, request.attempt, 0)])
                self.loaded, self._over = request.model, True
        except ServiceUnavailable as error:
            logger.warning("requests of other models are not seen", reason=str(error))


class RotatingShardSource:
    """The shards of the loaded model, until its turn is over.

    Args:
        busy: whether there is something to do beside shards.
    """

    def __init__(self, source: ShardSource, turns: ModelRotation, busy: Callable[[], bool] = lambda: False) -> None:
        self._source = source
        self._turns = turns
        self._busy = busy
        self._over = False

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        """The next shard; None when there is none now, or none will come."""
        if self._over:
            return None
        work = self._source.take(timeout, tiers)
        # Where only some tiers may come, that there is nothing doesn't mean that there is nothing to do.
        idle = work is None and set(tiers) == set(BY_URGENCY) and not self._busy()
        self._over = self._turns.over(idle=idle)
        return work

    def finished(self) -> bool:
        """True when no shard will come again."""
        return self._over or self._source.finished()
