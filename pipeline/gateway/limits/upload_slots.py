"""Places of uploads: one tenant never has all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.gateway.http.errors import unavailable


class UploadSlots:
    """So many places, of which a tenant has half at most. For one event loop.

    Args:
        most: uploads at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._each = max(1, most // 2)
        self._taken: Counter[str] = Counter()

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """One, until the block ends; raises `ApiError` (503)."""
        if self._taken.total() >= self._most:
            raise unavailable(f"{self._most} uploads are under way; send this one later", "too_many_uploads")
        if self._taken[tenant] >= self._each:
            raise unavailable(f"{self._each} uploads of yours are under way; send this one later", "too_many_uploads")
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
