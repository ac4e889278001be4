"""The worker's side of the lane on Redis Streams; `pipeline.lane.redis` documents the keys."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from pydantic import ValidationError

from pipeline.adapters.redis.connection import RedisClient, RedisSettings, milliseconds
from pipeline.lane.ports import NO_SHARES, LaneQueue, TenantShares
from pipeline.lane.redis_scripts import EMIT, HOLD, TAKE
from pipeline.ports import Clock
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import LaneEvent, LaneRequest, closes_attempt, event_json, read_request

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LaneKeys:
    """The keys of one request."""

    wanted: str
    alive: str
    events: str
    waiting: str
    sent: str
    callers: str


def keys_of(client: RedisClient, request: LaneRequest) -> LaneKeys:
    """The keys of a request."""
    return LaneKeys(
        client.key("lane", "wanted", request.id),
        client.key("lane", "alive", request.id),
        client.key("lane", "events", request.id),
        *(client.key("lane", name, request.model) for name in ("waiting", "sent", "callers")),
    )


def queue_ttl_milliseconds(settings: LaneSettings) -> int:
    """Minimum TTL of queues after the last request, in ms."""
    return milliseconds(settings.default_deadline_seconds + settings.retention_seconds)


@dataclass(frozen=True, slots=True)
class _Taken:
    request: LaneRequest
    number: bytes  # of its sending
    keys: LaneKeys


@dataclass(slots=True)
class _Wait:
    """How to wait for requests: positions in the streams of sent ones, and the seconds until one may be taken."""

    seen: dict[str, bytes] = field(default_factory=dict)
    seconds: float = math.inf


class RedisLaneWorker:
    """`LaneWorker` of one worker; threads may share it.

    Attributes:
        name: the worker's.
        dropped: number of dropped entries that are no requests.
    """

    def __init__(self, redis: RedisSettings, name: str, clock: Clock, settings: LaneSettings) -> None:
        self._client = RedisClient(redis)
        self._redis = redis
        self.name = name
        self._clock = clock
        self._settings = settings
        self._lock = threading.Lock()
        self._taken: dict[str, _Taken] = {}
        self._turn = 0
        self.dropped = 0
        self._take = self._client.script(TAKE)
        self._emit = self._client.script(EMIT)
        self._hold = self._client.script(HOLD)

    def take(
        self, queues: Sequence[LaneQueue], most: int, timeout: float, shares: TenantShares = NO_SHARES
    ) -> list[LaneRequest]:
        """Up to `most` requests, or none after `timeout` seconds; see `LaneWorker.take`."""
        until = self._clock.monotonic() + timeout
        models = list(dict.fromkeys(queue.model for queue in queues))
        while models and most > 0:
            self._turn += 1  # each time another model is first, so that none starves
            first = self._turn % len(models)
            taken: list[_Taken] = []
            wait = _Wait()
            with self._client.translate_errors("take requests"):
                for model in (*models[first:], *models[:first]):
                    if len(taken) < most:
                        mine = [queue for queue in queues if queue.model == model]
                        taken += self._take_of(mine, most - len(taken), shares, wait)
                left = until - self._clock.monotonic()
                if taken or left <= 0:
                    return [one.request for one in taken]
                # Shorter than the server's time-out.
                seconds = min(left, wait.seconds, self._redis.timeout_seconds / 2)
                self._client.raw.xread(wait.seen, count=1, block=milliseconds(seconds))
        return []

    def emit(self, events: Sequence[LaneEvent]) -> frozenset[str]:
        """Send events; returns the requests that are no longer wanted from this worker."""
        known = [(event, self._known(event.request)) for event in events]
        unwanted = {event.request for event, taken in known if taken is None}
        # Late events of an attempt are dropped if its successor is here too: the request itself is still wanted.
        current = [(event, taken) for event, taken in known if taken and event.attempt >= taken.request.attempt]
        if not current:
            return frozenset(unwanted)
        with self._client.translate_errors("hand over events"), self._client.raw.pipeline(transaction=False) as pipe:
            for event, taken in current:
                self._emit_one(event, taken, pipe)
            answers = pipe.execute()
        for (event, taken), wanted in zip(current, answers, strict=True):
            if not wanted:
                unwanted.add(event.request)
                self._forget(taken)
            elif closes_attempt(event):
                self._forget(taken)
        return frozenset(unwanted)

    def hold(self, requests: Collection[str]) -> frozenset[str]:
        """Report that the worker lives and holds these; returns those that are no longer wanted from it."""
        known = [(request, self._known(request)) for request in requests]
        unwanted = {request for request, taken in known if taken is None}
        held = [taken for _, taken in known if taken is not None]
        if not held:
            return frozenset(unwanted)
        with self._client.translate_errors("hold requests"), self._client.raw.pipeline(transaction=False) as pipe:
            for taken in held:
                self._hold(
                    keys=[taken.keys.wanted, taken.keys.waiting, taken.keys.alive, taken.keys.events],
                    args=[taken.request.id, taken.request.attempt, taken.number, self.name, *self._times()],
                    client=pipe,
                )
            answers = pipe.execute()
        for taken, wanted in zip(held, answers, strict=True):
            if not wanted:
                unwanted.add(taken.request.id)
                self._forget(taken)
        return frozenset(unwanted)

    def close(self) -> None:
        """Close the connections. Other workers get unanswered requests after the lifetime."""
        self._client.close()

    # -- taking

    def _take_of(self, queues: Sequence[LaneQueue], most: int, shares: TenantShares, wait: _Wait) -> list[_Taken]:
        """Take requests from queues of one model. Stores in `wait` how to wait for more."""
        model = queues[0].model
        waiting, sent, callers = (self._client.key("lane", name, model) for name in ("waiting", "sent", "callers"))
        chosen = [part for queue in queues for part in (queue.name, round(queue.min_wait_seconds * 1_000))]
        held = [part for pair in shares.held.items() for part in pair]
        lifetime, queue_ttl = (
            milliseconds(self._settings.worker_timeout_seconds),
            queue_ttl_milliseconds(self._settings),
        )
        found = self._take(
            keys=[waiting, sent, callers],
            args=[
                self._client.key("lane", ""),
                model,
                self.name,
                most,
                min(shares.max_each, 2**31),
                lifetime,
                queue_ttl,
                len(queues),
                *chosen,
                *held,
            ],
        )
        wait.seen[sent] = found[0]
        if found[1] >= 0:
            wait.seconds = min(wait.seconds, found[1] / 1_000)
        taken = []
        for at in range(2, len(found), 3):
            name, number, data = found[at : at + 3]
            request = self._read(model, name, data)
            if request is None:
                self._client.raw.zrem(waiting, name)
                prefixes = [self._client.key("lane", kind, "").encode() for kind in ("wanted", "alive")]
                self._client.raw.delete(*(prefix + name for prefix in prefixes))
            else:
                taken.append(_Taken(request, number, keys_of(self._client, request)))
        with self._lock:
            self._taken.update((one.request.id, one) for one in taken)
        return taken

    def _read(self, model: str, name: bytes, data: bytes) -> LaneRequest | None:
        """The request; None if the data is no request, or another one."""
        try:
            request = read_request(data)
        except ValidationError as error:
            reason = type(error).__name__
        else:
            if (request.model, request.id.encode()) == (model, name):
                return request
            reason = "another request, or for another model"
        self.dropped += 1
        logger.warning("not a request", model=model, request=name.decode(errors="replace"), reason=reason)
        return None

    # -- events

    def _emit_one(self, event: LaneEvent, taken: _Taken, pipe: Any) -> None:
        lifetime, retention = self._times()
        self._emit(
            keys=[taken.keys.wanted, taken.keys.waiting, taken.keys.alive, taken.keys.events],
            args=[
                event.request,
                event.attempt,
                taken.number,
                self.name,
                f"{event.attempt}-{event.sequence}",
                event_json(event),
                self._settings.max_events,
                retention,
                lifetime,
                int(closes_attempt(event)),
            ],
            client=pipe,
        )

    def _times(self) -> tuple[int, int]:
        """The lifetime and the TTL of events, in ms."""
        return milliseconds(self._settings.worker_timeout_seconds), milliseconds(self._settings.retention_seconds)

    def _known(self, request: str) -> _Taken | None:
        with self._lock:
            return self._taken.get(request)

    def _forget(self, taken: _Taken) -> None:
        with self._lock:
            if self._taken.get(taken.request.id) is taken:
                del self._taken[taken.request.id]
