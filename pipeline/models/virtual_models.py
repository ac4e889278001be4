"""The virtual models of a root: `virtual/*.json`, one object per name, written by `tokenmill models route set`.

A served model of the same name takes precedence. The rules name served models only, not other virtual ones, so there
are no cycles.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Final

import structlog

from pipeline.ledger.ledger import LedgerError, parse_stored
from pipeline.models.catalog import Catalog
from pipeline.ports import Clock, ObjectNotFound, ObjectStore, PipelineError
from pipeline.routing.requests import RoutedRequest
from pipeline.routing.rules import RuleRouter
from schemas.models import CatalogEntry, merged_hint
from schemas.virtual_models import VirtualModel

VIRTUAL: Final = "virtual/"
_CACHE_SECONDS: Final = 5.0
_MAX_CACHED: Final = 1_000

logger = structlog.get_logger(__name__)


class InvalidRules(PipelineError):
    """Raised when a virtual model names a model that is not served, or has the name of one that is."""


class VirtualModels:
    """The stored virtual models of a root."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._catalog = Catalog(store)

    def publish(self, virtual: VirtualModel) -> None:
        """Store the rules, in place of earlier ones. Requests get them within seconds; jobs that were accepted before
        keep theirs. Raises `InvalidRules`."""
        if self._catalog.find(virtual.name) is not None:
            raise InvalidRules(f"{virtual.name}: is the name of a served model; choose another")
        for name in dict.fromkeys(virtual.names):
            if self._catalog.find(name) is None:
                if self.find(name) is not None:
                    raise InvalidRules(f"{virtual.name}: {name} is virtual itself; rules name served models")
                known = ", ".join(entry.pin.name for entry in self._catalog.entries()) or "none: start a worker"
                raise InvalidRules(f"{virtual.name}: {name[:80]!r} is not served here ({known})")
        self._store.replace(_key(virtual.name), virtual.to_json())

    def find(self, name: str) -> VirtualModel | None:
        """The virtual model of this name; None: there is none. Raises `LedgerError` where it can't be read."""
        found = self._read(_key(name))
        if found is not None and found.name != name:
            raise LedgerError(f"{self._store.locate(_key(name))}: is of {found.name!r}, not of {name!r}; remove it")
        return found

    def remove(self, name: str) -> bool:
        """Remove the virtual model; False: there is none."""
        if self._store.info(_key(name)) is None:
            return False
        self._store.delete(_key(name))
        return True

    def all(self) -> list[VirtualModel]:
        """All virtual models, by name. One that can't be read, perhaps of a later version, is left out and logged."""
        found = []
        for info in self._store.list(VIRTUAL):
            try:
                one = self._read(info.key)
            except LedgerError as error:
                logger.warning("a virtual model can't be read", reason=str(error))
                continue
            found += [] if one is None else [one]
        return sorted(found, key=lambda one: one.name)

    def _read(self, key: str) -> VirtualModel | None:
        try:
            data = self._store.read(key)
        except ObjectNotFound:
            return None
        return parse_stored(self._store.locate(key), data, VirtualModel)


class ModelResolver:
    """Finds the model that answers a request: the served one of the name in the request, or the one that the rules of
    a virtual one choose. What it reads is cached for some seconds. Thread-safe."""

    def __init__(self, store: ObjectStore, clock: Clock, router: RuleRouter | None = None) -> None:
        self.router = router or RuleRouter()
        self._catalog = Catalog(store)
        self._virtual = VirtualModels(store)
        self._clock = clock
        self._lock = threading.Lock()
        self._cached: dict[str, tuple[float, CatalogEntry | VirtualModel]] = {}  # name -> (until, entry)

    def find(self, name: str) -> CatalogEntry | VirtualModel | None:
        """The served or virtual model of this name; None: there is none."""
        now = self._clock.monotonic()
        cached = self._cached.get(name)
        if cached is not None and now < cached[0]:
            return cached[1]
        found = self._catalog.find(name) or self._virtual.find(name)
        if found is not None:
            with self._lock:
                if len(self._cached) >= _MAX_CACHED:
                    self._cached.clear()
                self._cached[name] = now + _CACHE_SECONDS, found
        return found

    def choose(self, virtual: VirtualModel, request: RoutedRequest) -> CatalogEntry:
        """The entry of the model that answers a request to a virtual model. Raises `InvalidRules` when it is not in
        the catalog any more."""
        entries = {name: entry for name in virtual.models if isinstance(entry := self.find(name), CatalogEntry)}
        keys = {name: entry.pin.key for name, entry in entries.items()}
        (name,) = self.router.choose(virtual, keys, [request])
        if name not in entries:
            raise InvalidRules(f"{virtual.name}: its rules chose {name[:80]!r}, which is not in the catalog any more")
        return entries[name]

    def why_missing(self, name: str) -> str | None:
        """The message that there is no such model, with the names that there are; None: no model is served yet."""
        served = [entry.pin for entry in self._catalog.entries()]
        known = ", ".join([*(pin.name for pin in served), *(one.name for one in self._virtual.all())])
        return f"model {name[:80]!r} is not served here ({known}){merged_hint(served, name)}" if served else None


def _key(name: str) -> str:
    """A hash, since names may contain slashes and other special characters."""
    return f"{VIRTUAL}{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
