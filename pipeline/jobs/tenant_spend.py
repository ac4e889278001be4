"""What a tenant's jobs that have ended had cost, by day: markers that one listing reads, however many jobs ever ran.

    tenants/TENANT/spent/DAY_JOB_MILLIONTHS         of the price's currency; the day is UTC's

Made before the job's manifest, from what its parts say, so an interruption loses none; of open jobs the parts are asked
themselves, and their markers, if they have any already, don't count.
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
    """Note durably what the job has cost on each day (`YYYY-MM-DD`)."""
    for day, cost in by_day.items():
        if millionths := round(cost * MILLIONTHS):
            store.create(f"{_folder(tenant)}{day}_{job}_{millionths}", b"")


def old_spending(store: ObjectStore, today: date) -> Iterator[ObjectInfo]:
    """Markers of months before the last one, which no limit looks at any more."""
    month = (today.replace(day=1) - timedelta(days=1)).isoformat()[:7]
    for tenant in store.folders(TENANTS):
        folder = f"{tenant}spent/"
        yield from list(takewhile(lambda info: info.key.rpartition("/")[2] < month, store.list(folder)))


class EndedSpending:
    """What was spent on jobs that have ended, this month. Learnt from the store once, and told what comes after."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._month = ""
        self._tenants: dict[str, dict[tuple[str, str], float]] = {}  # (day, job) -> cost

    def forget(self) -> None:
        """Others may write: learn it anew."""
        self._tenants.clear()

    def ended(self, tenant: str, job: str, by_day: Mapping[str, float]) -> None:
        """The job ends."""
        record_spent(self._store, tenant, job, by_day)
        if tenant in self._tenants:
            self._tenants[tenant].update({(day, job): cost for day, cost in by_day.items()})

    def of(self, tenant: str, today: date, beginning: str, but: Collection[str]) -> float:
        """What the tenant's jobs, `but` for these, have cost on days of this month that begin so."""
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
            if job and millionths.isdecimal():  # two dispatchers with other prices may have written two: the dearer
                found[day, job] = max(int(millionths) / MILLIONTHS, found.get((day, job), 0.0))
        return found


def _folder(tenant: str) -> str:
    return f"{tenant_folder(tenant)}spent/"
