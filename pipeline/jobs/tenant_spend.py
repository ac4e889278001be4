"""Index of the cost of a tenant's ended jobs by day: markers that one listing reads, for any number of jobs.

    tenants/TENANT/spent/DAY_JOB_MILLIONTHS         of the price's currency; the day is UTC's

The markers are created before the job's manifest, from its parts, so an interruption loses none. The cost of open jobs
is read from their parts; their markers, if they exist already, are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import date, timedelta
from itertools import takewhile
from typing import Final

from pipeline.ledger.tenant_index import TENANTS, tenant_folder
from pipeline.ports import ObjectInfo, ObjectStore

MILLIONTHS: Final = 1_000_000


def record_spent(store: ObjectStore, tenant: str, job: str, by_day: Mapping[str, float]) -> None:
    """Record the job's cost on each day (`YYYY-MM-DD`) durably."""
    for day, cost in by_day.items():
        if millionths := round(cost * MILLIONTHS):
            store.create(f"{_folder(tenant)}{day}_{job}_{millionths}", b"")


def list_old_spending(store: ObjectStore, today: date) -> Iterator[ObjectInfo]:
    """Markers of months before the last one, which no spending limit reads any more."""
    month = (today.replace(day=1) - timedelta(days=1)).isoformat()[:7]
    for tenant in store.folders(TENANTS):
        folder = f"{tenant}spent/"
        yield from list(takewhile(lambda info: info.key.rpartition("/")[2] < month, store.list(folder)))


class EndedSpending:
    """This month's cost of ended jobs. Read from the store once, and updated by `ended`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._month = ""
        self._tenants: dict[str, dict[tuple[str, str], float]] = {}  # (day, job) -> cost

    def forget(self) -> None:
        """Clear the cache, because other processes may write."""
        self._tenants.clear()

    def ended(self, tenant: str, job: str, by_day: Mapping[str, float]) -> None:
        """Record the cost of a job that ends."""
        record_spent(self._store, tenant, job, by_day)
        if tenant in self._tenants:
            self._tenants[tenant].update({(day, job): cost for day, cost in by_day.items()})

    def of(self, tenant: str, today: date, beginning: str, but: Collection[str]) -> float:
        """The cost of the tenant's jobs, except `but`, on days of this month that start with `beginning`."""
        month = today.isoformat()[:7]
        if month != self._month:
            self._month, self._tenants = month, {}
        if tenant not in self._tenants:
            self._tenants[tenant] = self._read(tenant, month)
        spent = self._tenants[tenant].items()
        return sum(cost for (day, job), cost in spent if day.startswith(beginning) and job not in but)

    def _read(self, tenant: str, month: str) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = {}
        folder = _folder(tenant)
        for info in self._store.list(f"{folder}{month}-"):
            day, _, rest = info.key.removeprefix(folder).partition("_")
            job, _, millionths = rest.rpartition("_")
            if (
                job and millionths.isdecimal()
            ):  # two dispatchers with different prices may have written two markers: the higher cost
                found[day, job] = max(int(millionths) / MILLIONTHS, found.get((day, job), 0.0))
        return found


def _folder(tenant: str) -> str:
    return f"{tenant_folder(tenant)}spent/"
