"""The dependencies of the routes: services, settings, and the authenticated caller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from fastapi import Depends, Header, Request, Security
from fastapi.security import HTTPBearer

from pipeline.gateway.batches.service import Batches
from pipeline.gateway.files.service import Files
from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Authority, Caller, require_scope
from pipeline.gateway.http.bodies import BodyBudget, read_object
from pipeline.gateway.http.metrics import HttpMetrics
from pipeline.gateway.inference.models import ServedModels
from pipeline.gateway.limits.rate_limits import RateLimiter
from pipeline.gateway.status import Status
from pipeline.observability.exposition import Metrics
from pipeline.ports import World
from schemas.requests.limits import Limits


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Bounds of requests.

    Attributes:
        most_upload_bytes: of an uploaded file.  uploads_at_once: concurrent uploads, of which one tenant has half at
            most; further ones are refused with 503.
        most_body_bytes: of any other request.  bodies_at_once: bytes of all bodies that are being read, of which one
            tenant has half at most.
        idle_seconds: a request that sends nothing for this long is answered with 408.
        requests_at_once: concurrent requests; further ones are refused with 503.
        max_websockets: open WebSockets.  max_tenant_websockets: those of one tenant.
        hosts: host names of the gateway besides "localhost": while no key is needed, other Host headers are refused.
    """

    most_upload_bytes: int = 2 << 30
    uploads_at_once: int = 8
    most_body_bytes: int = 10 << 20
    bodies_at_once: int = 1 << 30
    idle_seconds: float = 30.0
    requests_at_once: int = 2_000
    max_websockets: int = 1_000
    max_tenant_websockets: int = 200
    hosts: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class GatewayDependencies:
    """The services and settings that the routes use."""

    world: World
    authority: Authority
    files: Files
    batches: Batches
    models: ServedModels
    status: Status
    settings: GatewaySettings
    rates: RateLimiter
    http_metrics: HttpMetrics
    metrics: Metrics


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


def authenticated_caller(scope: Scope | None) -> Any:
    """A route parameter: the authenticated caller, which must have this scope. It is resolved before the body is
    read."""
    shown = Security(_BEARER, scopes=[] if scope is None else [scope.value])

    def caller(request: Request, parts: Parts, _shown: Any = shown) -> Caller:
        found = parts.authority.caller(request.headers.get("authorization"))
        if scope is not None:
            require_scope(found, scope)
        request.scope["tokenmill.caller"] = found
        add_headers(request, parts.rates.take_request(found))
        return found

    return Depends(caller)


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
        depth, idle = settings.limits.max_json_depth, settings.idle_seconds
        budget: BodyBudget = request.app.state.bodies
        return await read_object(request, settings.most_body_bytes, depth, budget, empty=empty, idle_seconds=idle)

    made: Callable[..., Awaitable[dict[str, Any]]] = read
    return Depends(made)
