"""Index of a tenant's files and jobs: markers under a prefix of its own, so that a page of them is one listing and
never reads other tenants' objects.

    tenants/TENANT/message-batches/JOB      those of the batches whose requests are for Anthropic's Messages API
    tenants/TENANT/batches/JOB              tenants/TENANT/files/FILE.…            the newest first, as ids sort
    tenants/TENANT/oldest/batches/MIRRORED  tenants/TENANT/oldest/files/MIRRORED   the oldest first
    tenants/TENANT/idempotency/HASH.json

Stores list in one direction only; for the other direction there is a second marker, whose name sorts in reverse.
Markers are created before their objects, and may outlive them: readers skip markers without an object.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from pipeline.ports import ObjectStore
from schemas.requests.dialects.anthropic.body import MESSAGES_URL

TENANTS: Final = "tenants/"
_MAX_NAME_BYTES: Final = 200
"""Maximum bytes of a quoted name; file systems allow 255."""

_ALPHABET: Final = "-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
"""The characters of ids, in sort order."""

_MIRROR: Final = str.maketrans(_ALPHABET, _ALPHABET[::-1])
_PREFIX: Final = "-"
"""Prefix of a mirrored name: no key may begin with a dot."""
_SUFFIX: Final = "~"
"""Suffix of a mirrored name. It sorts after the whole alphabet, as an id sorts before each longer one that it
begins."""


@dataclass(frozen=True, slots=True)
class TenantIndex:
    """A tenant's objects of one kind, by id. `tenant`: its folder. `kind`: the name of the markers' folders."""

    tenant: str
    kind: str

    def add(self, store: ObjectStore, name: str) -> None:
        """Add the id to the index."""
        for key in self.keys(name):
            store.create(key, b"")

    def keys(self, name: str) -> tuple[str, str]:
        """The markers of an id."""
        return self._folder + name, self._mirrored + _mirror(name)

    def newest(self, store: ObjectStore, after: str | None = None) -> Iterator[str]:
        """Ids, the newest first; only those that follow `after`, which need not exist."""
        behind = "" if after is None else self._folder + after
        return (info.key.removeprefix(self._folder) for info in store.list(self._folder, behind))

    def oldest(self, store: ObjectStore, after: str | None = None) -> Iterator[str]:
        """Ids, the oldest first; only those that follow `after`, which need not exist."""
        folder = self._mirrored
        behind = "" if after is None else folder + _mirror(after)
        return (_unmirror(info.key.removeprefix(folder)) for info in store.list(folder, behind))

    @property
    def _folder(self) -> str:
        return f"{self.tenant}{self.kind}/"

    @property
    def _mirrored(self) -> str:
        return f"{self.tenant}oldest/{self.kind}/"


def tenant_folder(tenant: str) -> str:
    """The prefix of a tenant's markers, for any characters in its name. Ends with a slash."""
    quoted = quote(tenant, safe="", errors="surrogatepass")
    if len(quoted) > _MAX_NAME_BYTES:
        return f"{TENANTS}h-{hashlib.sha256(tenant.encode(errors='surrogatepass')).hexdigest()}/"
    return f"{TENANTS}t-{quoted}/"


def batches_of(tenant: str) -> TenantIndex:
    """The index of the tenant's jobs."""
    return TenantIndex(tenant_folder(tenant), "batches")


def message_batches_of(tenant: str) -> TenantIndex:
    """The index of those jobs of the tenant whose requests are all for Anthropic's Messages API."""
    return TenantIndex(tenant_folder(tenant), "message-batches")


def job_indexes_of(tenant: str, url: str | None) -> tuple[TenantIndex, ...]:
    """The indexes that a job of the tenant is in. `url`: of all its requests; None: each names its own."""
    return (batches_of(tenant), *([message_batches_of(tenant)] if url == MESSAGES_URL else []))


def files_of(tenant: str) -> TenantIndex:
    """The index of the tenant's files."""
    return TenantIndex(tenant_folder(tenant), "files")


def idempotency_of(tenant: str) -> str:
    """The prefix of the tenant's idempotency records. Ends with a slash."""
    return f"{tenant_folder(tenant)}idempotency/"


def _mirror(name: str) -> str:
    return f"{_PREFIX}{name.translate(_MIRROR)}{_SUFFIX}"


def _unmirror(name: str) -> str:
    return name.removeprefix(_PREFIX).removesuffix(_SUFFIX).translate(_MIRROR)
