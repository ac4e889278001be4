"""A worker of several models has one of them loaded, and changes to another when that one is asked for.

It changes when it has nothing to do, or after a while where there is always something, so that no model waits for ever.
What it has begun it ends before. That another model is asked for shows in its queues: the name that was taken from one
is put back once the model is loaded, or comes again by the dispatcher's doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from pipeline.availability import ServiceUnavailable
from pipeline.ports import Clock, ShardQueue, ShardTask, queue_name
from pipeline.worker_api import BY_URGENCY, ShardSource, ShardWork
from schemas.job import Tier

LOOK_SECONDS: Final = 1.0
"""Between two looks into the queues of the other models."""

logger = structlog.get_logger(__name__)


class Turns:
    """Whose turn it is of several models, each by its `ModelPin.key`.

    Args:
        models: in the order in which they follow each other.
        switch_after: seconds after which a loaded model makes room for another that is asked for, though it has work.
    """

    def __init__(self, models: Sequence[str], queue: ShardQueue, clock: Clock, switch_after: float) -> None:
        self._models = tuple(models)
        self._queue = queue
        self._clock = clock
        self._switch_after = switch_after
        self._next_look = self._until = 0.0
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
        self._until = self._clock.monotonic() + self._switch_after

    def over(self, *, idle: bool) -> bool:
        """Whether the loaded model's turn is over: another's has come, and is to be loaded."""
        now = self._clock.monotonic()
        if self._asked is None and (idle or now >= self._until) and now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look()
        return self._asked is not None

    def _look(self) -> None:
        at = self._models.index(self.loaded)
        for model in self._models[at + 1 :] + self._models[:at]:
            for queue in (queue_name(model, tier) for tier in BY_URGENCY):
                try:
                    task = self._queue.take([queue], 0.0)
                except ServiceUnavailable:  # whoever takes the loaded model's shards says so
                    return
                if task is not None:
                    self.loaded, self._asked = model, (queue, task)
                    return


class SourceInTurn:
    """The shards of the loaded model, until its turn is over."""

    def __init__(self, source: ShardSource, turns: Turns) -> None:
        self._source = source
        self._turns = turns
        self._over = False

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        """The next shard; None when there is none now, or none will come."""
        if self._over:
            return None
        work = self._source.take(timeout, tiers)
        # Where only some tiers may come, that there is nothing doesn't mean that there is nothing to do.
        self._over = self._turns.over(idle=work is None and set(tiers) == set(BY_URGENCY))
        return work

    def finished(self) -> bool:
        """True when no shard will come again."""
        return self._over or self._source.finished()
