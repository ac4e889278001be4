"""API keys: `keys/ID.json` each, with the hash of its secret and never the secret; `keys/ID.revoked` ends one.

A key's text is `tm-ID-SECRET`. It is looked up by its id, and what was found is believed for a few seconds. A revoked
key stays on record: so an installation that ever had keys never becomes open again because the last of them went.
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
from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, Field

from pipeline.ledger import read_paper
from pipeline.ports import ObjectNotFound, ObjectStore, PipelineError, World
from schemas.limits import RateLimits
from schemas.papers import Paper, Sha256

KEYS: Final = "keys/"
_PAPER: Final = ".json"
_REVOKED: Final = ".revoked"
_TEXT = re.compile(r"tm-([0-9a-f]{16})-([0-9a-f]{64})")
_ID = re.compile(r"[0-9a-f]{16}")
_MOST_KNOWN: Final = 10_000


class Scope(StrEnum):
    """What a key is good for. `METRICS` is for programs that watch; `ADMIN` is good for all."""

    FILES = "files"
    BATCHES = "batches"
    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


class KeyNotFound(PipelineError):
    """Raised when there is no key of an id."""


class ApiKey(Paper):
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
        self._any: tuple[float, bool] = (float("-inf"), False)
        self._lock = threading.Lock()

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
        key = self._load(key_id)
        if key is not None and self._store.info(f"{KEYS}{key_id}{_REVOKED}") is not None:
            key = None
        with self._lock:
            self._known[key_id] = now + self._believed, key
            self._known.move_to_end(key_id)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return key

    def _load(self, key_id: str) -> ApiKey | None:
        where = f"{KEYS}{key_id}{_PAPER}"
        try:
            return read_paper(self._store.locate(where), self._store.read(where), ApiKey)
        except ObjectNotFound:
            return None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
