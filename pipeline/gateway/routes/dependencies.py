"""What the routes are given, together, and what each of them asks first: who is calling."""

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
    """Bounds of what may be sent; bytes and seconds.

    Attributes:
        most_upload_bytes: of an uploaded file.  uploads_at_once: more than so many are refused, with 503,
            and more than half of them of one tenant.
        most_body_bytes: of any other request.  bodies_at_once: bytes of those that are being read, of all together;
            half of them of one tenant.
        idle_seconds: a sender that is silent for so long in the middle of a request is not waited for.
        requests_at_once: further ones are refused, with 503.
        max_websockets: open at once.  max_tenant_websockets: of them, of one tenant.
        hosts: names of the gateway besides "localhost": while no keys are needed, nothing is served under others.
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
    """What answers."""

    world: World
    authority: Authority
    files: Files
    batches: Batches
    models: ServedModels
    status: Status
    settings: GatewaySettings
    rates: RateLimiter
    figures: HttpMetrics
    metrics: Metrics


async def parts_of(request: Request) -> GatewayDependencies:
    """The parts of the application that the request came to. On the event loop: a thread costs more than looking."""
    parts: GatewayDependencies = request.app.state.parts
    return parts


Parts = Annotated[GatewayDependencies, Depends(parts_of)]
IdempotencyKey = Annotated[
    str | None,
    Header(min_length=1, max_length=255, description="With the same key, the same request again makes nothing new."),
]
_BEARER: Final = HTTPBearer(
    scheme_name="key",
    description="A key of this installation. One without any key needs none, and serves its own machine only.",
    auto_error=False,
)


def calling(scope: Scope | None) -> Any:
    """A parameter of a route: who calls, which must have this scope. Asked before anything of a body is read."""
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
    """Headers that the answer is to have, whatever it is."""
    request.scope.setdefault("tokenmill.headers", {}).update(headers)


def json_body(*, empty: bool = False) -> Any:
    """A parameter of a route: its body, a JSON object.

    Args:
        empty: no body at all is an empty object.
    """

    async def read(request: Request, parts: Parts) -> dict[str, Any]:
        settings = parts.settings
        depth, idle = settings.limits.max_json_depth, settings.idle_seconds
        budget: BodyBudget = request.app.state.bodies
        return await read_object(request, settings.most_body_bytes, depth, budget, empty=empty, idle_seconds=idle)

    made: Callable[..., Awaitable[dict[str, Any]]] = read
    return Depends(made)
