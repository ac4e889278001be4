"""The same request again, told by its `Idempotency-Key`: whoever hears it first writes that down, and what is made is
named after that. So a repeat, at another gateway or after a crash, makes the same thing, or finds it."""

from __future__ import annotations

import hashlib
from datetime import datetime

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.records import IdempotencyRecord
from pipeline.ledger.ledger import parse_stored
from pipeline.ledger.tenant_index import idempotency_of
from pipeline.ports import ObjectNotFound, World


def first_heard(world: World, tenant: str, kind: str, key: str, digest: str) -> datetime:
    """When the request was heard first.

    Args:
        kind: of what it makes.  digest: sha256 of what it says.

    Raises:
        ApiError: the key came with another request before.
    """
    name = hashlib.sha256(f"{kind}\0{key}".encode(errors="surrogatepass")).hexdigest()
    where = f"{idempotency_of(tenant)}{name}.json"
    mine = IdempotencyRecord(at=world.clock.now(), digest=digest)
    if world.store.create(where, mine.to_json()):
        return mine.at
    try:
        heard = parse_stored(world.store.locate(where), world.store.read(where), IdempotencyRecord)
    except ObjectNotFound:  # it was old, and has just been collected
        return mine.at
    if heard.digest != digest:
        raise ApiError(
            409,
            "idempotency_key_reused",
            "this Idempotency-Key came with another request before; use another key for another request",
            param="Idempotency-Key",
        )
    return heard.at
