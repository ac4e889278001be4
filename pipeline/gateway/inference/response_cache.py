"""The response cache: an identical request of the same tenant gets the stored response for a while.

Only deterministic requests (greedy, or with a seed) are cached. Their keys are those of a job's rows
(`schemas.requests.request_key`): the weights and the content policies enter them.
The cache never fails a request: when it can't be read, the response is computed; when it can't be written, the response
isn't cached.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson
import structlog

from pipeline.ports import Clock
from pipeline.runtime.availability import ServiceUnavailable
from schemas.requests.policy_report import may_be_repeated
from schemas.settings.gateway import CacheOptions

MARK: Final = "tokenmill_cached"
"""The field in `usage` that marks a response from the cache."""
_AWAY_SECONDS: Final = 5.0
_CACHEABLE_FINISH_REASONS: Final = frozenset({"stop", "length"})

logger = structlog.get_logger(__name__)


class ResponseStore(Protocol):
    """Storage of cached responses. The Redis implementation raises `ServiceUnavailable`."""

    def get(self, tenant: str, key: str) -> bytes | None:
        """The entry under this key, unless it has expired."""
        ...

    def put(self, tenant: str, key: str, data: bytes, seconds: float, most: int) -> None:
        """Store an entry; the tenant's oldest entries are evicted when it has more than `most`."""
        ...


@dataclass(slots=True)
class _TenantAnswers:
    """The entries of one tenant, the oldest first: (expiry time, data) by key."""

    entries: OrderedDict[str, tuple[float, bytes]] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class MemoryResponseStore:
    """Cached responses in the memory of one process. Thread-safe.

    Args:
        max_bytes: of all responses; above it the oldest entries of the tenant that holds the most bytes are evicted.
    """

    def __init__(self, clock: Clock, max_bytes: int = 256 << 20) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._tenants: dict[str, _TenantAnswers] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, tenant: str, key: str) -> bytes | None:
        """The entry under this key, unless it has expired."""
        with self._lock:
            tenant_answers = self._tenants.get(tenant)
            if tenant_answers is None or key not in tenant_answers.entries:
                return None
            until, data = tenant_answers.entries[key]
            if until <= self._clock.monotonic():
                self._remove(tenant, key)
                return None
            return data

    def put(self, tenant: str, key: str, data: bytes, seconds: float, most: int) -> None:
        """Store an entry; the tenant's oldest entries are evicted when it has more than `most`."""
        with self._lock:
            tenant_answers = self._tenants.setdefault(tenant, _TenantAnswers())
            if key in tenant_answers.entries:
                self._bytes -= len(tenant_answers.entries[key][1])
                tenant_answers.num_bytes -= len(tenant_answers.entries.pop(key)[1])
            tenant_answers.entries[key] = self._clock.monotonic() + seconds, data
            tenant_answers.num_bytes += len(data)
            self._bytes += len(data)
            if len(tenant_answers.entries) > most:
                self._remove(tenant, next(iter(tenant_answers.entries)))
            while self._bytes > self._max_bytes:
                largest = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
                self._remove(largest, next(iter(self._tenants[largest].entries)))

    def _remove(self, tenant: str, key: str) -> None:
        tenant_answers = self._tenants[tenant]
        size = len(tenant_answers.entries.pop(key)[1])
        tenant_answers.num_bytes -= size
        self._bytes -= size
        if not tenant_answers.entries:
            del self._tenants[tenant]


class ResponseCache:
    """Reads and writes cached responses. Thread-safe."""

    def __init__(self, clock: Clock, store: ResponseStore, options: CacheOptions | None = None) -> None:
        self.options = options or CacheOptions()
        self._clock = clock
        self._store = store
        self._away_until = -math.inf

    def find(self, tenant: str, key: str) -> dict[str, Any] | None:
        """The cached response, with `MARK` in its usage; None: there is none."""
        if self._away():
            return None
        try:
            data = self._store.get(tenant, key)
        except ServiceUnavailable as error:
            self._stay_away(error)
            return None
        if data is None:
            return None
        response: dict[str, Any] = orjson.loads(data)
        return response | {"usage": response["usage"] | {MARK: True}}

    def add(self, tenant: str, key: str, response: Mapping[str, Any]) -> None:
        """Cache a response, if it is cacheable."""
        if self._away() or not _is_cacheable(response):
            return
        data = orjson.dumps(response)
        if len(data) > self.options.max_entry_bytes:
            return
        try:
            self._store.put(tenant, key, data, self.options.ttl.total_seconds(), self.options.max_tenant_entries)
        except ServiceUnavailable as error:
            self._stay_away(error)

    def _away(self) -> bool:
        return self._clock.monotonic() < self._away_until

    def _stay_away(self, error: ServiceUnavailable) -> None:
        self._away_until = self._clock.monotonic() + _AWAY_SECONDS
        logger.warning("cache_not_used", reason=str(error), seconds=_AWAY_SECONDS)


def _is_cacheable(response: Mapping[str, Any]) -> bool:
    """Whether a response is complete, passed the content policies, and isn't from the cache itself. That of a model to
    which a policy sent the request isn't cached: the key holds the requested model's weights. Nor is one that passed
    because a policy could not judge it."""
    if "usage" not in response or MARK in response["usage"] or not may_be_repeated(response):
        return False
    choices = response.get("choices", [])
    return all(
        choice.get("finish_reason") in _CACHEABLE_FINISH_REASONS and not (choice.get("message") or {}).get("tool_calls")
        for choice in choices
    )
