"""Decides the order in which the lane's requests are prepared: fair between tenants, on a few threads.

Tokenizing ten megabytes or compiling a grammar takes seconds. One tenant therefore never occupies all threads, nor do
large requests: a small request of another tenant finds a thread that is free or soon will be. A tenant's requests are
prepared in the order of their arrival, except that small ones overtake a large one, a bounded number of times.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

from schemas.workers.lane import LaneRequest

LARGE_BYTES: Final = 64 << 10
"""Size from which a body is large. Tokenizing a smaller one takes milliseconds."""

NODE_BYTES: Final = 8
"""Size that a number, a name or a list of a body adds to that of its text."""

MAX_OVERTAKEN: Final = 8
"""Small requests of a tenant that may overtake a large one of the same tenant."""


@dataclass(slots=True)
class _Tenant:
    """Waiting requests of one tenant, the oldest first. `overtaken`: small ones that overtook the first large one."""

    small: deque[LaneRequest] = field(default_factory=deque)
    large: deque[LaneRequest] = field(default_factory=deque)
    overtaken: int = 0


class PreparationQueue:
    """Queue of requests that wait to be prepared. Threads run `work`; any thread may put and discard.

    Args:
        prepare: prepares one request, and ends it if it can't be prepared.
        threads: number of threads that run `work`.
    """

    def __init__(self, prepare: Callable[[LaneRequest], None], threads: int) -> None:
        self._prepare = prepare
        self._max_threads_each = max(1, threads - 1)
        self._changed = threading.Condition()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the least recently served one first
        self._preparing: Counter[str] = Counter()  # by tenant
        self._preparing_large = 0
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a request waits or is being prepared."""
        with self._changed:
            return bool(self._tenants or self._preparing)

    def put(self, request: LaneRequest) -> None:
        """Add a request."""
        with self._changed:
            tenant = self._tenants.setdefault(request.tenant, _Tenant())
            (tenant.large if is_large(request.body) else tenant.small).append(request)
            self._changed.notify_all()

    def discard(self, unwanted: Collection[tuple[str, int]]) -> list[LaneRequest]:
        """Remove and return those of these requests (id, attempt) that still wait."""
        with self._changed:
            return self._remove(lambda request: (request.id, request.attempt) in unwanted)

    def close(self) -> list[LaneRequest]:
        """End `work` on all threads after their current requests. Removes and returns the requests that still wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._remove(lambda request: True)

    def work(self) -> None:
        """Prepare requests until the queue is closed."""
        while (found := self._next()) is not None:
            request, large = found
            try:
                self._prepare(request)
            finally:
                with self._changed:
                    self._preparing -= Counter((request.tenant,))  # removes the tenant at zero
                    self._preparing_large -= large
                    self._changed.notify_all()

    def _next(self) -> tuple[LaneRequest, bool] | None:
        """Wait for the next request; returns it and whether it is large. None: the queue is closed."""
        with self._changed:
            while not self._closed:
                if (found := self._first()) is not None:
                    return found
                self._changed.wait()
            return None

    def _first(self) -> tuple[LaneRequest, bool] | None:
        """The next request of the least recently served tenant among those with the fewest requests in preparation."""
        may_be_large = self._preparing_large < self._max_threads_each
        ready = [
            name
            for name, tenant in self._tenants.items()
            if self._preparing[name] < self._max_threads_each and (tenant.small or may_be_large)
        ]
        if not ready:
            return None
        name = min(ready, key=self._preparing.__getitem__)
        tenant = self._tenants[name]
        large = not tenant.small or (may_be_large and bool(tenant.large) and tenant.overtaken >= MAX_OVERTAKEN)
        tenant.overtaken = 0 if large else tenant.overtaken + bool(tenant.large)
        request = (tenant.large if large else tenant.small).popleft()
        self._tenants.move_to_end(name)
        if not (tenant.small or tenant.large):
            del self._tenants[name]
        self._preparing[name] += 1
        self._preparing_large += large
        return request, large

    def _remove(self, chosen: Callable[[LaneRequest], bool]) -> list[LaneRequest]:
        found: list[LaneRequest] = []
        for name, tenant in list(self._tenants.items()):
            for waiting in (tenant.small, tenant.large):
                found += filter(chosen, waiting)
                remaining = [request for request in waiting if not chosen(request)]
                waiting.clear()
                waiting.extend(remaining)
            if not (tenant.small or tenant.large):
                del self._tenants[name]
        return found


def is_large(body: dict[str, Any]) -> bool:
    """Whether preparing the body may take long, judged by its size. Visits no more of it than it must."""
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
