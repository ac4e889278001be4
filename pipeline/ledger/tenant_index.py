"""What a tenant has, as markers in a place of its own: so a page of its files or jobs is one listing, and never looks
at what others have.

    tenants/TENANT/batches/JOB              tenants/TENANT/files/FILE.…            the newest first, as ids sort
    tenants/TENANT/oldest/batches/MIRRORED  tenants/TENANT/oldest/files/MIRRORED   the oldest first
    tenants/TENANT/idempotency/HASH.json

Stores list one way only, so what is to be listed the other way has a second marker, whose name sorts the other way.
Markers are made before what they stand for, and may be left behind by it: readers pass over those that lead nowhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from pipeline.ports import ObjectStore

TENANTS: Final = "tenants/"
_LONGEST: Final = 200
"""Bytes of a quoted name; file systems take 255."""

_LETTERS: Final = "-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
"""Of ids, as they sort."""

_MIRROR: Final = str.maketrans(_LETTERS, _LETTERS[::-1])
_BEGIN: Final = "-"
"""Before a mirrored name: no key may begin with a dot."""
_END: Final = "~"
"""Behind it. It sorts behind all letters, as an id that ends sorts before one that goes on."""


@dataclass(frozen=True, slots=True)
class TenantIndex:
    """What a tenant has of one kind, by ids. `tenant`: its folder. `kind`: the name of the markers' folders."""

    tenant: str
    kind: str

    def add(self, store: ObjectStore, name: str) -> None:
        """List it from now on."""
        for key in self.keys(name):
            store.create(key, b"")

    def keys(self, name: str) -> tuple[str, str]:
        """The markers of an id."""
        return self._folder + name, self._mirrored + _mirror(name)

    def newest(self, store: ObjectStore, after: str | None = None) -> Iterator[str]:
        """Ids, the newest first; only those behind `after`, which need not exist."""
        behind = "" if after is None else self._folder + after
        return (info.key.removeprefix(self._folder) for info in store.list(self._folder, behind))

    def oldest(self, store: ObjectStore, after: str | None = None) -> Iterator[str]:
        """The same, the oldest first."""
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
    """Where a tenant's markers lie, whatever its name holds. Ends with a slash."""
    quoted = quote(tenant, safe="", errors="surrogatepass")
    if len(quoted) > _LONGEST:
        return f"{TENANTS}h-{hashlib.sha256(tenant.encode(errors='surrogatepass')).hexdigest()}/"
    return f"{TENANTS}t-{quoted}/"


def batches_of(tenant: str) -> TenantIndex:
    """Its jobs."""
    return TenantIndex(tenant_folder(tenant), "batches")


def files_of(tenant: str) -> TenantIndex:
    """Its files."""
    return TenantIndex(tenant_folder(tenant), "files")


def idempotency_of(tenant: str) -> str:
    """Where is written down which requests of it were heard."""
    return f"{tenant_folder(tenant)}idempotency/"


def _mirror(name: str) -> str:
    return f"{_BEGIN}{name.translate(_MIRROR)}{_END}"


def _unmirror(name: str) -> str:
    return name.removeprefix(_BEGIN).removesuffix(_END).translate(_MIRROR)
