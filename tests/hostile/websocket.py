"""Attacks over WebSockets, frame by frame: a client library would not send them."""

from __future__ import annotations

import asyncio
import base64
import os
import struct
import zlib
from collections.abc import Awaitable, Callable
from typing import Final

from tests.hostile.attack import Answer, Attack, Expected, Target, tally
from tests.hostile.client import answer_of, chat
from tests.waiting import HANG_SECONDS

MIB: Final = 1 << 20
COMPRESSED: Final = 0x40
FINAL: Final = 0x80
TEXT: Final = 1
HELD_SECONDS: Final = 45.0
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def frame(payload: bytes, flags: int = FINAL | TEXT) -> bytes:
    """A client's frame; masked with zeros."""
    size = len(payload)
    if size < 126:
        head = bytes([flags, 0x80 | size])
    elif size < 65_536:
        head = bytes([flags, 0x80 | 126]) + struct.pack(">H", size)
    else:
        head = bytes([flags, 0x80 | 127]) + struct.pack(">Q", size)
    return head + b"\0\0\0\0" + payload


def deflated(data: bytes) -> bytes:
    """A message as permessage-deflate has it."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return (packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)).removesuffix(b"\0\0\xff\xff")


async def opened(target: Target, compression: bool = False) -> Connection | Answer:
    """A connection, or why there is none. With `compression` a gateway that does not agree to it is an answer, too."""
    extension = "Sec-WebSocket-Extensions: permessage-deflate; client_no_context_takeover\r\n" if compression else ""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    writer.write(
        (
            f"GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}\r\nSec-WebSocket-Version: 13\r\n"
            f"{extension}Authorization: Bearer {target.keys['bad']}\r\n\r\n"
        ).encode()
    )
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANG_SECONDS)
    status = int(head.split(b" ", 2)[1])
    if status != 101:
        received = await asyncio.wait_for(reader.read(65_536), HANG_SECONDS)
        writer.close()
        return answer_of(status, received)
    if compression and b"permessage-deflate" not in head:
        writer.close()
        return Answer("websocket", "no compression")
    return reader, writer


async def outcome(connection: Connection, seconds: float) -> Answer:
    """The first error event, or how it was closed."""
    reader, writer = connection
    try:
        async with asyncio.timeout(seconds):
            while True:
                first, second = await reader.readexactly(2)
                size = second & 0x7F
                if size >= 126:
                    size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
                payload = await reader.readexactly(size)
                if first & 0xF == 8:
                    code = int.from_bytes(payload[:2], "big")
                    return Answer("websocket", str(code), message=payload[2:].decode(errors="replace"))
                if b'"error"' in payload[:40]:
                    return _error_event(payload)
    except TimeoutError:
        return Answer("timeout", "still open")
    except (asyncio.IncompleteReadError, OSError) as error:
        return Answer("closed", "connection", message=str(error))
    finally:
        writer.close()


def _error_event(payload: bytes) -> Answer:
    import json  # noqa: PLC0415

    error = json.loads(payload)["error"]
    return Answer("websocket", "error", error.get("code"), str(error.get("message")))


def _all(number: int, one: Callable[[], Awaitable[Answer]]) -> list[Answer]:
    async def guarded() -> Answer:
        try:
            return await one()
        except (OSError, asyncio.IncompleteReadError) as error:
            return Answer("closed", "connection", message=str(error))
        except TimeoutError as error:
            return Answer("timeout", "no answer", message=str(error))

    async def together() -> list[Answer]:
        return await asyncio.gather(*(guarded() for _ in range(number)))

    return tally(asyncio.run(together()))


def _sent(target: Target, data: bytes, seconds: float, compression: bool = False) -> Callable[[], Awaitable[Answer]]:
    async def one() -> Answer:
        connection = await opened(target, compression)
        if isinstance(connection, Answer):
            return connection
        try:
            connection[1].write(data)
            await connection[1].drain()
        except OSError:
            pass  # what the server sent before it hung up is read below
        return await outcome(connection, seconds)

    return one


def compression_bombs(target: Target) -> list[Answer]:
    """60 connections with 9.5 MiB each in 10 kB, whose message has no end."""
    data = frame(deflated(b'{"type": "request", "pad": "' + b"A" * int(9.5 * MIB)), TEXT | COMPRESSED)
    return _all(60, _sent(target, data, HELD_SECONDS, compression=True))


def compression_stall(target: Target) -> list[Answer]:
    """100 whole messages of 9.9 MiB in 10 kB each."""
    data = frame(deflated(b"A" * int(9.9 * MIB)), FINAL | TEXT | COMPRESSED) * 5
    return _all(20, _sent(target, data, 30, compression=True))


def compressed_anyway(target: Target) -> list[Answer]:
    """The bit of a compressed frame, though no compression was agreed to."""
    return _all(5, _sent(target, frame(deflated(b"A" * MIB), FINAL | TEXT | COMPRESSED), 30))


def many_sockets(target: Target) -> list[Answer]:
    """1,000 connections of one tenant, held for five seconds."""

    async def one() -> Answer:
        connection = await opened(target)
        if isinstance(connection, Answer):
            return connection
        await asyncio.sleep(5.0)
        connection[1].close()
        return Answer("websocket", "held")

    return _all(1_000, one)


def endless_messages(target: Target) -> list[Answer]:
    """50 messages of 512 KiB without an end, and pings after them."""

    async def one() -> Answer:
        connection = await opened(target)
        if isinstance(connection, Answer):
            return connection
        writer = connection[1]
        writer.write(frame(b"{" + b" " * (MIB // 2), TEXT))

        async def ping() -> None:
            while True:
                await asyncio.sleep(1.0)
                writer.write(frame(b"", FINAL | 9))

        pings = asyncio.create_task(ping())
        try:
            return await outcome(connection, HELD_SECONDS)
        finally:
            pings.cancel()

    return _all(50, one)


def large_messages(target: Target) -> list[Answer]:
    """120 messages of 9.5 MiB at once, which together are more than all bodies may be."""
    return _all(120, _sent(target, frame(b'"' + b"A" * int(9.5 * MIB) + b'"'), 60))


def too_large(target: Target) -> list[Answer]:
    return _all(2, _sent(target, frame(b"A" * (11 * MIB)), 30))


def invalid_messages(target: Target) -> list[Answer]:
    """No JSON, no UTF-8, nested brackets, and an unknown type."""
    given = (b"\xff\xfe", b"[" * 100_000, b"null", b'{"type": "x"}', b"[" + b"0," * 3_000_000 + b"0]")
    return tally(answer for data in given for answer in _all(1, _sent(target, frame(data), 30)))


def slow_reader(target: Target) -> list[Answer]:
    """Four streams of eight long choices, of which nothing is read for 20 seconds."""
    import json  # noqa: PLC0415

    body = {**chat("slow reader", 1_000), "n": 2, "ignore_eos": True, "stream": True, "temperature": 1}
    data = frame(json.dumps({"type": "request", "url": "/v1/chat/completions", "body": body}).encode())

    async def one() -> Answer:
        connection = await opened(target)
        if isinstance(connection, Answer):
            return connection
        connection[1].write(data)
        await asyncio.sleep(20.0)
        connection[1].close()
        return Answer("websocket", "held")

    return _all(4, one)


CLOSED: Final = Expected("closed", "connection")
REFUSED: Final = Expected("http", "429|503", message="socket|connection|stream|many")
NO_COMPRESSION: Final = (Expected("websocket", "no compression", required=True),)
BOUNDED: Final = Expected("http", "429|503", message="socket|connection|stream|many", required=True)

TABLE: Final = (
    Attack("websocket: compression bombs", compression_bombs, (*NO_COMPRESSION, REFUSED)),
    Attack("websocket: 100 compressed messages", compression_stall, NO_COMPRESSION),
    Attack(
        "websocket: compressed though not agreed", compressed_anyway,
        (Expected("websocket", "1002|1003|1007"), CLOSED), quick=True,
    ),
    Attack("websocket: 1,000 sockets of a tenant", many_sockets, (Expected("websocket", "held"), BOUNDED)),
    Attack(
        "websocket: messages without an end", endless_messages,
        (Expected("websocket", "1008"), Expected("http", "429|503")),
    ),
    Attack(
        "websocket: 1.1 GB of messages at once", large_messages,
        (Expected("websocket", "error", message="."), Expected("websocket", "1008|1009|1013"), REFUSED, CLOSED),
    ),
    Attack("websocket: a message of 11 MiB", too_large, (Expected("websocket", "1009|1008"), CLOSED), quick=True),
    Attack(
        "websocket: messages that are no requests", invalid_messages,
        (Expected("websocket", "error", message="."), Expected("websocket", "1003|1007|1009"), CLOSED), quick=True,
    ),
    Attack(
        "websocket: streams that no client reads", slow_reader,
        (Expected("websocket", "held"), Expected("http", "429|503"), CLOSED),
    ),
)  # fmt: skip
