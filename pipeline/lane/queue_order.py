"""The order in which a worker takes from the sub-queues of its models on the lane.

The order decides between the requests of one tenant, and between tenants of which the worker holds equally many
(`TenantShares`). No order is right at all times. With one tenant, a worker that always took its own requests first
would let the general queue starve while it is busy, and one that took others' last would never take those of a dead
worker. So the order changes from call to call: its own requests and the general ones come first in turn, and in every
eighth call those of others that have waited for long.

Requests whose prompt another worker computed are for decode workers, and all others for the rest. A worker takes those
of another role last, and only when they have waited: then no worker of that role lives, or all are busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pipeline.lane.ports import ADDRESSED_TO_ANY, LaneQueue
from schemas.settings.kv_transfer import KVTransferOptions, Role
from schemas.workers.lane import DECODE, addressed_to

STEAL_AFTER_SECONDS: Final = 0.25
"""How long a request waits for the worker that it is addressed to, before others take it."""

OVERDUE_RATIO: Final = 4
"""A request that has waited so many times longer has a share of the calls of busy workers too."""

OVERDUE_CALLS: Final = 8
"""In every so many calls a worker takes overdue requests of others first."""


class QueueOrder:
    """The queues of one worker, in another order for each call.

    Args:
        models: those that it answers (`ModelPin.key`): of each kind of queue another model's is first in each call.
        steal_after_seconds: how long a request that is addressed to another worker must have waited.
        role: the worker's.  help_after_seconds: how long a request of another role must have waited.
    """

    def __init__(
        self,
        models: Sequence[str],
        worker: str,
        steal_after_seconds: float,
        role: Role = "both",
        help_after_seconds: float = KVTransferOptions().help_after_seconds,
    ) -> None:
        self._models = deque(models)
        model = models[0]  # the queues of the others have the same order
        own = LaneQueue(model, addressed_to(worker))
        if role == "decode":
            general = LaneQueue(model, "", help_after_seconds)
            others = LaneQueue(model, ADDRESSED_TO_ANY, max(steal_after_seconds, help_after_seconds))
            self._orders: tuple[tuple[LaneQueue, ...], ...] = ((LaneQueue(model, DECODE), own, general, others),)
            self._overdue: tuple[LaneQueue, ...] = (
                LaneQueue(model, "", OVERDUE_RATIO * help_after_seconds),
                LaneQueue(model, ADDRESSED_TO_ANY, OVERDUE_RATIO * max(steal_after_seconds, help_after_seconds)),
            )
        else:
            general, decode = LaneQueue(model), LaneQueue(model, DECODE, help_after_seconds)
            others = LaneQueue(model, ADDRESSED_TO_ANY, steal_after_seconds)
            self._orders = ((own, general, others, decode), (general, own, others, decode))
            self._overdue = (
                LaneQueue(model, DECODE, OVERDUE_RATIO * help_after_seconds),
                LaneQueue(model, ADDRESSED_TO_ANY, OVERDUE_RATIO * steal_after_seconds),
            )
        self._calls = 0

    def next(self) -> Sequence[LaneQueue]:
        """The queues for the next call, the preferred ones first."""
        self._models.rotate(-1)
        queues = self._next_of_one()
        if len(self._models) == 1:
            return queues
        return [replace(queue, model=model) for queue in queues for model in self._models]

    def _next_of_one(self) -> Sequence[LaneQueue]:
        self._calls += 1
        order = self._orders[self._calls % len(self._orders)]
        if self._calls % OVERDUE_CALLS:
            return order
        first = (self._calls // OVERDUE_CALLS) % len(self._overdue)  # in turn, or the second one would starve
        return (*self._overdue[first:], *self._overdue[:first], *order)


def queues_of_no_worker(
    model: str,
    steal_after_seconds: float = STEAL_AFTER_SECONDS,
    role: Role = "both",
    help_after_seconds: float = KVTransferOptions().help_after_seconds,
) -> Sequence[LaneQueue]:
    """The queues from which a worker of this role learns that a model which it hasn't loaded has requests."""
    if role == "decode":
        late = max(steal_after_seconds, help_after_seconds)
        return (
            LaneQueue(model, DECODE),
            LaneQueue(model, "", help_after_seconds),
            LaneQueue(model, ADDRESSED_TO_ANY, late),
        )
    stolen, other_role = (
        LaneQueue(model, ADDRESSED_TO_ANY, steal_after_seconds),
        LaneQueue(model, DECODE, help_after_seconds),
    )
    return LaneQueue(model), stolen, other_role
