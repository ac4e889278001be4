"""Authentication: the tenant and its scopes are taken from the API key alone, never from other parts of a request."""

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
    """The authenticated caller of a request.

    Attributes:
        key: the id of the key; None: the installation needs none.
        max_tokens: the key's bound of output tokens; None: the limit of the tier applies.
        limits: the rate limits of the key's record.
    """

    tenant: str
    scopes: frozenset[Scope]
    key: str | None = None
    max_tokens: int | None = None
    limits: RateLimits = field(default_factory=RateLimits)

    def has_scope(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes


class Authority:
    """Authenticates requests. Mode "auto": keys are required once one exists; "keys": always; "off": never."""

    def __init__(self, keys: ApiKeys, mode: AuthMode = "auto") -> None:
        self._keys = keys
        self._mode = mode

    @property
    def is_open(self) -> bool:
        """Whether requests need no key."""
        return self._mode == "off" or (self._mode == "auto" and not self._keys.has_keys())

    def caller(self, authorization: str | None) -> Caller:
        """The caller with this Authorization header; raises `ApiError` (401)."""
        if self.is_open:
            return Caller(DEFAULT_TENANT, frozenset(Scope))
        scheme, _, text = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not text.strip():
            raise _refused("no API key was sent; send the header Authorization: Bearer KEY")
        key = self._keys.check(text.strip())
        if key is None:
            raise _refused("the API key is wrong, revoked or expired; ask the operator for another")
        return Caller(key.tenant, frozenset(key.scopes), key.id, key.max_tokens, key.limits)


def require_scope(caller: Caller, scope: Scope) -> None:
    """Raises `ApiError` (403) when the caller lacks the scope."""
    if not caller.has_scope(scope):
        held = ", ".join(sorted(caller.scopes)) or "none"
        message = f"this API key lacks the scope {scope.value!r} (it has {held}); use another key"
        raise ApiError(403, "missing_scope", message)


def _refused(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})
