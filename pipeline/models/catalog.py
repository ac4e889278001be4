"""Which models a root's jobs can run on: `catalog/*.json`, one object for each, written by the workers that serve them.

Doors pin a job to what stands here when it comes in, so the control side never reads weights. An entry stays when its
workers go: a job for it waits until one comes back.

`versions/*.json` holds each version of each model that was ever served, by its digest: `NAME@sha256:…` names one
wherever a model is named. What NAME alone means is the last that a worker published, or what releases have decided
(`pipeline.models`).
"""

from __future__ import annotations

import hashlib
from typing import Final

import structlog

from pipeline.ledger.ledger import LedgerError, parse_stored
from pipeline.ports import ObjectNotFound, ObjectStore
from schemas.models import CatalogEntry, ModelPin

CATALOG: Final = "catalog/"
VERSIONS: Final = "versions/"
BY_DIGEST: Final = "@sha256:"

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

    def publish_version(self, entry: CatalogEntry) -> None:
        """The version is there under its digest, whatever its name alone means; one without a digest has no such
        name."""
        if entry.pin.digest is not None:
            pin = entry.pin.model_copy(update={"name": version_name(entry.pin)})
            self.publish(entry.model_copy(update={"pin": pin}))

    def versions(self, name: str) -> list[CatalogEntry]:
        """All versions of the model that were ever served, each under its digest, by that."""
        beginning = f"{VERSIONS}{_hash(name)}/"
        found = [self._read(info.key) for info in self._store.list(beginning)]
        mine = [entry for entry in found if entry is not None and entry.pin.name.startswith(name + BY_DIGEST)]
        return sorted(mine, key=lambda entry: entry.pin.name)

    def find(self, name: str) -> CatalogEntry | None:
        """The model of this name (or NAME@sha256:… of one version), if there is one."""
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
        return parse_stored(self._store.locate(key), data, CatalogEntry)


def version_name(pin: ModelPin) -> str:
    """What the version is called. The pin must have a digest."""
    assert pin.digest is not None
    return f"{pin.name}@{pin.digest}"


def _key(name: str) -> str:
    """Names hold slashes and worse, so the key is a hash."""
    model, mark, _ = name.rpartition(BY_DIGEST)
    return f"{VERSIONS}{_hash(model)}/{_hash(name)}.json" if mark and model else f"{CATALOG}{_hash(name)}.json"


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]
