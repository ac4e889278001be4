"""Idempotent requests: the gateway that first receives an `Idempotency-Key` stores a record of it.

Ids of created objects are derived from that record. So a repeated request, at another gateway or after a crash, creates
the same object or finds it."""

from __future__ import annotations

import hashlib
from datetime import datetime

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.records import IdempotencyRecord
from pipeline.ledger.ledger import parse_stored
from pipeline.ledger.tenant_index import idempotency_of
from pipeline.ports import ObjectNotFound, World


def record_idempotency_key(world: World, tenant: str, kind: str, key: str, digest: str) -> datetime:
    """Record a request with an idempotency key; returns the time when it was first received.

    Args:
        kind: of the object that the request creates.  digest: sha256 of the request's content.

    Raises:
        ApiError: the key was used for another request (409).
    """
    name = hashlib.sha256(f"{kind}\0{key}".encode(errors="surrogatepass")).hexdigest()
    object_key = f"{idempotency_of(tenant)}{name}.json"
    mine = IdempotencyRecord(at=world.clock.now(), digest=digest)
    if world.store.create(object_key, mine.to_json()):
        return mine.at
    try:
        stored = parse_stored(world.store.locate(object_key), world.store.read(object_key), IdempotencyRecord)
    except ObjectNotFound:  # an old record, just removed by garbage collection
        return mine.at
    if stored.digest != digest:
        raise ApiError(
            409,
            "idempotency_key_reused",
            "this Idempotency-Key came with another request before; use another key for another request",
            param="Idempotency-Key",
        )
    return stored.at
