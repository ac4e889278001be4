"""Which models a root's jobs can run on: `catalog/*.json`, one object for each, written by the workers that serve them.

Doors pin a job to what stands here when it comes in, so the control side never reads weights. An entry stays when its
workers go: a job for it waits until one comes back.
"""

from __future__ import annotations

import hashlib
from typing import Final

import structlog

from pipeline.ledger import LedgerError, read_paper
from pipeline.ports import ObjectNotFound, ObjectStore
from schemas.job import CatalogEntry

CATALOG: Final = "catalog/"

logger = structlog.get_logger(__name__)


class Catalog:
    """The models of a root."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def publish(self, entry: CatalogEntry) -> None:
        """The model is served as described from now on; jobs that were accepted before keep their pin. An entry that
        says the same stays, with its moment. One that can't be read is written anew: of what isn't synced a power cut
        may leave anything."""
        try:
            standing = self._find(entry.pin.name)
        except LedgerError as error:
            logger.warning("a catalog entry can't be read, and is written anew", reason=str(error))
            standing = None
        if standing is None or not standing.same(entry) or (standing.published_at is None and entry.published_at):
            self._store.replace(_key(entry.pin.name), entry.to_json())

    def find(self, name: str) -> CatalogEntry | None:
        """The model of this name, if there is one."""
        return self._find(name)

    def entries(self) -> list[CatalogEntry]:
        """All models, by name. Raises `LedgerError` where one can't be read."""
        found = [self._read(info.key) for info in self._store.list(CATALOG)]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.pin.name)

    def _find(self, name: str) -> CatalogEntry | None:
        entry = self._read(_key(name))
        if entry is not None and entry.pin.name != name:
            raise LedgerError(f"{self._store.locate(_key(name))}: is of {entry.pin.name!r}, not of {name!r}; remove it")
        return entry

    def _read(self, key: str) -> CatalogEntry | None:
        try:
            data = self._store.read(key)
        except ObjectNotFound:
            return None
        return read_paper(self._store.locate(key), data, CatalogEntry)


def _key(name: str) -> str:
    """Names hold slashes and worse, so the key is a hash."""
    return f"{CATALOG}{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
