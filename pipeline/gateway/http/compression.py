"""Compressed responses: gzip or zstd, as the request's Accept-Encoding asks (RFC 9110, section 12.5.3).

JSON responses from one KiB on are compressed, and downloads of results compress themselves. Streams of events and
WebSockets never are: each event must leave at once.

BREACH guesses a secret in a compressed response from its size, when the attacker can have a victim's browser repeat the
request with chosen text beside the secret. That needs credentials which a browser attaches by itself. There are none
here: keys come in a header that only the gateway's own page sets, there are no cookies, requests of other sites' pages
are refused (`csrf.py`), and no response holds a key.
"""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import Iterable, Iterator
from typing import Final, Literal

import pyarrow as pa
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Coding = Literal["gzip", "zstd"]

MIN_BYTES: Final = 1_024
"""Smaller responses are sent as they are: a packet holds them anyway."""

CODINGS: Final[tuple[Coding, ...]] = ("zstd", "gzip")
"""In order of preference: zstd takes a fraction of the time."""

_GZIP_LEVEL: Final = 6
_GZIP_WINDOW: Final = 31
"""zlib's largest window, in gzip's format."""

_INLINE_BYTES: Final = 1 << 16
"""Larger bodies are compressed outside of the event loop, which other requests wait for."""


def choose_coding(headers: Headers) -> Coding | None:
    """The coding of the response to a request with these headers; None: as it is."""
    weights: dict[str, float] = {}
    for item in ",".join(headers.getlist("accept-encoding")).split(","):
        name, _, parameter = item.partition(";")
        weights[name.strip().lower()] = _weight(parameter)
    found = {coding: weights.get(coding, weights.get("*", 0.0)) for coding in CODINGS}
    best = max(CODINGS, key=lambda coding: found[coding])  # the first one of equals
    return best if found[best] > weights.get("identity", 0.0) else None


def compressed(chunks: Iterable[bytes], coding: Coding) -> Iterator[bytes]:
    """The chunks as one compressed stream."""
    if coding == "gzip":
        packer = zlib.compressobj(_GZIP_LEVEL, wbits=_GZIP_WINDOW)
        for chunk in chunks:
            if data := packer.compress(chunk):
                yield data
        yield packer.flush()
        return
    sink = _Sink()
    with pa.CompressedOutputStream(pa.PythonFile(sink, "w"), coding) as stream:
        for chunk in chunks:
            stream.write(chunk)
            yield from sink.take()
    yield from sink.take()


class ResponseCompression:
    """ASGI middleware that compresses JSON responses which are sent whole."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A response to HEAD has no body, and the length of a compressed one isn't known.
        coding = None if scope["method"] == "HEAD" else choose_coding(Headers(scope=scope))
        delayed: Message | None = None

        async def send_on(message: Message) -> None:
            nonlocal delayed
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get("content-type", "").partition(";")[0] == "application/json":
                    headers.add_vary_header("Accept-Encoding")
                    if coding is not None and "content-encoding" not in headers:
                        delayed = message  # its headers depend on the body
                        return
            elif delayed is not None:
                start, delayed = delayed, None
                body = message.get("body", b"")
                if coding is not None and len(body) >= MIN_BYTES and not message.get("more_body", False):
                    body = await _compress(body, coding)
                    MutableHeaders(scope=start).update({"content-encoding": coding, "content-length": str(len(body))})
                    message = {**message, "body": body}
                await send(start)
            await send(message)

        await self._app(scope, receive, send_on)


async def _compress(body: bytes, coding: Coding) -> bytes:
    if len(body) > _INLINE_BYTES:
        return await asyncio.to_thread(lambda: b"".join(compressed([body], coding)))
    return b"".join(compressed([body], coding))


def _weight(parameter: str) -> float:
    """The weight of a coding, from 0 to 1. What can't be understood asks for nothing."""
    name, _, value = parameter.partition("=")
    if not name.strip():
        return 1.0
    try:
        weight = float(value) if name.strip().lower() == "q" else 0.0
    except ValueError:
        return 0.0
    return weight if 0 <= weight <= 1 else 0.0


class _Sink(io.RawIOBase):
    """Collects what a stream writes."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # Arrow writes bytes
        self._chunks.append(bytes(data))
        return len(data)

    def take(self) -> list[bytes]:
        """Take the collected bytes."""
        taken, self._chunks = self._chunks, []
        return taken
