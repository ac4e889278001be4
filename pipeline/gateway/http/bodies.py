"""What comes with a request: bounded in size, in depth, and in how long it may be silent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import orjson
from starlette.requests import ClientDisconnect, Request

from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.errors import RETRY_SECONDS, ApiError, bad_request, disconnected, unavailable
from pipeline.gateway.http.json_limits import check_bounds

IDLE_SECONDS: Final = 30.0
"""A sender that is silent for so long in the middle of a request is not waited for."""

LEAST_BYTES_PER_SECOND: Final = 500
"""Whoever sends less in an idle time holds a place for nothing."""

_LARGE: Final = 64 << 10
"""Bytes of JSON that are not parsed on the event loop."""

_END = object()


class BodyBudget:
    """Bytes of bodies that are being read, of all requests together, of which one sender holds at most half. For one
    event loop.

    Args:
        most: at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._max_of_sender = max(1, most // 2)
        self._held = 0
        self._held_of_senders: Counter[str] = Counter()

    def take(self, count: int, sender: str) -> None:
        """Hold so many more, to be given back; raises `ApiError` (429, 503), and holds none of them, when it is too
        much.

        Args:
            sender: as `sender_of` names it.
        """
        if self._held_of_senders[sender] + count > self._max_of_sender:
            message = f"your requests that are being read hold {self._max_of_sender:,} bytes; send this one later"
            raise ApiError(429, "too_many_requests", message, headers={"Retry-After": str(RETRY_SECONDS)})
        if self._held + count > self._most:
            raise unavailable("too much is being sent here at once; send it again later", "too_many_requests")
        self._held += count
        self._held_of_senders[sender] += count

    def give_back(self, count: int, sender: str) -> None:
        """They aren't held any more."""
        self._held -= count
        self._held_of_senders[sender] -= count
        if not self._held_of_senders[sender]:
            del self._held_of_senders[sender]


def sender_of(scope: Mapping[str, Any]) -> str:
    """Who sends a request: its tenant, or its peer's address as long as it is not authenticated."""
    caller: Caller | None = scope.get("tokenmill.caller")
    if caller is not None:
        return f"tenant {caller.tenant}"
    client = scope.get("client")
    return f"address {client[0] if client else 'unknown'}"


async def pieces(
    request: Request, idle_seconds: float = IDLE_SECONDS, least: float = LEAST_BYTES_PER_SECOND
) -> AsyncIterator[bytes]:
    """The body as it comes; raises `ApiError` when nothing comes any more, or fewer than `least` bytes a second in an
    idle time, whatever came before."""
    stream, loop = request.stream(), asyncio.get_running_loop()
    began, total = loop.time(), 0  # of this idle time
    while True:
        try:
            async with asyncio.timeout(idle_seconds):
                piece = await anext(stream, _END)
        except TimeoutError:
            raise _too_slow(f"nothing of the request came for {idle_seconds:g} seconds; send it again") from None
        except ClientDisconnect:
            raise disconnected() from None
        if piece is _END:
            return
        assert isinstance(piece, bytes)
        total += len(piece)
        if loop.time() - began >= idle_seconds:
            if total < least * idle_seconds:
                raise _too_slow(f"fewer than {least:g} bytes of the request came a second; send it again")
            began, total = loop.time(), 0
        yield piece


async def read_object(
    request: Request,
    most_bytes: int,
    max_depth: int,
    budget: BodyBudget,
    *,
    empty: bool = False,
    idle_seconds: float = IDLE_SECONDS,
) -> dict[str, Any]:
    """The body, which must be a JSON object; raises `ApiError`.

    Args:
        budget: what is read counts against it until it is parsed.
        empty: no body at all stands for an object without anything.
    """
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > most_bytes:
        raise _too_large(most_bytes)
    data, sender = bytearray(), sender_of(request.scope)
    held = 0
    try:
        async for piece in pieces(request, idle_seconds):
            budget.take(len(piece), sender)
            held += len(piece)
            data += piece
            if len(data) > most_bytes:
                raise _too_large(most_bytes)
        return await _object_of(request, bytes(data), max_depth, empty=empty)
    finally:
        budget.give_back(held, sender)


async def _object_of(request: Request, data: bytes, max_depth: int, *, empty: bool) -> dict[str, Any]:
    if empty and not data:
        return {}
    # Browsers send other types to other sites without asking: this one they don't.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "unsupported_media_type", "send JSON, with the header Content-Type: application/json")
    return await parse_aside(data, max_depth)


async def parse_aside(data: bytes | str, max_depth: int) -> dict[str, Any]:
    """`parse_object`, without holding up the event loop for what is large."""
    if len(data) <= _LARGE:
        return parse_object(data, max_depth)
    return await asyncio.to_thread(parse_object, data, max_depth)


def parse_object(data: bytes | str, max_depth: int) -> dict[str, Any]:
    """A JSON object; raises `ApiError`."""
    raw = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    check_bounds(raw, max_depth)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error.msg} at character {error.pos}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return body


def _too_slow(why: str) -> ApiError:
    return ApiError(408, "request_timeout", why, headers={"Connection": "close"})


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is larger than {most_bytes:,} bytes; send less")
