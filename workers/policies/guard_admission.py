"""Decides whether and when a guard model's server is asked, so that one tenant's texts don't leave those of another
unjudged."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

FAILURES_UNTIL_DOWN: Final = 3
RETRY_SECONDS: Final = 1.0
"""A server that failed `FAILURES_UNTIL_DOWN` times in a row is asked once in this time."""

_MAX_TENANTS: Final = 1_000
"""Tenants whose failures are remembered: those that asked last."""


class CircuitBreaker:
    """Decides whether a server is asked. Thread-safe.

    Args:
        now: a monotonic clock (seconds).
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._failures = 0
        self._next_try = 0.0
        self._answered_at = now()

    def admits(self) -> bool:
        """Whether the server may be asked now."""
        with self._lock:
            if self._failures < FAILURES_UNTIL_DOWN:
                return True
            if (now := self._now()) < self._next_try:
                return False
            self._next_try = now + RETRY_SECONDS
            return True

    def record(self, answered: bool, began: float) -> None:
        """Record whether a request was answered. `began`: its start, by the clock. A failure of a request that is older
        than the last answer doesn't count."""
        with self._lock:
            if answered:
                self._failures, self._answered_at = 0, self._now()
            elif began >= self._answered_at:
                self._failures += 1
                self._next_try = self._now() + RETRY_SECONDS


class TenantBreakers:
    """A circuit breaker for each tenant: a text that takes too long concerns the tenant that sent it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._breakers: OrderedDict[str, CircuitBreaker] = OrderedDict()

    def of(self, tenant: str) -> CircuitBreaker:
        """The tenant's breaker."""
        with self._lock:
            found = self._breakers.setdefault(tenant, CircuitBreaker())
            self._breakers.move_to_end(tenant)
            if len(self._breakers) > _MAX_TENANTS:
                self._breakers.popitem(last=False)
            return found

    def clear(self) -> None:
        """Forget all failures, also those of requests that are open now."""
        with self._lock:
            self._breakers.clear()


class TenantSlots:
    """Limits the requests at a time. Once two tenants have asked, one tenant holds at most seven eighths of the slots,
    and at least one; requests of no tenant (None) may hold all. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._held: Counter[str | None] = Counter()
        self._first_tenant: str | None = None
        self._max_each = count

    def acquire(self, tenant: str | None, timeout_seconds: float) -> bool:
        """Take a slot; False: none was free in time."""
        with self._changed:
            self._first_tenant = self._first_tenant or tenant
            if tenant is not None and tenant != self._first_tenant:
                self._max_each = max(1, self._count - max(1, self._count // 8))
            if not self._changed.wait_for(lambda: self._has_room(tenant), timeout_seconds):
                return False
            self._held[tenant] += 1
            return True

    def release(self, tenant: str | None) -> None:
        """Free a slot of the tenant."""
        with self._changed:
            self._held[tenant] -= 1
            self._held += Counter()  # without tenants that hold none
            self._changed.notify_all()

    def _has_room(self, tenant: str | None) -> bool:
        has_share = tenant is None or self._held[tenant] < self._max_each
        return has_share and self._held.total() < self._count
