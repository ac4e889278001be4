"""Model switching: a worker of several models has one loaded, and switches to another that has requests.

It switches when it is idle, or after `switch_after` seconds under load, so that no model waits for ever. Work in
progress is completed first. Requests for other models are found by taking one from their queues or the lane. A shard's
name is put back once its model is loaded (if it is lost, the dispatcher queues it again); a lane request is handed back
at once, and its caller sends it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from pipeline.lane.ports import LaneQueue, LaneWorker
from pipeline.lane.queue_order import queues_of_no_worker
from pipeline.ports import Clock, ShardQueue, ShardTask, queue_name
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.worker_client.ports import BY_URGENCY, ShardSource, ShardWork
from schemas.jobs.job import Tier
from schemas.workers.lane import HandBackEvent

POLL_SECONDS: Final = 1.0
"""Interval of polling the queues of the other models."""

logger = structlog.get_logger(__name__)


class ModelRotation:
    """Rotation over several models, each by its `ModelPin.key`.

    Args:
        models: in order of rotation.
        lane: None: there are no interactive requests.
        switch_after: seconds after which a loaded model with work is replaced by another that has requests.
        lane_queues: the lane's queues of a model that this worker takes from (`queues_of_no_worker`).
        adapters: the keys of each model's adapters, whose shards it computes, too; None: there are none.
    """

    def __init__(
        self,
        models: Sequence[str],
        queue: ShardQueue,
        lane: LaneWorker | None,
        clock: Clock,
        switch_after: float,
        lane_queues: Callable[[str], Sequence[LaneQueue]] = queues_of_no_worker,
        adapters: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._models = tuple(models)
        self._queue = queue
        self._lane = lane
        self._clock = clock
        self._switch_after = switch_after
        self._lane_queues = lane_queues
        self._adapters = adapters or {}
        self._next_poll = self._until = 0.0
        self._over = False
        self._taken: tuple[str, ShardTask] | None = None  # its queue, and the task taken from it
        self.loaded = self._models[0]

    def begin(self) -> None:
        """Start the turn of the loaded model."""
        if self._taken is not None:
            taken, self._taken = self._taken, None
            try:
                self._queue.put(*taken)
            except ServiceUnavailable as error:
                logger.warning("a shard's name is lost until it is put again", reason=str(error))
        self._over = False
        self._until = self._clock.monotonic() + self._switch_after

    def over(self, *, idle: bool) -> bool:
        """Whether the loaded model's turn is over, and `loaded` is the next model to load."""
        now = self._clock.monotonic()
        if not self._over and (idle or now >= self._until) and now >= self._next_poll:
            self._next_poll = now + POLL_SECONDS
            self._poll()
        return self._over

    def _poll(self) -> None:
        at = self._models.index(self.loaded)
        for model in self._models[at + 1 :] + self._models[:at]:
            keys = (model, *self._adapters.get(model, ()))
            for queue in (queue_name(key, tier) for tier in BY_URGENCY for key in keys):
                try:
                    task = self._queue.take([queue], 0.0)
                except ServiceUnavailable:  # taking the loaded model's shards reports it
                    return
                if task is not None:
                    self.loaded, self._taken, self._over = model, (queue, task), True
                    return
        others = [model for model in self._models if model != self.loaded]
        if others and self._lane is not None:
            self._poll_lane(self._lane, others)

    def _poll_lane(self, lane: LaneWorker, others: Sequence[str]) -> None:
        try:
            queues = [queue for model in others for queue in self._lane_queues(model)]
            for request in lane.take(queues, 1, 0.0):
                lane.emit([HandBackEvent(request.id, request.attempt, 0, request.kv_source)])
                self.loaded, self._over = request.model, True
        except ServiceUnavailable as error:
            logger.warning("requests of other models are not seen", reason=str(error))


class RotatingShardSource:
    """The shards of the loaded model, until its turn is over.

    Args:
        busy: whether there is work other than shards.
    """

    def __init__(self, source: ShardSource, turns: ModelRotation, busy: Callable[[], bool] = lambda: False) -> None:
        self._source = source
        self._turns = turns
        self._busy = busy
        self._over = False

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        """The next shard; None if there is none now, or none will follow."""
        if self._over:
            return None
        work = self._source.take(timeout, tiers)
        # Without a shard the worker is idle only if all tiers were polled.
        idle = work is None and set(tiers) == set(BY_URGENCY) and not self._busy()
        self._over = self._turns.over(idle=idle)
        return work

    def finished(self) -> bool:
        """Whether no shard will follow."""
        return self._over or self._source.finished()
