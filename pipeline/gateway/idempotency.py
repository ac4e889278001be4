"""The same request again, told by its `Idempotency-Key`: whoever hears it first writes that down, and what is made is
named after that. So a repeat, at another gateway or after a crash, makes the same thing, or finds it."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Final

from pipeline.gateway.errors import ApiError, bad_request
from pipeline.gateway.papers import Heard
from pipeline.ledger import read_paper
from pipeline.ports import ObjectNotFound, World
from pipeline.tenants import idempotency_of

LONGEST_KEY: Final = 255


def check_key(key: str | None) -> str | None:
    """The header's value, if it was sent; raises `ApiError`."""
    if key is not None and not 1 <= len(key) <= LONGEST_KEY:
        raise bad_request(f"Idempotency-Key has {len(key)} characters, but 1 to {LONGEST_KEY} are allowed")
    return key


def first_heard(world: World, tenant: str, kind: str, key: str, digest: str) -> datetime:
    """When the request was heard first.

    Args:
        kind: of what it makes.  digest: sha256 of what it says.

    Raises:
        ApiError: the key came with another request before.
    """
    name = hashlib.sha256(f"{kind}\0{key}".encode(errors="surrogatepass")).hexdigest()
    where = f"{idempotency_of(tenant)}{name}.json"
    mine = Heard(at=world.clock.now(), digest=digest)
    if world.store.create(where, mine.to_json()):
        return mine.at
    try:
        heard = read_paper(world.store.locate(where), world.store.read(where), Heard)
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
