"""API keys. `keys/ID.json` stores a key with the hash of its secret, never the secret; `keys/ID.revoked` revokes it.

A key's text is `tm-ID-SECRET`. Keys are looked up by id, and results are cached for a few seconds. The record of a
revoked key is not deleted, so an installation that ever had keys doesn't become open when the last one is revoked.

Unknown ids are looked up one by one at a bounded rate. Above that rate the ids of all keys are listed at most once in a
few seconds, and ids that aren't listed are refused without a read. So a flood of invented keys adds a bounded load on
the store, and a new key still works within seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final, Literal, TypeVar

from pydantic import AwareDatetime, Field

from pipeline.ledger.ledger import parse_stored
from pipeline.ports import ObjectNotFound, ObjectStore, PipelineError, World
from schemas.requests.limits import RateLimits
from schemas.stored import Sha256, StoredModel

KEYS: Final = "keys/"
_RECORD_SUFFIX: Final = ".json"
_REVOKED_SUFFIX: Final = ".revoked"
_TEXT = re.compile(r"tm-([0-9a-f]{16})-([0-9a-f]{64})")
_ID = re.compile(r"[0-9a-f]{16}")
_MAX_CACHED_KEYS: Final = 10_000
_MAX_READS_PER_SECOND: Final = 10.0
"""The bound for ids that aren't in the cache."""

_LISTING_SECONDS: Final = 5.0

Entry = TypeVar("Entry")


class Scope(StrEnum):
    """The permissions of a key. `METRICS` is for monitoring; `ADMIN` includes all others."""

    FILES = "files"
    BATCHES = "batches"
    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


class KeyNotFound(PipelineError):
    """Raised when no key has the given id."""


class ApiKey(StoredModel):
    """The stored record of a key: `keys/ID.json`.

    Attributes:
        digest: sha256 of the secret. The secret is 32 random bytes and can't be guessed, so it needs no slow hash.
        max_tokens: interactive requests for more output tokens are refused; None: the limit of the tier applies.
        limits: of this key; they have precedence over the limits of all keys.
    """

    version: Literal[1] = 1
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    digest: Sha256
    tenant: Annotated[str, Field(min_length=1, max_length=256)]
    scopes: tuple[Scope, ...]
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    label: Annotated[str, Field(max_length=200)] = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    limits: RateLimits = RateLimits()


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A key and whether it is revoked, as listings show it."""

    key: ApiKey
    revoked: bool


class ApiKeys:
    """The API keys in `world.store`, with a cache. Thread-safe.

    Args:
        believed: seconds for which a lookup is cached.
    """

    def __init__(self, world: World, believed: float = 5.0) -> None:
        self._world = world
        self._store: ObjectStore = world.store
        self._believed = believed
        self._cached_keys: OrderedDict[str, tuple[float, ApiKey | None]] = OrderedDict()
        self._missing_ids: OrderedDict[str, float] = OrderedDict()  # id without a key -> when the entry expires
        self._listed_ids: tuple[float, frozenset[str]] = (float("-inf"), frozenset())
        self._read_tokens = _MAX_READS_PER_SECOND  # of a token bucket
        self._read_tokens_at = world.clock.monotonic()
        self._has_keys: tuple[float, bool] = (float("-inf"), False)
        self._lock = threading.Lock()
        self._listing_lock = threading.Lock()

    def create(
        self,
        tenant: str,
        scopes: tuple[Scope, ...],
        *,
        expires_at: datetime | None = None,
        label: str = "",
        max_tokens: int | None = None,
        limits: RateLimits | None = None,
    ) -> tuple[ApiKey, str]:
        """Create a key; returns it and its text, which can't be recovered later."""
        secret = self._world.random.token(32).hex()
        while True:
            key = ApiKey(
                id=self._world.random.token(8).hex(),
                digest=_digest(secret),
                tenant=tenant,
                scopes=scopes,
                created_at=self._world.clock.now(),
                expires_at=expires_at,
                label=label,
                max_tokens=max_tokens,
                limits=limits or RateLimits(),
            )
            if self._store.create(f"{KEYS}{key.id}{_RECORD_SUFFIX}", key.to_json()):
                return key, f"tm-{key.id}-{secret}"

    def listed(self) -> Iterator[ListedKey]:
        """All keys that were ever created, by id, revoked ones included."""
        names = [info.key.removeprefix(KEYS) for info in self._store.list(KEYS)]
        for name in names:
            if name.endswith(_RECORD_SUFFIX) and (key := self._load(name.removesuffix(_RECORD_SUFFIX))) is not None:
                yield ListedKey(key, f"{key.id}{_REVOKED_SUFFIX}" in names)

    def revoke(self, key_id: str) -> ApiKey:
        """Revoke the key: in this process at once, in others within seconds. Raises `KeyNotFound`."""
        key = self._load(key_id) if _ID.fullmatch(key_id) else None
        if key is None:
            raise KeyNotFound(f"there is no key {key_id[:40]!r}; 'tokenmill keys list' shows them")
        self._store.create(f"{KEYS}{key_id}{_REVOKED_SUFFIX}", b"")
        with self._lock:
            self._cached_keys.pop(key_id, None)
        return key

    def has_keys(self) -> bool:
        """Whether a key was ever created."""
        now = self._world.clock.monotonic()
        if not self._has_keys[1] and now >= self._has_keys[0]:  # once true, it stays true
            self._has_keys = now + self._believed, next(self._store.list(KEYS), None) is not None
        return self._has_keys[1]

    def check(self, text: str) -> ApiKey | None:
        """The key with this text; None when the text is wrong or the key is revoked or expired."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        key = self._find(match[1])
        if key is None or not hmac.compare_digest(key.digest, _digest(match[2])):
            return None
        expired = key.expires_at is not None and key.expires_at <= self._world.clock.now()
        return None if expired else key

    def _find(self, key_id: str) -> ApiKey | None:
        """The key with this id, unless it is revoked."""
        now = self._world.clock.monotonic()
        with self._lock:
            cached = self._cached_keys.get(key_id)
            if cached is not None and now < cached[0]:
                return cached[1]
            if cached is None and now < self._missing_ids.get(key_id, now):
                return None
            may_read = cached is not None or self._take_read_token(now)
        if not may_read and not self._is_listed(key_id, now):
            return None
        key = self._load(key_id)
        if key is None:
            self._cache(self._missing_ids, key_id, now + self._believed)
            return None
        if self._store.info(f"{KEYS}{key_id}{_REVOKED_SUFFIX}") is not None:
            self._cache(self._cached_keys, key_id, (now + self._believed, None))
            return None
        self._cache(self._cached_keys, key_id, (now + self._believed, key))
        return key

    def _cache(self, entries: OrderedDict[str, Entry], key_id: str, entry: Entry) -> None:
        """Add an entry to one of the two caches. Missing ids have their own cache, so they evict no keys."""
        with self._lock:
            entries[key_id] = entry
            entries.move_to_end(key_id)
            while len(entries) > _MAX_CACHED_KEYS:
                entries.popitem(last=False)

    def _take_read_token(self, now: float) -> bool:
        """Take a token for the lookup of an id that isn't cached; False when the bucket is empty."""
        added = (now - self._read_tokens_at) * _MAX_READS_PER_SECOND
        self._read_tokens = min(_MAX_READS_PER_SECOND, self._read_tokens + added)
        self._read_tokens_at = now
        if self._read_tokens < 1:
            return False
        self._read_tokens -= 1
        return True

    def _is_listed(self, key_id: str, now: float) -> bool:
        """Whether the key is in the listing of all ids, which is at most some seconds old."""
        with self._listing_lock:  # not `_lock`: lookups of cached keys don't wait for the listing
            if now >= self._listed_ids[0]:
                names = (info.key.removeprefix(KEYS) for info in self._store.list(KEYS))
                ids = frozenset(name.removesuffix(_RECORD_SUFFIX) for name in names if name.endswith(_RECORD_SUFFIX))
                self._listed_ids = now + max(self._believed, _LISTING_SECONDS), ids
            return key_id in self._listed_ids[1]

    def _load(self, key_id: str) -> ApiKey | None:
        object_key = f"{KEYS}{key_id}{_RECORD_SUFFIX}"
        try:
            return parse_stored(self._store.locate(object_key), self._store.read(object_key), ApiKey)
        except ObjectNotFound:
            return None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
