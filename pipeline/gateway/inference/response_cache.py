"""Answers that are given again, to whoever asks exactly the same: of one tenant, to a request whose answer is always
the same (greedy, or with a seed), from the very same weights, judged by the very same content policies, for a while.

It saves work and nothing else: what can't be read is computed, and what can't be written is left out.
"""

from __future__ import annotations

import hashlib
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
from schemas.workers.lane import LaneRequest

MARK: Final = "tokenmill_cached"
"""In `usage` of an answer that was given before."""
_AWAY_SECONDS: Final = 5.0
_KEPT_REASONS: Final = frozenset({"stop", "length"})
_CARRIED: Final = frozenset({"model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key"})
"""Fields of a body that don't change its answer. The model's weights are in the key; its name isn't needed."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What is kept.

    Attributes:
        seconds: for which an answer is.  entry_bytes: of the largest one.  entries: of each tenant.
        always: also where a request doesn't ask for it.
    """

    seconds: float = 3_600.0
    entry_bytes: int = 1 << 18
    entries: int = 10_000
    always: bool = False


class AnswerStore(Protocol):
    """Where answers lie. The Redis one raises `ServiceUnavailable`."""

    def get(self, tenant: str, key: str) -> bytes | None:
        """What was put under this key, while its time lasts."""
        ...

    def put(self, tenant: str, key: str, data: bytes, seconds: float, most: int) -> None:
        """Keep it; of the tenant's, those that were put first go when there are more than `most`."""
        ...


@dataclass(slots=True)
class _TenantAnswers:
    """One tenant's, those that were put first at the front: (until when, data) by key."""

    kept: OrderedDict[str, tuple[float, bytes]] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class MemoryAnswers:
    """Of one process. Threads may share it.

    Args:
        most_bytes: of all answers; those go that the tenant which holds most bytes put first.
    """

    def __init__(self, clock: Clock, most_bytes: int = 256 << 20) -> None:
        self._clock = clock
        self._most_bytes = most_bytes
        self._tenants: dict[str, _TenantAnswers] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, tenant: str, key: str) -> bytes | None:
        """What was put under this key, while its time lasts."""
        with self._lock:
            theirs = self._tenants.get(tenant)
            if theirs is None or key not in theirs.kept:
                return None
            until, data = theirs.kept[key]
            if until <= self._clock.monotonic():
                self._remove(tenant, key)
                return None
            return data

    def put(self, tenant: str, key: str, data: bytes, seconds: float, most: int) -> None:
        """Keep it; of the tenant's, those that were put first go when there are more than `most`."""
        with self._lock:
            theirs = self._tenants.setdefault(tenant, _TenantAnswers())
            if key in theirs.kept:
                self._bytes -= len(theirs.kept[key][1])
                theirs.num_bytes -= len(theirs.kept.pop(key)[1])
            theirs.kept[key] = self._clock.monotonic() + seconds, data
            theirs.num_bytes += len(data)
            self._bytes += len(data)
            if len(theirs.kept) > most:
                self._remove(tenant, next(iter(theirs.kept)))
            while self._bytes > self._most_bytes:
                largest = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
                self._remove(largest, next(iter(self._tenants[largest].kept)))

    def _remove(self, tenant: str, key: str) -> None:
        theirs = self._tenants[tenant]
        size = len(theirs.kept.pop(key)[1])
        theirs.num_bytes -= size
        self._bytes -= size
        if not theirs.kept:
            del self._tenants[tenant]


class AnswerCache:
    """Reads and writes answers. Threads may share one."""

    def __init__(self, clock: Clock, store: AnswerStore, settings: CacheSettings | None = None) -> None:
        self.settings = settings or CacheSettings()
        self._clock = clock
        self._store = store
        self._away_until = -math.inf

    def find(self, tenant: str, key: str) -> dict[str, Any] | None:
        """The answer that was given to this, marked as such."""
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

    def keep(self, tenant: str, key: str, response: Mapping[str, Any]) -> None:
        """Keep an answer, if it is one that may be given again."""
        if self._away() or not _may_be_kept(response):
            return
        data = orjson.dumps(response)
        if len(data) > self.settings.entry_bytes:
            return
        try:
            self._store.put(tenant, key, data, self.settings.seconds, self.settings.entries)
        except ServiceUnavailable as error:
            self._stay_away(error)

    def _away(self) -> bool:
        return self._clock.monotonic() < self._away_until

    def _stay_away(self, error: ServiceUnavailable) -> None:
        self._away_until = self._clock.monotonic() + _AWAY_SECONDS
        logger.warning("cache_not_used", reason=str(error), seconds=_AWAY_SECONDS)


def cache_key(request: LaneRequest, default_max_tokens: int, policies: str | None = None) -> str:
    """The same for all requests that have the same answer: what they ask, of which weights, and what judges it."""
    body = {name: value for name, value in request.body.items() if name not in _CARRIED}
    facts = {"url": request.url, "model": request.model, "default_max_tokens": default_max_tokens, "body": body}
    facts["policies"] = policies
    return hashlib.sha256(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _may_be_kept(response: Mapping[str, Any]) -> bool:
    """Whole, as nobody objected to it, and already known to be one that was computed."""
    if "usage" not in response or MARK in response["usage"]:
        return False
    choices = response.get("choices", [])
    return all(
        choice.get("finish_reason") in _KEPT_REASONS and not (choice.get("message") or {}).get("tool_calls")
        for choice in choices
    )
