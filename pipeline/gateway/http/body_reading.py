"""Reading of request bodies, bounded in size, in JSON depth, and by a minimum transfer rate."""

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
"""A request that sends nothing for this long is answered with 408."""

MIN_BYTES_PER_SECOND: Final = 500
"""A request that sends less, on average over an idle time, is answered with 408."""

_LARGE_BYTES: Final = 64 << 10
"""Larger JSON texts are parsed in a thread, not on the event loop."""

_END = object()


class BodyBudget:
    """A memory budget for the bodies that are being read, of which one sender holds at most half. For one event loop.

    Args:
        max_bytes: of all bodies together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_of_sender = max(1, max_bytes // 2)
        self._total = 0
        self._by_sender: Counter[str] = Counter()

    def reserve(self, count: int, sender: str) -> None:
        """Reserve `count` bytes, to be released later; raises `ApiError` (429, 503), and reserves none, when they
        exceed the sender's share or the budget.

        Args:
            sender: as `sender_of` names it.
        """
        if self._by_sender[sender] + count > self._max_of_sender:
            message = f"your requests that are being read hold {self._max_of_sender:,} bytes; send this one later"
            raise ApiError(429, "too_many_requests", message, headers={"Retry-After": str(RETRY_SECONDS)})
        if self._total + count > self._max_bytes:
            raise unavailable("too many bytes are being received at once; send it again later", "too_many_requests")
        self._total += count
        self._by_sender[sender] += count

    def release(self, count: int, sender: str) -> None:
        """Release `count` reserved bytes."""
        self._total -= count
        self._by_sender[sender] -= count
        if not self._by_sender[sender]:
            del self._by_sender[sender]


def sender_of(scope: Mapping[str, Any]) -> str:
    """The sender of a request: its tenant, or its peer's address before it is authenticated."""
    caller: Caller | None = scope.get("tokenmill.caller")
    if caller is not None:
        return f"tenant {caller.tenant}"
    client = scope.get("client")
    return f"address {client[0] if client else 'unknown'}"


async def pieces(
    request: Request, idle_seconds: float = IDLE_SECONDS, min_rate: float = MIN_BYTES_PER_SECOND
) -> AsyncIterator[bytes]:
    """Stream the body; raises `ApiError` (408) when nothing arrives for `idle_seconds`, or fewer than `min_rate` bytes
    a second arrive in any period of that length, independently of earlier periods."""
    stream, loop = request.stream(), asyncio.get_running_loop()
    began, total = loop.time(), 0  # of the current period
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
            if total < min_rate * idle_seconds:
                raise _too_slow(f"fewer than {min_rate:g} bytes of the request came a second; send it again")
            began, total = loop.time(), 0
        yield piece


async def read_object(
    request: Request,
    max_bytes: int,
    max_depth: int,
    budget: BodyBudget,
    *,
    empty: bool = False,
    idle_seconds: float = IDLE_SECONDS,
) -> dict[str, Any]:
    """Read the body, which must be a JSON object; raises `ApiError`.

    Args:
        budget: holds the body's bytes until they are parsed.
        empty: an empty body is read as an empty object.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    data, sender = bytearray(), sender_of(request.scope)
    reserved = 0
    try:
        async for piece in pieces(request, idle_seconds):
            budget.reserve(len(piece), sender)
            reserved += len(piece)
            data += piece
            if len(data) > max_bytes:
                raise _too_large(max_bytes)
        return await _parse_body(request, bytes(data), max_depth, empty=empty)
    finally:
        budget.release(reserved, sender)


async def _parse_body(request: Request, data: bytes, max_depth: int, *, empty: bool) -> dict[str, Any]:
    if empty and not data:
        return {}
    # Browsers send other media types across origins without a preflight request, but not this one.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "unsupported_media_type", "send JSON, with the header Content-Type: application/json")
    return await parse_object_off_loop(data, max_depth)


async def parse_object_off_loop(data: bytes | str, max_depth: int) -> dict[str, Any]:
    """`parse_object`, in a thread for large texts, so that the event loop isn't blocked."""
    if len(data) <= _LARGE_BYTES:
        return parse_object(data, max_depth)
    return await asyncio.to_thread(parse_object, data, max_depth)


def parse_object(data: bytes | str, max_depth: int) -> dict[str, Any]:
    """Parse a JSON object; raises `ApiError`."""
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


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is larger than {max_bytes:,} bytes; send less")
