"""Responses in progress: complete ones, and streams, which can be resumed.

The rate-limit tokens and slots of a request are released before the caller gets the last part of its response:
otherwise a caller that sends its next request at once could be refused because of a finished one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.concurrency import run_in_threadpool

from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.errors import ApiError, not_found
from pipeline.gateway.inference.chunks import lane_error
from pipeline.gateway.inference.converters import converter_of
from pipeline.gateway.inference.lane_bridge import LaneBridge, Sink
from pipeline.gateway.inference.mirroring import Mirror
from pipeline.gateway.inference.request_builder import InferenceRequest, InferenceRequestBuilder
from pipeline.gateway.inference.stream_buffer import ServerEvent, StreamBuffer
from pipeline.ports import Clock
from schemas.workers.lane import EndEvent, ErrorEvent, HandBackEvent, LaneEvent, LaneRequest, TokensEvent


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Bounds of streams.

    Attributes:
        buffer_bytes: of a stream's events that are unread, or retained for readers that resume.
        keep_alive_seconds: seconds without an event after which a keep-alive is sent.
        first_event_timeout_seconds: seconds after which the HTTP response begins even without a first event; an error
            before that is a plain error response.
        max_resumable: concurrent resumable streams.  max_resumable_per_tenant: those of one tenant.
    """

    buffer_bytes: int = 1 << 20
    keep_alive_seconds: float = 15.0
    first_event_timeout_seconds: float = 10.0
    max_resumable: int = 1_000
    max_resumable_per_tenant: int = 250


class CompleteResponse(NamedTuple):
    """A whole response. `served_by`: the name of the model that answered."""

    body: dict[str, Any]
    served_by: str


class Stream:
    """A streamed response. For one event loop.

    Args:
        ended: starts the release of the request's rate-limit tokens; returns None when it holds none.

    Attributes:
        id: the id to resume the stream with.  tenant: the owner.  served_by: the name of the model that answers.
        first: done when the first event has arrived; its result is that event when it is an `ErrorEvent`.
        converter: makes the stream's events.
    """

    def __init__(
        self,
        inference: InferenceRequest,
        bridge: LaneBridge,
        created: int,
        settings: StreamSettings,
        ended: Callable[[EndEvent | None], asyncio.Future[None] | None],
    ) -> None:
        self.id = inference.request.id
        self.tenant = inference.request.tenant
        self.served_by = inference.version(inference.served_by, 1)
        self.first: asyncio.Future[ErrorEvent | None] = asyncio.get_running_loop().create_future()
        self.buffer = StreamBuffer(settings.buffer_bytes, retain=inference.resume > 0)
        self.settings = settings
        self.resume = inference.resume
        self.converter = converter_of(inference, created)
        self._inference = inference
        self._bridge = bridge
        self._ended = ended
        self._has_ended = False
        self._released: asyncio.Future[None] | None = None
        self._readers = 0
        self._closing: asyncio.TimerHandle | None = None

    def handle_event(self, event: LaneEvent) -> None:
        """Append an event of the response to the buffer."""
        if isinstance(event, HandBackEvent):
            self.served_by = event.route.name if event.route is not None else self.served_by
            return
        if event.attempt > 1 and self.served_by == self._inference.version(self._inference.served_by, 1):
            self.served_by = self._inference.served_by  # of a candidate only the first attempt is its own
        if isinstance(event, ErrorEvent):
            event = self._inference.translate(event)
        converted = self.converter.convert(event)
        if isinstance(event, EndEvent | ErrorEvent):
            self._bridge.forget(self.id)
            self._end(converted, event)
            return
        self.buffer.push(*converted)
        if self.buffer.overrun:
            self.cancel()
        self._set_first(None)

    def fail(self, error: ApiError) -> None:
        """End the stream with an error."""
        if not self._has_ended:
            self._bridge.cancel(self.id)
            self._end(self.converter.fail(error), None)

    def cancel(self) -> None:
        """Cancel the request and end the stream."""
        self._bridge.cancel(self.id)
        self.buffer.end()
        self._end((), None)

    async def wait_released(self) -> None:
        """Wait until the request's rate-limit tokens are released, if the stream has ended."""
        if self._released is not None:
            await asyncio.shield(self._released)

    def _end(self, last: Iterable[ServerEvent], event: EndEvent | ErrorEvent | None) -> None:
        """Release the request's rate-limit tokens, and then push the last events."""
        if self._has_ended:
            return
        self._has_ended = True

        def push_last(_: object = None) -> None:
            self.buffer.push(*last)
            self.buffer.end()
            self._set_first(event)

        self._released = self._ended(event if isinstance(event, EndEvent) else None)
        if self._released is None:
            push_last()
        else:
            self._released.add_done_callback(push_last)

    def _set_first(self, event: EndEvent | ErrorEvent | None) -> None:
        if not self.first.done():
            self.first.set_result(event if isinstance(event, ErrorEvent) else None)

    def attach_reader(self) -> None:
        """Attach a reader."""
        self._readers += 1
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    def detach_reader(self, close: Callable[[], None]) -> None:
        """Detach a reader. After the last one, a resumable stream is retained for `resume` seconds and then closed."""
        self._readers -= 1
        if self._readers:
            return

        def end() -> None:
            if not self.buffer.ended:
                self.cancel()
            close()

        if self.resume:
            self._closing = asyncio.get_running_loop().call_later(self.resume, end)
        else:
            end()


class InferenceResponses:
    """All inference responses in progress in this process. For one event loop."""

    def __init__(
        self,
        builder: InferenceRequestBuilder,
        bridge: LaneBridge,
        clock: Clock,
        settings: StreamSettings | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        """`mirror`: copies requests to versions on trial; None: none is copied."""
        self.builder = builder
        self.bridge = bridge
        self._mirror = mirror
        self._clock = clock
        self._settings = settings or StreamSettings()
        self._resumable: dict[str, Stream] = {}
        self._streams: set[Stream] = set()
        self._waiting: dict[str, asyncio.Future[EndEvent | ErrorEvent]] = {}  # complete responses, by request id

    async def read(self, caller: Caller, url: str, body: Mapping[str, Any]) -> InferenceRequest:
        """Build and admit the request of a body, for `complete` or `stream`; raises `ApiError`."""
        reading = asyncio.ensure_future(run_in_threadpool(self.builder.read, caller, url, body))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:  # its tokens can be released only after they have been taken
            await asyncio.wait({reading})
            if reading.exception() is None:
                await _wait_released(self._finish(reading.result(), None, 0))
            raise

    async def complete(self, inference: InferenceRequest) -> CompleteResponse:
        """The complete response, in the format of the request's url. The request is cancelled with its task. Raises
        `ApiError`."""
        found = await self._find(inference)
        if found is not None:
            return self._complete(inference, found, 1)
        ended: asyncio.Future[EndEvent | ErrorEvent] = asyncio.get_running_loop().create_future()

        def handle_event(event: LaneEvent) -> None:
            if isinstance(event, EndEvent | ErrorEvent) and not ended.done():
                ended.set_result(event)

        self._waiting[inference.request.id] = ended
        try:
            await self._start(inference, handle_event)
            event = await ended
        except asyncio.CancelledError:
            self.bridge.cancel(inference.request.id)
            raise
        finally:
            self._waiting.pop(inference.request.id, None)
            if ended.done():
                self.bridge.forget(inference.request.id)
            await _wait_released(self._finish(inference, _end_event(ended)))
        if isinstance(event, ErrorEvent):
            raise lane_error(inference.translate(event))
        return self._complete(inference, event.response, event.attempt)

    def _complete(self, inference: InferenceRequest, response: dict[str, Any], attempt: int) -> CompleteResponse:
        served_by = inference.version(response.get("model", inference.served_by), attempt)
        return CompleteResponse(inference.rewrite(response), served_by)

    async def _start(self, inference: InferenceRequest, sink: Sink) -> None:
        """Send the request. Raises `ApiError`."""
        if self._mirror is None:
            await self.bridge.start(inference.request, sink)
        else:
            await self._mirror.start(inference.request, sink, inference.canary, is_stream=inference.stream)

    async def _find(self, inference: InferenceRequest) -> dict[str, Any] | None:
        """The cached response of the same request; its rate-limit tokens are then released."""
        if inference.cache_key is None:
            return None
        try:
            found = await asyncio.to_thread(self.builder.find_cached, inference)
        except BaseException:
            await _wait_released(self._finish(inference, None, 0))
            raise
        if found is not None:
            self.bridge.metrics.count_cache_hit(inference.request.tier)
            await _wait_released(self._finish(inference, None, 0))
        return found

    def _finish(
        self, inference: InferenceRequest, event: EndEvent | None, used: int | None = None
    ) -> asyncio.Future[None] | None:
        """Finish a request: cache its response and release its rate-limit tokens. Returns the future of the release;
        None: the request holds none."""
        if event is not None:
            used = _used_tokens(event.response)
        loop = asyncio.get_running_loop()
        releasing = None
        if inference.ticket is not None and not inference.ticket.empty:
            releasing = loop.run_in_executor(None, self.builder.release, inference, used)
        is_other_version = inference.canary is not None and event is not None and event.attempt > 1
        if event is not None and inference.cache_key is not None and not is_other_version:
            loop.run_in_executor(None, self.builder.add_to_cache, inference, event)
        return releasing

    async def stream(self, inference: InferenceRequest) -> Stream:
        """Start a stream with one reader attached. An error before the first event raises `ApiError`."""
        if inference.resume and (full := self._resumable_limit(inference.request.tenant)):
            await _wait_released(self._finish(inference, None, 0))
            message = f"{full} streams that can be gone on with are open; ask later, or without"
            raise ApiError(429, "too_many_streams", message, headers={"Retry-After": "10"})
        now = int(self._clock.now().timestamp())
        cached = await self._find(inference)

        def ended(event: EndEvent | None) -> asyncio.Future[None] | None:
            return self._finish(inference, event) if cached is None else None

        stream = Stream(inference, self.bridge, now, self._settings, ended)
        stream.attach_reader()
        self._streams.add(stream)
        try:
            if cached is None:
                await self._start(inference, stream.handle_event)
            else:
                for event in replay(inference.request, cached):
                    stream.handle_event(event)
            done, _ = await asyncio.wait({stream.first}, timeout=self._settings.first_event_timeout_seconds)
            refused = stream.first.result() if done else None
            if refused is not None:
                raise lane_error(refused)
        except BaseException:
            stream.cancel()
            self._streams.discard(stream)
            await stream.wait_released()
            raise
        if inference.resume:
            self._resumable[stream.id] = stream
        return stream

    def find(self, tenant: str, stream_id: str) -> Stream:
        """Attach a new reader to a resumable stream; raises `ApiError` (404)."""
        found = self._resumable.get(stream_id)
        if found is None or found.tenant != tenant:
            raise not_found("stream", stream_id)
        found.attach_reader()
        return found

    def detach(self, stream: Stream) -> None:
        """Detach a reader from the stream."""
        stream.detach_reader(lambda: self._remove(stream))

    def end_all(self, error: ApiError) -> None:
        """End all responses in progress with an error."""
        for stream in list(self._streams):
            stream.fail(error)
        for name, ended in list(self._waiting.items()):
            if not ended.done():
                self.bridge.cancel(name)
                ended.set_result(ErrorEvent("x", 1, 0, error.code, error.message, error.status))

    def _resumable_limit(self, tenant: str) -> str | None:
        """The bound of resumable streams that is reached, as text for the error; None: neither is."""
        if len(self._resumable) >= self._settings.max_resumable:
            return str(self._settings.max_resumable)
        most = self._settings.max_resumable_per_tenant
        of_tenant = sum(1 for stream in self._resumable.values() if stream.tenant == tenant)
        return f"{most} of this tenant's" if of_tenant >= most else None

    def _remove(self, stream: Stream) -> None:
        self._resumable.pop(stream.id, None)
        self._streams.discard(stream)


def replay(request: LaneRequest, response: Mapping[str, Any]) -> Iterator[LaneEvent]:
    """Convert a complete response into the events of a stream: one event for each choice, and the end."""
    for number, choice in enumerate(response["choices"]):
        position = request.id, 1, number, choice["index"]
        message = choice.get("message", {})
        yield TokensEvent(
            *position,
            tokens=tuple(choice.get("token_ids") or ()),
            text=message.get("content", choice.get("text")) or "",
            logprobs=choice.get("logprobs") if message else None,
            tool_calls=[{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or ())] or None,
            reasoning=message.get("reasoning_content") or "",
            prompt_token_ids=response.get("prompt_token_ids", choice.get("prompt_token_ids")),
        )
    yield EndEvent(request.id, 1, len(response["choices"]), dict(response))


def _used_tokens(response: Mapping[str, Any]) -> int | None:
    """The tokens of prompt and output, or of what was tokenized; None: the response doesn't have their number."""
    usage = response.get("usage")
    used = response.get("count", response.get("input_tokens")) if usage is None else usage.get("total_tokens")
    return used if isinstance(used, int) else None


async def _wait_released(releasing: asyncio.Future[None] | None) -> None:
    """Wait for a release, which continues when the wait is cancelled."""
    if releasing is not None:
        await asyncio.shield(releasing)


def _end_event(ended: asyncio.Future[EndEvent | ErrorEvent]) -> EndEvent | None:
    """The end event of a response, if it has arrived."""
    event = ended.result() if ended.done() and not ended.cancelled() else None
    return event if isinstance(event, EndEvent) else None
