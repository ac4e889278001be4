"""Fair sharing of computed tokens among tenants by weight: the tenant with the fewest tokens per weight is next.

Start-time fair queuing (Goyal, Vin & Cheng 1996, section 2.1) over shards, whose lengths are tokens. A tenant's clock
advances by the tokens dispatched for it over its weight; the tenant with the lowest clock is next. Lengths are
estimates when a shard is dispatched, and are corrected when it is committed. A tenant that gets work again starts at
the clock of the active tenants, so idle time is not saved up. The clocks are not stored: after a restart all tenants
start equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class FairShares:
    """The clocks of the tenants.

    Args:
        weights: of tenants, above 0; all others have weight 1.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not weight > 0:
                raise ValueError(f"the weight of tenant {tenant!r} is {weight}; weights are above 0")
        self._clocks: dict[str, float] = {}
        self._active: frozenset[str] = frozenset()
        self._time = 0.0

    def set_active(self, tenants: Collection[str]) -> None:
        """Set the tenants that have work now; all others have none."""
        self._active = frozenset(tenants)
        known = [self._clocks[tenant] for tenant in self._active if tenant in self._clocks]
        if known:
            self._time = max(self._time, min(known))
        for tenant in self._active:
            self._clocks[tenant] = max(self._clocks.get(tenant, self._time), self._time)
        for tenant in [name for name, at in self._clocks.items() if name not in self._active and at <= self._time]:
            del self._clocks[tenant]  # it starts at the others' clock again in any case

    def next(self, tenants: Collection[str]) -> str:
        """The next one of `tenants`, a subset of the active tenants."""
        return min(tenants, key=lambda tenant: (self._clocks[tenant], tenant))

    def ahead(self, tenant: str) -> float:
        """Tokens per unit of weight that an active tenant has received more than the one that received least."""
        lowest = min((self._clocks[name] for name in self._active), default=0.0)
        return self._clocks.get(tenant, lowest) - lowest

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge the tenant for dispatched tokens; below 0: refund an estimate that was too high."""
        if tenant in self._clocks:
            self._clocks[tenant] += tokens / self._weights.get(tenant, 1.0)
