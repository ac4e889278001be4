"""The catalog of models that a root's jobs can run on: `catalog/*.json`, one object per model, written by its workers.

Ingest pins a job to the catalog's entry at submission, so the control plane never reads weights. An entry stays when
its workers leave: a job for it waits until a worker returns.

`versions/*.json` has each version of each model that was ever served, by digest: `NAME@sha256:…` selects one wherever a
model is named. NAME alone selects the version that a worker published last, or the one that releases have decided on
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
        """Publish the entry; jobs that were accepted before keep their pin. An equal entry stays, with its publication
        time. An entry that can't be read is replaced: a power cut may corrupt data that isn't synced."""
        try:
            standing = self._find(entry.pin.name)
        except LedgerError as error:
            logger.warning("a catalog entry can't be read and is replaced", reason=str(error))
            standing = None
        if standing is None or not standing.is_same_as(entry) or (standing.published_at is None and entry.published_at):
            self._store.replace(_key(entry.pin.name), entry.to_json())

    def publish_version(self, entry: CatalogEntry) -> None:
        """Publish the version under its digest, independent of the model's name alone; no-op without a digest."""
        if entry.pin.digest is not None:
            pin = entry.pin.model_copy(update={"name": version_name(entry.pin)})
            self.publish(entry.model_copy(update={"pin": pin}))

    def versions(self, name: str) -> list[CatalogEntry]:
        """All versions of the model that were ever served, each under its digest, sorted by it."""
        beginning = f"{VERSIONS}{_hash(name)}/"
        found = [self._read(info.key) for info in self._store.list(beginning)]
        mine = [entry for entry in found if entry is not None and entry.pin.name.startswith(name + BY_DIGEST)]
        return sorted(mine, key=lambda entry: entry.pin.name)

    def find(self, name: str) -> CatalogEntry | None:
        """The entry of this name (or NAME@sha256:… of one version); None: there is none."""
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
    """The name of the version. The pin must have a digest."""
    assert pin.digest is not None
    return f"{pin.name}@{pin.digest}"


def _key(name: str) -> str:
    """The entry's key: a hash, since names may contain slashes and other special characters."""
    model, mark, _ = name.rpartition(BY_DIGEST)
    return f"{VERSIONS}{_hash(model)}/{_hash(name)}.json" if mark and model else f"{CATALOG}{_hash(name)}.json"


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]
