"""The order in which jobs are planned: by tenant in turn, so that no tenant's jobs keep another tenant's from being
planned. A pure policy; `planning_queue.py` applies it.

The tenant with the fewest plans under way is next, of several the one whose first job is oldest; a tenant's own jobs
are planned in order of their age. Once jobs of two tenants were seen, one tenant occupies at most all planners but one,
so a job of another tenant finds a planner at once, however long the first tenant's plans take.
"""

from __future__ import annotations

import heapq
from collections import Counter
from datetime import datetime
from typing import Generic, TypeVar

Item = TypeVar("Item")


class PlanningOrder(Generic[Item]):
    """Jobs that wait to be planned, and the number of plans under way by tenant.

    Args:
        planners: plans that may be under way.
    """

    def __init__(self, planners: int) -> None:
        self._planners = planners
        self._max_of_tenant = planners
        self._first_tenant: str | None = None
        self._waiting: dict[str, list[tuple[datetime, int, Item]]] = {}  # heaps, by tenant; never empty
        self._under_way: Counter[str] = Counter()
        self._serial = 0

    def add(self, tenant: str, created_at: datetime, item: Item) -> None:
        """One more job waits; of jobs of equal age the first one added is planned first."""
        if self._first_tenant is None:
            self._first_tenant = tenant
        elif tenant != self._first_tenant:
            self._max_of_tenant = max(1, self._planners - 1)
        heapq.heappush(self._waiting.setdefault(tenant, []), (created_at, self._serial, item))
        self._serial += 1

    def take(self) -> tuple[str, Item] | None:
        """The next job, with its tenant; its plan is under way until `ended`. None: no job may be planned now."""
        if self._under_way.total() >= self._planners:
            return None
        ready = [tenant for tenant in self._waiting if self._under_way[tenant] < self._max_of_tenant]
        if not ready:
            return None
        tenant = min(ready, key=lambda tenant: (self._under_way[tenant], self._waiting[tenant][0][:2]))
        _, _, item = heapq.heappop(self._waiting[tenant])
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self._under_way[tenant] += 1
        return tenant, item

    def ended(self, tenant: str) -> None:
        """One of the tenant's plans is no longer under way."""
        self._under_way[tenant] -= 1
        if not self._under_way[tenant]:
            del self._under_way[tenant]
