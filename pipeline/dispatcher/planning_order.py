"""The order in which jobs are planned: tenants alternate, so that one tenant's jobs can't block the planning of
another's. A pure policy; `planning_queue.py` applies it.

The tenant with the fewest running plans is next; a tie goes to the tenant whose first job is oldest. A tenant's own
jobs are planned in order of their age. Once jobs of two tenants have been added, one tenant occupies at most all
planners but one, so a job of another tenant gets a planner immediately, however long the first tenant's plans take.
"""

from __future__ import annotations

import heapq
from collections import Counter
from datetime import datetime
from typing import Generic, TypeVar

Item = TypeVar("Item")


class PlanningOrder(Generic[Item]):
    """Jobs that wait for planning, and the number of running plans by tenant.

    Args:
        planners: plans that may run concurrently.
    """

    def __init__(self, planners: int) -> None:
        self._planners = planners
        self._max_of_tenant = planners
        self._first_tenant: str | None = None
        self._waiting: dict[str, list[tuple[datetime, int, Item]]] = {}  # heaps, by tenant; never empty
        self._under_way: Counter[str] = Counter()
        self._serial = 0

    def add(self, tenant: str, created_at: datetime, item: Item) -> None:
        """Add a waiting job. Of jobs of equal age the first one added is planned first."""
        if self._first_tenant is None:
            self._first_tenant = tenant
        elif tenant != self._first_tenant:
            self._max_of_tenant = max(1, self._planners - 1)
        heapq.heappush(self._waiting.setdefault(tenant, []), (created_at, self._serial, item))
        self._serial += 1

    def take(self) -> tuple[str, Item] | None:
        """Take the next job, with its tenant; its plan counts as running until `ended`. None: no job may be planned
        now."""
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
        """Count one of the tenant's plans as ended."""
        self._under_way[tenant] -= 1
        if not self._under_way[tenant]:
            del self._under_way[tenant]
