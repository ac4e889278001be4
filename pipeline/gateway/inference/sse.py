"""A stream as server-sent events: each has its number as id, so that a reader that was cut off can say where to go on.

A stream never ends bare: its last event is `[DONE]`, and before it comes either the answer's end or an error.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.inference.chunks import failure
from pipeline.gateway.inference.responses import Stream
from pipeline.gateway.inference.stream_buffer import Item, Overrun

STREAM_ID: Final = "x-stream-id"
KEEP_ALIVE: Final = b": keep-alive\n\n"

TOO_SLOW: Final = ApiError(
    503, "stream_overrun", "this stream was read too slowly, and what came next has been dropped; read faster"
)


class EventStream(Response):
    """The answer to a request for a stream.

    Args:
        after: the number of the last event that the reader has; -1: none.
        left: told when the reader has gone, however that came.
    """

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, left: Callable[[Stream], None], after: int = -1) -> None:
        super().__init__(headers={STREAM_ID: stream.id, "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream
        self._left = left
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            gone = asyncio.create_task(until_gone(receive))
            sending = asyncio.create_task(self._send(send))
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
            for task in (gone, sending):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        finally:
            self._left(self._stream)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in events(self._stream, self._after):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def events(stream: Stream, after: int) -> AsyncIterator[bytes]:
    """The stream behind event `after`, to its end."""
    async for items in pieces(stream, after):
        yield b"".join(b"id: %d\ndata: %b\n\n" % (item.number, item.data) for item in items) or KEEP_ALIVE


async def pieces(stream: Stream, after: int) -> AsyncIterator[list[Item]]:
    """The stream's events behind number `after`, as they come; nothing, where it is only to be said that the stream
    lives. A reader that was too slow gets an error for its last."""
    while True:
        try:
            items = await stream.feed.take(after, stream.settings.keep_alive)
        except Overrun:
            await stream.given_back()
            yield [Item(after + 1 + number, data) for number, data in enumerate(failure(TOO_SLOW))]
            return
        if not items and stream.feed.ended:
            return
        yield items
        if items:
            after = items[-1].number


async def until_gone(receive: Receive) -> None:
    """Until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
