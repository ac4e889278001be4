"""Who asks: the tenant, and what it may do. Both come from the key alone; nothing else that is sent changes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from pipeline.gateway.http.api_keys import ApiKeys, Scope
from pipeline.gateway.http.errors import ApiError
from schemas.requests.limits import RateLimits

AuthMode = Literal["auto", "keys", "off"]
DEFAULT_TENANT: Final = "default"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        key: the id of the key; None: none is needed here.
        max_tokens: the most that the key may ask for; None: as the tier says.
        limits: of the key itself.
    """

    tenant: str
    scopes: frozenset[Scope]
    key: str | None = None
    max_tokens: int | None = None
    limits: RateLimits = field(default_factory=RateLimits)

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes


class Authority:
    """Judges keys. "auto": keys are needed as soon as there is one; "keys": always; "off": never."""

    def __init__(self, keys: ApiKeys, mode: AuthMode = "auto") -> None:
        self._keys = keys
        self._mode = mode

    @property
    def open(self) -> bool:
        """Whether anybody may ask, without a key."""
        return self._mode == "off" or (self._mode == "auto" and not self._keys.exist())

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this header; raises `ApiError` (401)."""
        if self.open:
            return Caller(DEFAULT_TENANT, frozenset(Scope))
        scheme, _, text = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not text.strip():
            raise _refused("no API key was sent; send the header Authorization: Bearer KEY")
        key = self._keys.check(text.strip())
        if key is None:
            raise _refused("the API key is wrong, revoked or expired; ask whoever runs this installation for another")
        return Caller(key.tenant, frozenset(key.scopes), key.id, key.max_tokens, key.limits)


def need(caller: Caller, scope: Scope) -> None:
    """Raises `ApiError` (403) for a caller that may not do this."""
    if not caller.may(scope):
        held = ", ".join(sorted(caller.scopes)) or "none"
        message = f"this API key lacks the scope {scope.value!r} (it has {held}); use another key"
        raise ApiError(403, "missing_scope", message)


def _refused(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})
