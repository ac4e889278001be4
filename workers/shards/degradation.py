"""Carries out steps of degradation at a worker: bulk work is paused, and drafts are turned off.

Rows of a paused shard leave the engine and wait at the worker with their tokens, at the head of their shard. So they
compute nothing, hold no KV blocks, and resume where they stopped. The shard stays held, unless the source has no
more shards: then it is released.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from engine.request import Completion, FinishReason
from engine.step_engine import StepEngine
from pipeline.worker_client.ports import BY_URGENCY, ShardWork
from schemas.jobs.job import Tier
from schemas.settings.overload import StepName
from workers.shards.write_queue import RunningRow

logger = structlog.get_logger(__name__)


def no_steps() -> Collection[StepName]:
    """No step is active."""
    return ()


class ShardDegradation:
    """The steps at one worker. Only its loop calls it. `active`: the active steps.

    Attributes:
        is_bulk_paused: no rows of bulk jobs are computed.
    """

    def __init__(self, engine: StepEngine, active: Callable[[], Collection[StepName]]) -> None:
        self.is_bulk_paused = False
        self._removed: set[str] = set()  # ids of requests whose completions the loop hasn't processed yet
        self._engine = engine
        self._active = active
        self._has_drafts = True

    def refresh(self) -> None:
        """Follow the active steps."""
        active = self._active()
        self.is_bulk_paused = "pause_bulk" in active
        has_drafts = "drafts_off" not in active
        if has_drafts is not self._has_drafts:
            self._has_drafts = has_drafts
            if not self._engine.set_drafting(enabled=has_drafts):
                logger.warning("drafts can't be turned off or on: this engine decides by itself")

    def pauses(self, work: ShardWork) -> bool:
        """Whether the shard's rows must not be computed now."""
        return self.is_bulk_paused and work.job.tier is Tier.BULK

    @property
    def tiers(self) -> Sequence[Tier]:
        """Tiers from which shards may be taken, the most urgent first."""
        return tuple(tier for tier in BY_URGENCY if not (self.is_bulk_paused and tier is Tier.BULK))

    def remove_paused(self, running: Mapping[str, RunningRow]) -> None:
        """Remove the rows of paused shards from the engine, to be resumed later. They return to their shards in reverse
        order, each to the head, so that the planner's order is kept.

        Args:
            running: by request id, in the planner's order.
        """
        paused = [name for name, (shard, _) in running.items() if self.pauses(shard.work)]
        for request_id in reversed(paused):
            if request_id not in self._removed and self._engine.cancel(request_id):
                self._removed.add(request_id)

    def has_removed(self, completion: Completion) -> bool:
        """Whether this completion is of a request that `remove` removed before its end."""
        is_removed = completion.request_id in self._removed
        self._removed.discard(completion.request_id)
        return is_removed and any(choice.finish_reason is FinishReason.CANCELLED for choice in completion.choices)
