"""API keys: `keys/ID.json` each, with the hash of its secret and never the secret; `keys/ID.revoked` ends one.

A key's text is `tm-ID-SECRET`. It is looked up by its id, and what was found is believed for a few seconds. A revoked
key stays on record: so an installation that ever had keys never becomes open again because the last of them went.

Ids that were never seen are looked up one by one at a bounded rate. Beyond it the ids of all keys are listed, once in a
few seconds, and others are refused without a read: so a flood of made-up keys costs the store no more than that, and a
new key works within seconds all the same.
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
_PAPER: Final = ".json"
_REVOKED: Final = ".revoked"
_TEXT = re.compile(r"tm-([0-9a-f]{16})-([0-9a-f]{64})")
_ID = re.compile(r"[0-9a-f]{16}")
_MOST_KNOWN: Final = 10_000
_MAX_READS_PER_SECOND: Final = 10.0
"""Of ids that were never seen."""


_LISTED_SECONDS: Final = 5.0

Entry = TypeVar("Entry")


class Scope(StrEnum):
    """What a key is good for. `METRICS` is for programs that watch; `ADMIN` is good for all."""

    FILES = "files"
    BATCHES = "batches"
    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


class KeyNotFound(PipelineError):
    """Raised when there is no key of an id."""


class ApiKey(StoredModel):
    """`keys/ID.json`.

    Attributes:
        digest: sha256 of the secret, which is 32 random bytes: nobody guesses it, so it needs no slow hash.
        max_tokens: a request over the lane that asks for more is refused; None: as its tier says.
        limits: of this key, before those of all keys.
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
    """A key as listings show it."""

    key: ApiKey
    revoked: bool


class ApiKeys:
    """The keys of the root that `world.store` is. Threads may share one.

    Args:
        believed: seconds for which what was read is not read again.
    """

    def __init__(self, world: World, believed: float = 5.0) -> None:
        self._world = world
        self._store: ObjectStore = world.store
        self._believed = believed
        self._known: OrderedDict[str, tuple[float, ApiKey | None]] = OrderedDict()
        self._unknown: OrderedDict[str, float] = OrderedDict()  # ids without a key: until when that is believed
        self._ids: tuple[float, frozenset[str]] = (float("-inf"), frozenset())
        self._reads = _MAX_READS_PER_SECOND  # that may be made at once
        self._reads_at = world.clock.monotonic()
        self._any: tuple[float, bool] = (float("-inf"), False)
        self._lock = threading.Lock()
        self._listing = threading.Lock()

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
        """A new key, and its text, which nobody can know again."""
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
            if self._store.create(f"{KEYS}{key.id}{_PAPER}", key.to_json()):
                return key, f"tm-{key.id}-{secret}"

    def listed(self) -> Iterator[ListedKey]:
        """All that there ever were, by id."""
        names = [info.key.removeprefix(KEYS) for info in self._store.list(KEYS)]
        for name in names:
            if name.endswith(_PAPER) and (key := self._load(name.removesuffix(_PAPER))) is not None:
                yield ListedKey(key, f"{key.id}{_REVOKED}" in names)

    def revoke(self, key_id: str) -> ApiKey:
        """The key is good for nothing any more, here at once and elsewhere within seconds; raises `KeyNotFound`."""
        key = self._load(key_id) if _ID.fullmatch(key_id) else None
        if key is None:
            raise KeyNotFound(f"there is no key {key_id[:40]!r}; 'tokenmill keys list' shows them")
        self._store.create(f"{KEYS}{key_id}{_REVOKED}", b"")
        with self._lock:
            self._known.pop(key_id, None)
        return key

    def exist(self) -> bool:
        """Whether there ever was a key."""
        now = self._world.clock.monotonic()
        if not self._any[1] and now >= self._any[0]:  # what once was stays so
            self._any = now + self._believed, next(self._store.list(KEYS), None) is not None
        return self._any[1]

    def check(self, text: str) -> ApiKey | None:
        """The key of this text; None when it is wrong, revoked or expired."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        key = self._find(match[1])
        if key is None or not hmac.compare_digest(key.digest, _digest(match[2])):
            return None
        expired = key.expires_at is not None and key.expires_at <= self._world.clock.now()
        return None if expired else key

    def _find(self, key_id: str) -> ApiKey | None:
        """A key that is not revoked."""
        now = self._world.clock.monotonic()
        with self._lock:
            known = self._known.get(key_id)
            if known is not None and now < known[0]:
                return known[1]
            if known is None and now < self._unknown.get(key_id, now):
                return None
            may_read = known is not None or self._may_read(now)
        if not may_read and not self._is_listed(key_id, now):
            return None
        key = self._load(key_id)
        if key is None:
            self._remember(self._unknown, key_id, now + self._believed)
            return None
        if self._store.info(f"{KEYS}{key_id}{_REVOKED}") is not None:
            self._remember(self._known, key_id, (now + self._believed, None))
            return None
        self._remember(self._known, key_id, (now + self._believed, key))
        return key

    def _remember(self, entries: OrderedDict[str, Entry], key_id: str, entry: Entry) -> None:
        """Made-up ids put out no keys: they have a place of their own."""
        with self._lock:
            entries[key_id] = entry
            entries.move_to_end(key_id)
            while len(entries) > _MOST_KNOWN:
                entries.popitem(last=False)

    def _may_read(self, now: float) -> bool:
        """Whether one more id that was never seen may be looked up now; counts it."""
        self._reads = min(_MAX_READS_PER_SECOND, self._reads + (now - self._reads_at) * _MAX_READS_PER_SECOND)
        self._reads_at = now
        if self._reads < 1:
            return False
        self._reads -= 1
        return True

    def _is_listed(self, key_id: str, now: float) -> bool:
        """Whether the key stood a few seconds ago."""
        with self._listing:  # not the other lock: keys that are known wait for no listing
            if now >= self._ids[0]:
                names = (info.key.removeprefix(KEYS) for info in self._store.list(KEYS))
                ids = frozenset(name.removesuffix(_PAPER) for name in names if name.endswith(_PAPER))
                self._ids = now + max(self._believed, _LISTED_SECONDS), ids
            return key_id in self._ids[1]

    def _load(self, key_id: str) -> ApiKey | None:
        where = f"{KEYS}{key_id}{_PAPER}"
        try:
            return parse_stored(self._store.locate(where), self._store.read(where), ApiKey)
        except ObjectNotFound:
            return None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
