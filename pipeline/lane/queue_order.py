"""The order in which a worker takes from a model's sub-queues on the lane.

No order is right at all times. A worker that always took its own requests first would let the general queue starve
while it is busy, and one that took others' last would never take those of a dead worker. So the order changes from call
to call: its own requests and the general ones come first in turn, and in every eighth call those of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeline.lane.ports import ADDRESSED_TO_ANY, LaneQueue
from schemas.workers.lane import addressed_to

STEAL_AFTER_SECONDS: Final = 0.25
"""How long a request waits for the worker that it is addressed to, before others take it."""

OVERDUE_RATIO: Final = 4
"""A request that has waited so many times longer has a share of the calls of busy workers too."""

OVERDUE_CALLS: Final = 8
"""In every so many calls a worker takes overdue requests of others first."""


class QueueOrder:
    """The queues of one worker and model, in another order for each call."""

    def __init__(self, model: str, worker: str, steal_after_seconds: float) -> None:
        own, general = LaneQueue(model, addressed_to(worker)), LaneQueue(model)
        others = LaneQueue(model, ADDRESSED_TO_ANY, steal_after_seconds)
        overdue = LaneQueue(model, ADDRESSED_TO_ANY, OVERDUE_RATIO * steal_after_seconds)
        self._orders = ((own, general, others), (general, own, others))
        self._overdue = overdue
        self._calls = 0

    def next(self) -> Sequence[LaneQueue]:
        """The queues for the next call, the preferred ones first."""
        self._calls += 1
        order = self._orders[self._calls % 2]
        return (self._overdue, *order) if self._calls % OVERDUE_CALLS == 0 else order


def queues_of_no_worker(model: str, steal_after_seconds: float) -> Sequence[LaneQueue]:
    """The queues from which a worker learns that a model which it hasn't loaded has requests."""
    return LaneQueue(model), LaneQueue(model, ADDRESSED_TO_ANY, steal_after_seconds)
