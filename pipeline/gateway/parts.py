"""What the routes are given, together, and what each of them asks first: who is calling."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Header, Request

from pipeline.gateway.auth import Authority, Caller, need
from pipeline.gateway.batches import Batches
from pipeline.gateway.bodies import read_object
from pipeline.gateway.files import Files
from pipeline.gateway.idempotency import check_key
from pipeline.gateway.keys import Scope
from pipeline.gateway.models import Models
from pipeline.gateway.rate_limits import RateLimiter
from pipeline.gateway.status import Status
from pipeline.ports import World
from schemas.limits import Limits


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Bounds of what may be sent; bytes and seconds.

    Attributes:
        most_upload_bytes: of an uploaded file.  uploads_at_once: more than so many are refused, with 503.
        most_body_bytes: of any other request.
        idle_seconds: a sender that is silent for so long in the middle of a request is not waited for.
        requests_at_once: further ones are refused, with 503.
    """

    most_upload_bytes: int = 2 << 30
    uploads_at_once: int = 8
    most_body_bytes: int = 10 << 20
    idle_seconds: float = 30.0
    requests_at_once: int = 2_000
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """What answers."""

    world: World
    authority: Authority
    files: Files
    batches: Batches
    models: Models
    status: Status
    settings: GatewaySettings
    rates: RateLimiter


def parts_of(request: Request) -> GatewayParts:
    """The parts of the application that the request came to."""
    parts: GatewayParts = request.app.state.parts
    return parts


Parts = Annotated[GatewayParts, Depends(parts_of)]
IdempotencyKey = Annotated[str | None, Header(description="The same key and body again is the same object.")]


def calling(scope: Scope | None) -> Any:
    """A parameter of a route: who calls, which must have this scope. Asked before anything of a body is read."""

    def caller(request: Request, parts: Parts) -> Caller:
        found = parts.authority.caller(request.headers.get("authorization"))
        if scope is not None:
            need(found, scope)
        request.scope["tokenmill.caller"] = found
        add_headers(request, parts.rates.take_request(found))
        return found

    return Depends(caller)


def add_headers(request: Request, headers: Mapping[str, str]) -> None:
    """Headers that the answer is to have, whatever it is."""
    request.scope.setdefault("tokenmill.headers", {}).update(headers)


def key_of(request: Request) -> str | None:
    """The request's `Idempotency-Key`, if it has one; raises `ApiError`."""
    return check_key(request.headers.get("idempotency-key"))


def json_body(*, empty: bool = False) -> Any:
    """A parameter of a route: its body, a JSON object.

    Args:
        empty: no body at all is an empty object.
    """

    async def read(request: Request, parts: Parts) -> dict[str, Any]:
        settings = parts.settings
        depth, idle = settings.limits.max_json_depth, settings.idle_seconds
        return await read_object(request, settings.most_body_bytes, depth, empty=empty, idle_seconds=idle)

    made: Callable[..., Awaitable[dict[str, Any]]] = read
    return Depends(made)


def documented(example: dict[str, Any]) -> dict[str, Any]:
    """What the OpenAPI document says of a JSON body."""
    content = {"application/json": {"schema": {"type": "object"}, "example": example}}
    return {"requestBody": {"required": True, "content": content}}
