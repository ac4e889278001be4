"""How much a tenant has stored: the number and bytes of its files, added up from the names of their markers.

Markers are listed once in a while, and more often near a quota; in between this gateway adds what it stores itself, and
subtracts what it removes. So an upload lists nothing as a rule, and several gateways may exceed a quota by no more than
what the others store between two listings.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.records import read_marker
from pipeline.ledger.tenant_index import files_of
from pipeline.ports import Clock, ObjectStore

REFRESH_SECONDS: Final = 60.0
NEAR_REFRESH_SECONDS: Final = 5.0
NEAR: Final = 0.75
"""Part of a quota from which on the markers are listed more often."""

_MAX_TENANTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class StorageQuota:
    """Of a tenant. None: no limit.

    Attributes:
        max_bytes: of all its files together.  max_files: how many they are.
    """

    max_bytes: int | None = None
    max_files: int | None = None


@dataclass(slots=True)
class _Usage:
    """A tenant's.

    Attributes:
        num_files, num_bytes: of files that are stored.  uploads: marker -> bytes of those that are being stored.
        listed_at: when its markers were listed last, monotonic.
    """

    num_files: int = 0
    num_bytes: int = 0
    uploads: dict[str, int] = field(default_factory=dict)
    listed_at: float = -math.inf

    @property
    def total_files(self) -> int:
        return self.num_files + len(self.uploads)

    @property
    def total_bytes(self) -> int:
        return self.num_bytes + sum(self.uploads.values())


class StoredUsage:
    """Knows what tenants have stored in the root. Threads may share one."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._usage: dict[str, _Usage] = {}
        self._lock = threading.Lock()

    def check(self, tenant: str, size: int, quota: StorageQuota) -> None:
        """Raises `ApiError` (400) when a file of so many bytes would exceed the quota."""
        if quota == StorageQuota():
            return
        usage = self._known(tenant)
        age = self._clock.monotonic() - usage.listed_at
        near = _exceeds(usage, size, quota, NEAR)
        if age >= REFRESH_SECONDS or (near and age >= NEAR_REFRESH_SECONDS):
            self._list(tenant, usage)
        if _exceeds(usage, size, quota, 1.0):
            raise _quota_exceeded(usage, size, quota)

    @contextmanager
    def adding(self, tenant: str, marker: str, size: int, quota: StorageQuota) -> Iterator[None]:
        """Count a file that the block stores; raises `ApiError` (400) when it would exceed the quota."""
        self.check(tenant, size, quota)
        usage = self._known(tenant)
        with self._lock:  # of several at once, each sees the others
            if _exceeds(usage, size, quota, 1.0):
                raise _quota_exceeded(usage, size, quota)
            usage.uploads[marker] = size
        stored = 0
        try:
            yield
            stored = 1
        finally:
            with self._lock:
                usage.uploads.pop(marker, None)
                usage.num_files += stored
                usage.num_bytes += stored * size

    def removed(self, tenant: str, size: int) -> None:
        """A file of so many bytes is gone."""
        usage = self._known(tenant)
        with self._lock:
            usage.num_files = max(0, usage.num_files - 1)
            usage.num_bytes = max(0, usage.num_bytes - size)

    def _known(self, tenant: str) -> _Usage:
        with self._lock:
            if tenant not in self._usage and len(self._usage) >= _MAX_TENANTS:
                self._usage.clear()
            return self._usage.setdefault(tenant, _Usage())

    def _list(self, tenant: str, usage: _Usage) -> None:
        """Add the markers up, without those of uploads that are being stored: these count until they end. What changes
        meanwhile is added to the sum: it may count twice until the next listing."""
        with self._lock:
            before, uploads = (usage.num_files, usage.num_bytes), set(usage.uploads)
        num_files = num_bytes = 0
        for name in files_of(tenant).newest(self._store):
            if name not in uploads:
                num_files += 1
                num_bytes += read_marker(name).size
        with self._lock:
            usage.num_files = max(0, num_files + usage.num_files - before[0])
            usage.num_bytes = max(0, num_bytes + usage.num_bytes - before[1])
            usage.listed_at = self._clock.monotonic()


def _exceeds(usage: _Usage, size: int, quota: StorageQuota, part: float) -> bool:
    """Whether one more file of so many bytes is beyond that part of the quota."""
    too_many = quota.max_files is not None and usage.total_files + 1 > part * quota.max_files
    return too_many or (quota.max_bytes is not None and usage.total_bytes + size > part * quota.max_bytes)


def _quota_exceeded(usage: _Usage, size: int, quota: StorageQuota) -> ApiError:
    """400, as OpenAI answers: its clients don't send the upload again."""
    if quota.max_files is not None and usage.total_files >= quota.max_files:
        what = f"{usage.total_files:,} files are stored, and {quota.max_files:,} may be"
    else:
        what = f"{usage.total_bytes:,} of {quota.max_bytes or 0:,} bytes are stored, and the file has {size:,}"
    message = f"you have exceeded your file storage quota: {what}; delete files, or ask the operator for more"
    return ApiError(400, "storage_quota_exceeded", message, param="file")
