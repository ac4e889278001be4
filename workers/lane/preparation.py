"""The order in which the requests of callers who wait are prepared: tenants in turn, on a few threads.

Tokenizing ten megabytes or compiling a grammar takes seconds. So one tenant never has all threads, and large requests
never have all threads: a small request of another tenant finds one that is free, or soon will be. A tenant's requests
are prepared in the order in which they came, but its large ones let small ones pass, a bounded number of times.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

from schemas.workers.lane import LaneRequest

LARGE_BYTES: Final = 64 << 10
"""A body with so much in it is large: below, tokenizing takes milliseconds."""

NODE_BYTES: Final = 8
"""What a number, a name or a list of a body counts for, beside its text."""

MAX_PASSED: Final = 8
"""Small requests of a tenant that may pass a large one of its own."""


@dataclass(slots=True)
class _Tenant:
    """Requests of one tenant that wait, the oldest first. `passed`: small ones that passed the first large one."""

    small: deque[LaneRequest] = field(default_factory=deque)
    large: deque[LaneRequest] = field(default_factory=deque)
    passed: int = 0


class PreparationQueue:
    """Requests that wait to be prepared. Threads run `work`; any thread may put and discard.

    Args:
        prepare: prepares one request, and ends it where it can't be prepared.
        threads: that run `work`.
    """

    def __init__(self, prepare: Callable[[LaneRequest], None], threads: int) -> None:
        self._prepare = prepare
        self._max_each = max(1, threads - 1)
        self._changed = threading.Condition()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the one that was served longest ago first
        self._preparing: Counter[str] = Counter()  # by tenant
        self._preparing_large = 0
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a request waits or is being prepared."""
        with self._changed:
            return bool(self._tenants or self._preparing)

    def put(self, request: LaneRequest) -> None:
        """Have the request prepared."""
        with self._changed:
            tenant = self._tenants.setdefault(request.tenant, _Tenant())
            (tenant.large if is_large(request.body) else tenant.small).append(request)
            self._changed.notify_all()

    def discard(self, unwanted: Collection[tuple[str, int]]) -> list[LaneRequest]:
        """Take out those of these requests (id, attempt) that still wait."""
        with self._changed:
            return self._take_out(lambda request: (request.id, request.attempt) in unwanted)

    def close(self) -> list[LaneRequest]:
        """End `work` on all threads when what they prepare is prepared; returns the requests that still waited."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._take_out(lambda request: True)

    def work(self) -> None:
        """Prepare requests until the queue is closed."""
        while (found := self._next()) is not None:
            request, large = found
            try:
                self._prepare(request)
            finally:
                with self._changed:
                    self._preparing -= Counter((request.tenant,))  # drops the tenant at zero
                    self._preparing_large -= large
                    self._changed.notify_all()

    def _next(self) -> tuple[LaneRequest, bool] | None:
        """The next request and whether it is large; waits for one. None: the queue is closed."""
        with self._changed:
            while not self._closed:
                if (found := self._first()) is not None:
                    return found
                self._changed.wait()
            return None

    def _first(self) -> tuple[LaneRequest, bool] | None:
        """Of the tenants with the fewest requests in preparation, the first one's turn."""
        may_be_large = self._preparing_large < self._max_each
        ready = [
            name
            for name, tenant in self._tenants.items()
            if self._preparing[name] < self._max_each and (tenant.small or may_be_large)
        ]
        if not ready:
            return None
        name = min(ready, key=self._preparing.__getitem__)
        tenant = self._tenants[name]
        large = not tenant.small or (may_be_large and bool(tenant.large) and tenant.passed >= MAX_PASSED)
        tenant.passed = 0 if large else tenant.passed + bool(tenant.large)
        request = (tenant.large if large else tenant.small).popleft()
        self._tenants.move_to_end(name)
        if not (tenant.small or tenant.large):
            del self._tenants[name]
        self._preparing[name] += 1
        self._preparing_large += large
        return request, large

    def _take_out(self, chosen: Callable[[LaneRequest], bool]) -> list[LaneRequest]:
        found: list[LaneRequest] = []
        for name, tenant in list(self._tenants.items()):
            for waiting in (tenant.small, tenant.large):
                found += filter(chosen, waiting)
                kept = [request for request in waiting if not chosen(request)]
                waiting.clear()
                waiting.extend(kept)
            if not (tenant.small or tenant.large):
                del self._tenants[name]
        return found


def is_large(body: dict[str, Any]) -> bool:
    """Whether preparing the body may take long, by how much it holds; looks at no more than it must."""
    size, left = 0, list[Any]([body])
    while left and size <= LARGE_BYTES:
        node = left.pop()
        size += len(node) if isinstance(node, str) else NODE_BYTES
        if isinstance(node, dict):
            size += sum(map(len, node))
            left += node.values()
        elif isinstance(node, list):
            left += node[:LARGE_BYTES]
    return size > LARGE_BYTES
