"""The worker's side of the lane on Redis Streams; `pipeline.adapters.redis_lane` says what lies where."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import redis
import structlog
from pydantic import ValidationError

from pipeline.adapters.redis_connection import RedisClient, RedisSettings, milliseconds
from pipeline.adapters.redis_lane_scripts import EMIT, GROUP, HOLD, TAKE
from pipeline.lane import LaneSettings
from pipeline.ports import Clock
from schemas.lane import LaneEvent, LaneRequest, closes_attempt, event_json, read_request

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LaneKeys:
    """The keys of one request."""

    wanted: str
    requests: str
    alive: str
    events: str
    entry: str


def keys_of(client: RedisClient, request: str, model: str) -> LaneKeys:
    """The keys of a request for a model."""
    return LaneKeys(
        client.key("lane", "wanted", request),
        client.key("lane", "requests", model),
        client.key("lane", "alive", request),
        client.key("lane", "events", request),
        client.key("lane", "entry", request),
    )


@dataclass(frozen=True, slots=True)
class _Taken:
    request: LaneRequest
    entry: str  # in the stream of requests
    keys: LaneKeys


class RedisLaneWorker:
    """`LaneWorker` of one worker; threads may share it.

    Attributes:
        dropped: entries that were no requests.
    """

    def __init__(self, redis: RedisSettings, name: str, clock: Clock, settings: LaneSettings) -> None:
        self._client = RedisClient(redis)
        self._redis = redis
        self._name = name
        self._clock = clock
        self._settings = settings
        self._lock = threading.Lock()
        self._taken: dict[str, _Taken] = {}
        self._next_claim = 0.0
        self._turn = 0
        self.dropped = 0
        self._take = self._client.script(TAKE)
        self._emit = self._client.script(EMIT)
        self._hold = self._client.script(HOLD)

    def take(self, models: Sequence[str], most: int, timeout: float) -> list[LaneRequest]:
        """Up to `most` requests for these models, or none after `timeout` seconds."""
        until = self._clock.monotonic() + timeout
        while models and most > 0:
            streams, each = self._turns(models, most)
            left = until - self._clock.monotonic()
            with self._client.told("take requests"):
                found = self._claimed(streams, each) or self._fresh(streams, each, left)
                taken = self._keep(found)
            if taken or left <= 0:
                return [one.request for one in taken]
        return []

    def emit(self, events: Sequence[LaneEvent]) -> frozenset[str]:
        """Hand events over; returns the requests that nobody wants from this worker any more."""
        known = [(event, self._known(event.request)) for event in events]
        unwanted = {event.request for event, taken in known if taken is None}
        # What is late of an attempt whose successor is here too is nobody's: the request itself is still wanted.
        told = [(event, taken) for event, taken in known if taken and event.attempt >= taken.request.attempt]
        if not told:
            return frozenset(unwanted)
        with self._client.told("hand over events"), self._client.raw.pipeline(transaction=False) as pipe:
            for event, taken in told:
                self._emit_one(event, taken, pipe)
            answers = pipe.execute()
        for (event, taken), wanted in zip(told, answers, strict=True):
            if not wanted:
                unwanted.add(event.request)
                self._forget(taken)
            elif closes_attempt(event):
                self._forget(taken)
        return frozenset(unwanted)

    def hold(self, requests: Collection[str]) -> frozenset[str]:
        """The worker lives and has these; returns those that nobody wants from it any more."""
        known = [(request, self._known(request)) for request in requests]
        unwanted = {request for request, taken in known if taken is None}
        held = [taken for _, taken in known if taken is not None]
        if not held:
            return frozenset(unwanted)
        with self._client.told("hold requests"), self._client.raw.pipeline(transaction=False) as pipe:
            for taken in held:
                self._hold(
                    keys=[taken.keys.wanted, taken.keys.requests, taken.keys.alive, taken.keys.events],
                    args=[taken.request.attempt, taken.entry, self._name, *self._times()],
                    client=pipe,
                )
            answers = pipe.execute()
        for taken, wanted in zip(held, answers, strict=True):
            if not wanted:
                unwanted.add(taken.request.id)
                self._forget(taken)
        return frozenset(unwanted)

    def close(self) -> None:
        """Close the connections. What was taken and not answered others get after the lifetime."""
        self._client.close()

    # -- taking

    def _turns(self, models: Sequence[str], most: int) -> tuple[list[str], int]:
        """The streams to ask now, and for how many requests each; another first each time, so that none starves."""
        self._turn += 1
        first = self._turn % len(models)
        streams = [self._client.key("lane", "requests", model) for model in (*models[first:], *models[:first])][:most]
        return streams, most // len(streams)

    def _claimed(self, streams: Sequence[str], each: int) -> list[tuple[str, Any]]:
        """Requests of workers that fell silent before they began to answer: (stream, entry) each."""
        now = self._clock.monotonic()
        if now < self._next_claim:
            return []
        self._next_claim = now + self._settings.lifetime / 4
        found: list[tuple[str, Any]] = []
        silent = milliseconds(self._settings.lifetime)
        for stream in streams:
            try:
                entries = self._client.raw.xautoclaim(stream, GROUP, self._name, silent, "0-0", count=each)[1]
            except redis.ResponseError as error:
                self._make_group(stream, error)
            else:
                found += [(stream, entry) for entry in entries if entry[1] is not None]
        if found:
            self._next_claim = 0.0  # there may be more
        return found

    def _fresh(self, streams: Sequence[str], each: int, timeout: float) -> list[tuple[str, Any]]:
        """Requests that nobody had before, waiting for them no longer than an answer of the server may take."""
        block = milliseconds(min(timeout, self._redis.timeout / 2)) if timeout > 0 else None
        try:
            found = self._client.raw.xreadgroup(GROUP, self._name, dict.fromkeys(streams, ">"), count=each, block=block)
        except redis.ResponseError as error:
            for stream in streams:
                self._make_group(stream, error)
            return []
        return [(stream.decode(), entry) for stream, entries in found or () for entry in entries]

    def _make_group(self, stream: str, error: redis.ResponseError) -> None:
        """For a stream that is new, ran out, or went with its server. Raises `error` if that isn't what is wrong."""
        if not str(error).startswith("NOGROUP"):
            raise error
        try:
            self._client.raw.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except redis.ResponseError as exists:
            if not str(exists).startswith("BUSYGROUP"):
                raise
        else:
            self._client.raw.pexpire(stream, milliseconds(self._settings.longest + self._settings.retention))

    def _keep(self, found: Sequence[tuple[str, Any]]) -> list[_Taken]:
        """Those of the entries that are requests which somebody wants; the others are struck off."""
        read = [(stream, entry[0].decode(), self._read(stream, entry)) for stream, entry in found]
        for stream, entry, request in read:
            if request is None:
                self._client.raw.xack(stream, GROUP, entry)
                self._client.raw.xdel(stream, entry)
        taken = [
            _Taken(request, entry, keys_of(self._client, request.id, request.model))
            for _, entry, request in read
            if request is not None
        ]
        if not taken:
            return []
        with self._client.raw.pipeline(transaction=False) as pipe:
            for one in taken:
                self._take(
                    keys=[one.keys.wanted, one.keys.requests, one.keys.alive],
                    args=[one.request.attempt, one.entry, milliseconds(self._settings.lifetime)],
                    client=pipe,
                )
            answers = pipe.execute()
        kept = [one for one, wanted in zip(taken, answers, strict=True) if wanted]
        with self._lock:
            self._taken.update((one.request.id, one) for one in kept)
        return kept

    def _read(self, stream: str, entry: Any) -> LaneRequest | None:
        """The request in an entry; None if it isn't one, or isn't for the model whose stream it lies in."""
        try:
            request = read_request(entry[1][b"request"])
        except (KeyError, TypeError, ValidationError) as error:
            reason = type(error).__name__
        else:
            if self._client.key("lane", "requests", request.model) == stream:
                return request
            reason = "for another model"
        self.dropped += 1
        logger.warning("not a request", stream=stream, entry=entry[0].decode(), reason=reason)
        return None

    # -- telling

    def _emit_one(self, event: LaneEvent, taken: _Taken, pipe: Any) -> None:
        lifetime, retention = self._times()
        self._emit(
            keys=[taken.keys.wanted, taken.keys.requests, taken.keys.alive, taken.keys.events],
            args=[
                event.attempt,
                taken.entry,
                self._name,
                f"{event.attempt}-{event.sequence}",
                event_json(event),
                self._settings.most_events,
                retention,
                lifetime,
                int(closes_attempt(event)),
            ],
            client=pipe,
        )

    def _times(self) -> tuple[int, int]:
        """The lifetime, and how long events are kept, in ms."""
        return milliseconds(self._settings.lifetime), milliseconds(self._settings.retention)

    def _known(self, request: str) -> _Taken | None:
        with self._lock:
            return self._taken.get(request)

    def _forget(self, taken: _Taken) -> None:
        with self._lock:
            if self._taken.get(taken.request.id) is taken:
                del self._taken[taken.request.id]
