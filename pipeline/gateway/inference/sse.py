"""Streams as server-sent events (SSE). The id of each event is its number, so an interrupted reader can resume
after it.

The last event of a stream in OpenAI's chat or completion format is always `[DONE]`, preceded by either the response's
end or an error. The events of a dialect's stream have names, and its last event is the dialect's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.inference.responses import Stream
from pipeline.gateway.inference.stream_buffer import Item, Overrun

STREAM_ID: Final = "x-stream-id"
KEEP_ALIVE: Final = b": keep-alive\n"
"""A comment. No blank line follows: OpenAI's and Anthropic's clients would read an event without data, and fail."""

TOO_SLOW: Final = ApiError(
    503, "stream_overrun", "this stream was read too slowly, and what came next has been dropped; read faster"
)


class EventStream(Response):
    """The HTTP response of a streamed request.

    Args:
        after: the number of the last event that the reader has; -1: none.
        on_detach: called when the reader has disconnected or the stream has ended.
    """

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, on_detach: Callable[[Stream], None], after: int = -1) -> None:
        super().__init__(headers={STREAM_ID: stream.id, "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream
        self._on_detach = on_detach
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            gone = asyncio.create_task(wait_for_disconnect(receive))
            sending = asyncio.create_task(self._send(send))
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
            for task in (gone, sending):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        finally:
            self._on_detach(self._stream)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in encode_events(self._stream, self._after):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def encode_events(stream: Stream, after: int) -> AsyncIterator[bytes]:
    """The stream's events after number `after`, encoded as SSE, to its end."""
    async for items in read_items(stream, after):
        yield b"".join(map(_encode, items)) or KEEP_ALIVE


def _encode(item: Item) -> bytes:
    name = b"event: %b\n" % item.name.encode() if item.name else b""
    return b"id: %d\n%bdata: %b\n\n" % (item.number, name, item.data)


async def read_items(stream: Stream, after: int) -> AsyncIterator[list[Item]]:
    """The stream's events after number `after`, in batches as they arrive; an empty batch is a keep-alive. A
    reader that was too slow gets an error as its last event."""
    while True:
        try:
            items = await stream.buffer.take(after, stream.settings.keep_alive_seconds)
        except Overrun:
            await stream.wait_released()
            failure = stream.converter.fail(TOO_SLOW)
            yield [Item(after + 1 + number, *event) for number, event in enumerate(failure)]
            return
        if not items and stream.buffer.ended:
            return
        yield items
        if items:
            after = items[-1].number


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
