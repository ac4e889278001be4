"""The dependencies of the routes: services, settings, and the authenticated caller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from fastapi import Depends, Header, Request, Security
from fastapi.security import APIKeyHeader, HTTPBearer

from pipeline.gateway.batches.service import Batches
from pipeline.gateway.files.service import Files
from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Authority, Caller, require_scope
from pipeline.gateway.http.body_reading import BodyBudget, read_object
from pipeline.gateway.http.metrics import HttpMetrics
from pipeline.gateway.inference.models import ServedModels
from pipeline.gateway.limits.admission import RateLimiter
from pipeline.gateway.status import Status
from pipeline.observability.exposition import Metrics
from pipeline.ports import World
from schemas.requests.limits import Limits
from schemas.settings.gateway import GatewayOptions


@dataclass(frozen=True, slots=True)
class GatewayDependencies:
    """The services and settings that the routes use."""

    world: World
    authority: Authority
    files: Files
    batches: Batches
    models: ServedModels
    status: Status
    settings: GatewayOptions
    rates: RateLimiter
    http_metrics: HttpMetrics
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)


async def parts_of(request: Request) -> GatewayDependencies:
    """The dependencies of the request's application. Async, as a thread would cost more than the attribute access."""
    parts: GatewayDependencies = request.app.state.parts
    return parts


Parts = Annotated[GatewayDependencies, Depends(parts_of)]
IdempotencyKey = Annotated[
    str | None,
    Header(min_length=1, max_length=255, description="Repeating the request with this key creates nothing new."),
]
_BEARER: Final = HTTPBearer(
    scheme_name="key",
    description="An API key of this installation. An installation without keys serves requests from its own machine "
    "only, and needs none.",
    auto_error=False,
)


_API_KEY: Final = APIKeyHeader(
    name="x-api-key",
    scheme_name="x-api-key",
    description="The same key, as Anthropic's clients send it.",
    auto_error=False,
)


def authenticated_caller(scope: Scope | None, *, anthropic: bool = False) -> Any:
    """A route parameter: the authenticated caller, which must have this scope. It is resolved before the body is
    read.

    Args:
        anthropic: the key may also be in the header `x-api-key`, where Anthropic's clients send it.
    """
    scopes = [] if scope is None else [scope.value]
    shown = Security(_BEARER, scopes=scopes)
    shown_too = Security(_API_KEY, scopes=scopes)

    def authenticate(request: Request, parts: Parts) -> Caller:
        authorization, key = request.headers.get("authorization"), request.headers.get("x-api-key")
        if anthropic and authorization is None and key is not None:
            authorization = f"Bearer {key}"
        found = parts.authority.caller(authorization)
        if scope is not None:
            require_scope(found, scope)
        request.scope["tokenmill.caller"] = found
        add_headers(request, parts.rates.take_request(found))
        return found

    def caller(request: Request, parts: Parts, _shown: Any = shown) -> Caller:
        return authenticate(request, parts)

    def anthropic_caller(request: Request, parts: Parts, _shown: Any = shown, _shown_too: Any = shown_too) -> Caller:
        return authenticate(request, parts)

    return Depends(anthropic_caller if anthropic else caller)


def add_headers(request: Request, headers: Mapping[str, str]) -> None:
    """Add headers to the response of a request, also to an error response."""
    request.scope.setdefault("tokenmill.headers", {}).update(headers)


def json_body(*, empty: bool = False) -> Any:
    """A route parameter: the body, a JSON object.

    Args:
        empty: an empty body is read as an empty object.
    """

    async def read(request: Request, parts: Parts) -> dict[str, Any]:
        settings = parts.settings
        depth, idle = parts.limits.max_json_depth, settings.idle_seconds
        budget: BodyBudget = request.app.state.bodies
        return await read_object(request, settings.max_body_bytes, depth, budget, empty=empty, idle_seconds=idle)

    made: Callable[..., Awaitable[dict[str, Any]]] = read
    return Depends(made)
