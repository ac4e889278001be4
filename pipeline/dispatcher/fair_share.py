"""Tenants share what is computed by weight: who has had least for their weight goes next.

Start-time fair queuing (Goyal, Vin & Cheng 1996, section 2.1) over shards, whose lengths are tokens. A tenant's clock
advances by the tokens handed out to it over its weight; the tenant whose clock is least goes next. Lengths are
estimates when a shard is handed out, and are corrected when it is committed. Who comes (back) with work starts at the
clock of those who have some, so time without work is not saved up. Nothing of this is stored: after a restart all begin
even.
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

    def wants(self, tenants: Collection[str]) -> None:
        """These, and no others, have work now."""
        self._active = frozenset(tenants)
        known = [self._clocks[tenant] for tenant in self._active if tenant in self._clocks]
        if known:
            self._time = max(self._time, min(known))
        for tenant in self._active:
            self._clocks[tenant] = max(self._clocks.get(tenant, self._time), self._time)
        for tenant in [name for name, at in self._clocks.items() if name not in self._active and at <= self._time]:
            del self._clocks[tenant]  # it would start at the others' clock again

    def next(self, tenants: Collection[str]) -> str:
        """Who of `tenants`, which are some of those with work, goes next."""
        return min(tenants, key=lambda tenant: (self._clocks[tenant], tenant))

    def ahead(self, tenant: str) -> float:
        """Tokens for each unit of its weight that a tenant with work has had beyond whoever has had least."""
        least = min((self._clocks[name] for name in self._active), default=0.0)
        return self._clocks.get(tenant, least) - least

    def charge(self, tenant: str, tokens: int) -> None:
        """So many tokens were handed out to the tenant, or, below 0, were not needed after all."""
        if tenant in self._clocks:
            self._clocks[tenant] += tokens / self._weights.get(tenant, 1.0)
