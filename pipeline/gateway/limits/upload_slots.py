"""Upload slots: they bound the concurrent uploads, and one tenant never holds all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.gateway.http.errors import unavailable


class UploadSlots:
    """Slots for concurrent uploads, of which a tenant holds half at most. For one event loop.

    Args:
        max_uploads: concurrent uploads of all tenants.
    """

    def __init__(self, max_uploads: int) -> None:
        self._max_uploads = max_uploads
        self._max_of_tenant = max(1, max_uploads // 2)
        self._taken: Counter[str] = Counter()

    @contextmanager
    def take_slot(self, tenant: str) -> Iterator[None]:
        """Hold a slot until the block ends; raises `ApiError` (503) when none is free."""
        most = self._max_of_tenant
        if self._taken.total() >= self._max_uploads:
            raise unavailable(f"{self._max_uploads} uploads are under way; send this one later", "too_many_uploads")
        if self._taken[tenant] >= most:
            raise unavailable(f"{most} uploads of yours are under way; send this one later", "too_many_uploads")
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
