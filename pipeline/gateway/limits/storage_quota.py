"""Storage quotas: the number and bytes of a tenant's files, summed from the names of its index markers.

The markers are listed at an interval, and more often near a quota. Between listings the gateway adds the files that it
stores and subtracts those that it removes. So most uploads need no listing, and several gateways together exceed a
quota by at most what the others store between two listings.
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
"""The share of a quota above which the markers are listed more often."""

_MAX_TENANTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class StorageQuota:
    """The storage quota of a tenant. None: no limit.

    Attributes:
        max_bytes: the sum over all files.  max_files: the number of files.
    """

    max_bytes: int | None = None
    max_files: int | None = None


@dataclass(slots=True)
class _Usage:
    """The usage of a tenant.

    Attributes:
        num_files, num_bytes: of files that are stored.  uploads: marker -> bytes of files that are being stored.
        listed_at: when its markers were last listed, monotonic.
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
    """Tracks the storage that tenants use in the root. Thread-safe."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._usage: dict[str, _Usage] = {}
        self._lock = threading.Lock()

    def check(self, tenant: str, size: int, quota: StorageQuota) -> None:
        """Raises `ApiError` (400) when a file of `size` bytes would exceed the quota."""
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
    def reserve(self, tenant: str, marker: str, size: int, quota: StorageQuota) -> Iterator[None]:
        """Reserve space for a file that the block stores; raises `ApiError` (400) when it would exceed the quota."""
        self.check(tenant, size, quota)
        usage = self._known(tenant)
        with self._lock:  # concurrent uploads count each other
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

    def subtract(self, tenant: str, size: int) -> None:
        """Subtract a removed file of `size` bytes."""
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
        """Sum the markers, without those of uploads in progress, which count until they end. Changes during the listing
        are added to the sum, so a file may count twice until the next listing."""
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


def _exceeds(usage: _Usage, size: int, quota: StorageQuota, share: float) -> bool:
    """Whether one more file of `size` bytes exceeds that share of the quota."""
    too_many = quota.max_files is not None and usage.total_files + 1 > share * quota.max_files
    return too_many or (quota.max_bytes is not None and usage.total_bytes + size > share * quota.max_bytes)


def _quota_exceeded(usage: _Usage, size: int, quota: StorageQuota) -> ApiError:
    """The error is 400, as in OpenAI's API: its clients don't retry the upload."""
    if quota.max_files is not None and usage.total_files >= quota.max_files:
        what = f"{usage.total_files:,} files are stored, and {quota.max_files:,} may be"
    else:
        what = f"{usage.total_bytes:,} of {quota.max_bytes or 0:,} bytes are stored, and the file has {size:,}"
    message = f"you have exceeded your file storage quota: {what}; delete files, or ask the operator for more"
    return ApiError(400, "storage_quota_exceeded", message, param="file")
