"""What a tenant has, as markers in a place of its own: so a page of its files or jobs is one listing, and never looks
at what others have.

    tenants/TENANT/batches/JOB      tenants/TENANT/files/FILE      tenants/TENANT/idempotency/HASH.json

A marker is made before what it stands for, and may be left behind by it: readers pass over those that lead nowhere.
"""

from __future__ import annotations

import hashlib
from typing import Final
from urllib.parse import quote

from pipeline.ports import ObjectStore

TENANTS: Final = "tenants/"
_LONGEST: Final = 200
"""Bytes of a quoted name; file systems take 255."""


def tenant_folder(tenant: str) -> str:
    """Where a tenant's markers lie, whatever its name holds. Ends with a slash."""
    quoted = quote(tenant, safe="", errors="surrogatepass")
    if len(quoted) > _LONGEST:
        return f"{TENANTS}h-{hashlib.sha256(tenant.encode(errors='surrogatepass')).hexdigest()}/"
    return f"{TENANTS}t-{quoted}/"


def batches_of(tenant: str) -> str:
    """Where the markers of its jobs lie, the newest first."""
    return f"{tenant_folder(tenant)}batches/"


def files_of(tenant: str) -> str:
    """Where the markers of its files lie, the newest first."""
    return f"{tenant_folder(tenant)}files/"


def idempotency_of(tenant: str) -> str:
    """Where is written down which requests of it were heard."""
    return f"{tenant_folder(tenant)}idempotency/"


def list_batch(store: ObjectStore, tenant: str, job: str) -> None:
    """List a job with its tenant's."""
    store.create(batches_of(tenant) + job, b"")
