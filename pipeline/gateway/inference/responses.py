"""Answers on their way: whole ones, and streams, which their readers may leave and go on with.

What was taken for a request of its caller's limits is given back before the caller has the last of its answer, however
that ends: else a caller that asks again at once could be refused for a request that is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool

from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.errors import ApiError, not_found
from pipeline.gateway.inference.chunks import Chunks, error_of, failure
from pipeline.gateway.inference.lane_bridge import LaneBridge
from pipeline.gateway.inference.request_builder import InferenceRequest, InferenceRequestBuilder
from pipeline.gateway.inference.stream_buffer import StreamBuffer
from pipeline.ports import Clock
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest, TokensEvent


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Bounds of streams; bytes and seconds.

    Attributes:
        buffer_bytes: of a stream, that wait for its reader, or are kept for one that comes back.
        keep_alive: a stream that has nothing to tell for so long says so.
        patience: a stream begins after this long even if nothing has come; before, a refusal is a plain answer.
        most_kept: streams that can be gone on with, at once.  most_kept_by_one: of them, of one tenant.
    """

    buffer_bytes: int = 1 << 20
    keep_alive: float = 15.0
    patience: float = 10.0
    most_kept: int = 1_000
    most_kept_by_one: int = 250


class Stream:
    """An answer that is told as it comes. Of one event loop.

    Args:
        ended: begins to give back what was taken for the request; None: nothing was.

    Attributes:
        id: by which it can be gone on with.  tenant: whose it is.
        first: done when anything has come; an `ErrorEvent` that came first is its result.
    """

    def __init__(
        self,
        asked: InferenceRequest,
        bridge: LaneBridge,
        created: int,
        settings: StreamSettings,
        ended: Callable[[EndEvent | None], asyncio.Future[None] | None],
    ) -> None:
        self.id = asked.request.id
        self.tenant = asked.request.tenant
        self.first: asyncio.Future[ErrorEvent | None] = asyncio.get_running_loop().create_future()
        self.feed = StreamBuffer(settings.buffer_bytes, keep=asked.resume > 0)
        self.settings = settings
        self.resume = asked.resume
        self._chunks = Chunks(asked, created)
        self._bridge = bridge
        self._ended = ended
        self._over = False
        self._given_back: asyncio.Future[None] | None = None
        self._readers = 0
        self._closing: asyncio.TimerHandle | None = None

    def take_in(self, event: LaneEvent) -> None:
        """An event of the answer has come."""
        told = list(self._chunks.of(event))
        if isinstance(event, EndEvent | ErrorEvent):
            self._bridge.forget(self.id)
            self._end(told, event)
            return
        for data in told:
            self.feed.push(data)
        if self.feed.overrun:
            self.cancel()
        self._begun(None)

    def fail(self, error: ApiError) -> None:
        """End it here and now."""
        if not self._over:
            self._bridge.cancel(self.id)
            self._end(failure(error), None)

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self._bridge.cancel(self.id)
        self.feed.end()
        self._end((), None)

    async def given_back(self) -> None:
        """Until what was taken for it is given back, once it is over."""
        if self._given_back is not None:
            await asyncio.shield(self._given_back)

    def _end(self, last: Iterable[bytes], event: EndEvent | ErrorEvent | None) -> None:
        """Give back what was taken for it, and then tell the last of it."""
        if self._over:
            return
        self._over = True

        def tell(_: object = None) -> None:
            for data in last:
                self.feed.push(data)
            self.feed.end()
            self._begun(event)

        self._given_back = self._ended(event if isinstance(event, EndEvent) else None)
        if self._given_back is None:
            tell()
        else:
            self._given_back.add_done_callback(tell)

    def _begun(self, event: EndEvent | ErrorEvent | None) -> None:
        if not self.first.done():
            self.first.set_result(event if isinstance(event, ErrorEvent) else None)

    def enter(self) -> None:
        """A reader comes."""
        self._readers += 1
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    def leave(self, close: Callable[[], None]) -> None:
        """A reader goes. When it was the last, the stream is kept for as long as was asked, and then is closed."""
        self._readers -= 1
        if self._readers:
            return

        def end() -> None:
            if not self.feed.ended:
                self.cancel()
            close()

        if self.resume:
            self._closing = asyncio.get_running_loop().call_later(self.resume, end)
        else:
            end()


class Answers:
    """All answers that are on their way in this process. Of one event loop."""

    def __init__(
        self, asker: InferenceRequestBuilder, bridge: LaneBridge, clock: Clock, settings: StreamSettings | None = None
    ) -> None:
        self.asker = asker
        self.bridge = bridge
        self._clock = clock
        self._settings = settings or StreamSettings()
        self._kept: dict[str, Stream] = {}
        self._streams: set[Stream] = set()
        self._waiting: dict[str, asyncio.Future[EndEvent | ErrorEvent]] = {}  # whole answers, by request

    async def read(self, caller: Caller, url: str, body: Mapping[str, Any]) -> InferenceRequest:
        """What the body asks for, to be handed to `whole` or `stream`; raises `ApiError`."""
        reading = asyncio.ensure_future(run_in_threadpool(self.asker.read, caller, url, body))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:  # what is being taken for it can be given back when it has been
            await asyncio.wait({reading})
            if reading.exception() is None:
                await _settled(self._over(reading.result(), None, 0))
            raise

    async def whole(self, asked: InferenceRequest) -> dict[str, Any]:
        """The whole answer. Cancelled with its task. Raises `ApiError`."""
        found = await self._find(asked)
        if found is not None:
            return found
        ended: asyncio.Future[EndEvent | ErrorEvent] = asyncio.get_running_loop().create_future()

        def take_in(event: LaneEvent) -> None:
            if isinstance(event, EndEvent | ErrorEvent) and not ended.done():
                ended.set_result(event)

        self._waiting[asked.request.id] = ended
        try:
            await self.bridge.start(asked.request, take_in)
            event = await ended
        except asyncio.CancelledError:
            self.bridge.cancel(asked.request.id)
            raise
        finally:
            self._waiting.pop(asked.request.id, None)
            if ended.done():
                self.bridge.forget(asked.request.id)
            await _settled(self._over(asked, _event_of(ended)))
        if isinstance(event, ErrorEvent):
            raise error_of(event)
        return event.response

    async def _find(self, asked: InferenceRequest) -> dict[str, Any] | None:
        """The answer that the same request had before."""
        if asked.cache_key is None:
            return None
        try:
            found = await asyncio.to_thread(self.asker.find, asked)
        except BaseException:
            await _settled(self._over(asked, None, 0))
            raise
        if found is not None:
            self.bridge.figures.found(asked.request.tier)
            await _settled(self._over(asked, None, 0))
        return found

    def _over(
        self, asked: InferenceRequest, event: EndEvent | None, used: int | None = None
    ) -> asyncio.Future[None] | None:
        """The request has ended: its answer may be kept, and what was taken for it is given back; done when it is.
        None: nothing was taken."""
        if event is not None:
            used = event.response.get("usage", {}).get("total_tokens")
        loop = asyncio.get_running_loop()
        giving = None
        if asked.ticket is not None and not asked.ticket.empty:
            giving = loop.run_in_executor(None, self.asker.ended, asked, used)
        if event is not None and asked.cache_key is not None:
            loop.run_in_executor(None, self.asker.keep, asked, event)
        return giving

    async def stream(self, asked: InferenceRequest) -> Stream:
        """A stream that has begun; what is refused before anything came raises `ApiError`. Its reader has entered."""
        if asked.resume and (full := self._full(asked.request.tenant)):
            await _settled(self._over(asked, None, 0))
            message = f"{full} streams that can be gone on with are open; ask later, or without"
            raise ApiError(429, "too_many_streams", message, headers={"Retry-After": "10"})
        now = int(self._clock.now().timestamp())
        known = await self._find(asked)

        def ended(event: EndEvent | None) -> asyncio.Future[None] | None:
            return self._over(asked, event) if known is None else None

        stream = Stream(asked, self.bridge, now, self._settings, ended)
        stream.enter()
        self._streams.add(stream)
        try:
            if known is None:
                await self.bridge.start(asked.request, stream.take_in)
            else:
                for event in replay(asked.request, known):
                    stream.take_in(event)
            done, _ = await asyncio.wait({stream.first}, timeout=self._settings.patience)
            refused = stream.first.result() if done else None
            if refused is not None:
                raise error_of(refused)
        except BaseException:
            stream.cancel()
            self._streams.discard(stream)
            await stream.given_back()
            raise
        if asked.resume:
            self._kept[stream.id] = stream
        return stream

    def find(self, tenant: str, stream_id: str) -> Stream:
        """A stream that can be gone on with, entered by a new reader; raises `ApiError`."""
        found = self._kept.get(stream_id)
        if found is None or found.tenant != tenant:
            raise not_found("stream", stream_id)
        found.enter()
        return found

    def left(self, stream: Stream) -> None:
        """A reader of the stream has gone."""
        stream.leave(lambda: self._drop(stream))

    def end_all(self, error: ApiError) -> None:
        """Nothing that is still under way comes to its end here."""
        for stream in list(self._streams):
            stream.fail(error)
        for name, ended in list(self._waiting.items()):
            if not ended.done():
                self.bridge.cancel(name)
                ended.set_result(ErrorEvent("x", 1, 0, error.code, error.message, error.status))

    def _full(self, tenant: str) -> str | None:
        """How many streams are kept, where that is as many as may be."""
        if len(self._kept) >= self._settings.most_kept:
            return str(self._settings.most_kept)
        most = self._settings.most_kept_by_one
        of_tenant = sum(1 for stream in self._kept.values() if stream.tenant == tenant)
        return f"{most} of this tenant's" if of_tenant >= most else None

    def _drop(self, stream: Stream) -> None:
        self._kept.pop(stream.id, None)
        self._streams.discard(stream)


def replay(request: LaneRequest, response: Mapping[str, Any]) -> Iterator[LaneEvent]:
    """A whole answer as the events of a stream: each choice at once, and the end."""
    for number, choice in enumerate(response["choices"]):
        chat = "message" in choice
        text = (choice["message"].get("content") if chat else choice["text"]) or ""
        logprobs = choice.get("logprobs") if chat else None
        yield TokensEvent(request.id, 1, number, choice["index"], (), text, logprobs)
    yield EndEvent(request.id, 1, len(response["choices"]), dict(response))


async def _settled(giving: asyncio.Future[None] | None) -> None:
    """Until it is given back, which goes on if nobody waits any more."""
    if giving is not None:
        await asyncio.shield(giving)


def _event_of(ended: asyncio.Future[EndEvent | ErrorEvent]) -> EndEvent | None:
    """The end, if it has come."""
    event = ended.result() if ended.done() and not ended.cancelled() else None
    return event if isinstance(event, EndEvent) else None
