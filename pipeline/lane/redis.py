"""The lane on Redis Streams: the caller's side (`RedisLaneWorker` is the other).

    queue:QUEUE:TENANT  zset    requests without a worker, by the time of sending (microseconds, unique)
    turns:QUEUE         zset    tenants with a queue, by the time when one of their requests was taken last, from any
                                queue that the worker reads
    waiting:MODEL       zset    all requests whose answer hasn't begun, by when their worker counts as dead (0: none)
    callers:MODEL       zset    TENANT\\0ID of waiting requests, by when their callers count as dead, at most their
                                deadline
    sent:MODEL          stream  the last request that was sent: idle workers wait for the next
    wanted:ID           hash    the request, its current attempt, its worker, whether it ended; it exists as long as the
                                answer is wanted: its TTL is the deadline, and a cancel deletes it
    alive:ID            string  a worker holds the request; its TTL is the lifetime
    answers:MODEL       hash    numbers of answers by latency (`AnswerCounts`), of all gateways together
    events:ID           stream  the answer. An event's id is ATTEMPT-SEQUENCE, so Redis itself keeps them in order,
                                drops repetitions, and refuses events of an attempt that a later one has replaced

QUEUE is MODEL for the general sub-queue, else MODEL/NAME. A request that is addressed to a worker waits both in
MODEL/@WORKER and in MODEL/@, from which other workers take it when it has waited long enough.

Each step is one Lua script, so it is atomic, and any number of workers and gateways see one order. Every key has a TTL
and both streams are bounded: the caller detects losses, and sends again. The keys of a request may be on any cluster
slot, so this is for one Redis server (with replicas), not for a cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import structlog
from pydantic import ValidationError

from pipeline.adapters.redis.connection import RedisClient, RedisSettings, milliseconds
from pipeline.lane.ports import COUNTS_SECONDS, AnswerCounts, LaneFull, full_message
from pipeline.lane.redis_scripts import CANCEL, COUNT, LOST, SEND
from pipeline.lane.redis_worker import RedisLaneWorker, keys_of, queue_ttl_milliseconds
from pipeline.ports import Clock, PipelineError
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import LaneEvent, LaneRequest, Position, read_event, request_json

MAX_EVENTS_PER_READ = 256  # events of one request in one read

_COUNTS: Final = ("in_time", "late_first_tokens", "late_tokens")
"""The fields of `answers:MODEL`, as in `AnswerCounts`."""

logger = structlog.get_logger(__name__)


class RedisLane:
    """`Lane` on Redis; threads may share it.

    Attributes:
        unreadable: number of skipped stream entries that are no events.
    """

    def __init__(self, redis: RedisSettings, clock: Clock, settings: LaneSettings | None = None) -> None:
        self._client = RedisClient(redis)
        self._redis = redis
        self._clock = clock
        self._settings = settings or LaneSettings()
        self.unreadable = 0
        self._prefix = self._client.key("lane", "")
        self._send = self._client.script(SEND)
        self._count = self._client.script(COUNT)
        self._cancel = self._client.script(CANCEL)
        self._lost = self._client.script(LOST)

    def worker(self, name: str) -> RedisLaneWorker:
        """The side of the worker with this name, with connections of its own."""
        return RedisLaneWorker(self._redis, name, self._clock, self._settings)

    def send(self, request: LaneRequest) -> None:
        """Send the request to the workers of its model. Raises `LaneFull`."""
        body = request_json(request)
        if len(body) > self._settings.max_bytes:
            raise PipelineError(f"request {request.id}: is larger than {self._settings.max_bytes} bytes; send less")
        keys = keys_of(self._client, request)
        wanted, bounds = milliseconds(self._wanted_for(request)), self._settings
        with self._client.translate_errors("send a request"):
            outcome: Any = self._send(
                keys=[keys.wanted, keys.waiting, keys.sent, keys.callers],
                args=[
                    self._prefix,
                    request.model,
                    request.id,
                    request.queue,
                    request.tenant,
                    request.attempt,
                    body,
                    wanted,
                    max(queue_ttl_milliseconds(bounds), 2 * wanted),
                    bounds.max_waiting,
                    bounds.max_waiting_per_tenant,
                    milliseconds(bounds.client_timeout_seconds),
                ],
            )
        if outcome in (b"full", b"tenant full"):
            own = bounds.max_waiting_per_tenant if outcome == b"tenant full" else 0
            raise LaneFull(full_message(request, bounds, own))

    def read(self, after: Mapping[str, Position], timeout: float) -> list[LaneEvent]:
        """Events after these positions; waits up to `timeout` seconds for the first, in intervals that are shorter than
        the server's time-out."""
        until = self._clock.monotonic() + timeout
        positions = {self._client.key("lane", "events", id_): f"{at[0]}-{at[1]}" for id_, at in after.items()}
        while positions:
            left = until - self._clock.monotonic()
            block = milliseconds(min(left, self._redis.timeout_seconds / 2)) if left > 0 else None
            with self._client.translate_errors("read events"):
                found = self._client.raw.xread(positions, count=MAX_EVENTS_PER_READ, block=block)
            events = [event for _, entries in found or () for entry in entries if (event := self._event(entry))]
            if events or left <= 0:
                return events
            for stream, entries in found or ():  # all unreadable: continue after them
                positions[stream.decode()] = entries[-1][0].decode()
        return []

    def cancel(self, request: LaneRequest) -> None:
        """Cancel the request; the answer to its worker's next call reports it."""
        keys = keys_of(self._client, request)
        with self._client.translate_errors("cancel a request"):
            self._cancel(
                keys=[keys.wanted, keys.waiting, keys.alive],
                args=[self._prefix, request.model, request.id, request.queue, request.tenant],
            )

    def lost(self, requests: Collection[LaneRequest]) -> frozenset[str]:
        """The requests that no worker will answer. The check keeps waiting requests from being dropped."""
        checked, lifetime = list(requests), milliseconds(self._settings.client_timeout_seconds)
        with self._client.translate_errors("ask after requests"), self._client.raw.pipeline(transaction=False) as pipe:
            for request in checked:
                keys = keys_of(self._client, request)
                self._lost(
                    keys=[keys.wanted, keys.waiting, keys.alive, keys.callers],
                    args=[request.id, request.attempt, request.tenant, lifetime],
                    client=pipe,
                )
            answers = pipe.execute() if checked else []
        return frozenset(request.id for request, lost in zip(checked, answers, strict=True) if lost)

    def waiting(self, models: Collection[str]) -> Mapping[str, int]:
        """Requests for each of these models that no worker has begun to answer."""
        names = list(models)
        with self._client.translate_errors("count requests"), self._client.raw.pipeline(transaction=False) as pipe:
            for model in names:
                keys = [self._client.key("lane", kind, model) for kind in ("waiting", "callers")]
                self._count(keys=keys, args=[self._prefix, model], client=pipe)
            return dict(zip(names, pipe.execute() if names else [], strict=True))

    def add_answers(self, counts: Mapping[str, AnswerCounts]) -> None:
        """Add to the counts of answers by model."""
        with self._client.translate_errors("count answers"), self._client.raw.pipeline(transaction=True) as pipe:
            for model, added in counts.items():
                key = self._client.key("lane", "answers", model)
                for name in _COUNTS:
                    pipe.hincrby(key, name, getattr(added, name))
                pipe.pexpire(key, milliseconds(COUNTS_SECONDS))
            pipe.execute()

    def answers(self, models: Collection[str]) -> Mapping[str, AnswerCounts]:
        """Answers for each of these models. Counts that are no numbers count as 0."""
        names = list(models)
        with self._client.translate_errors("read answers"), self._client.raw.pipeline(transaction=False) as pipe:
            for model in names:
                pipe.hmget(self._client.key("lane", "answers", model), _COUNTS)
            found = pipe.execute() if names else []
        return {model: AnswerCounts(*map(_count, counts)) for model, counts in zip(names, found, strict=True)}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _wanted_for(self, request: LaneRequest) -> float:
        """Seconds for which the request is wanted."""
        if request.deadline is None:
            return self._settings.default_deadline_seconds
        return max(0.0, (request.deadline - self._clock.now()).total_seconds())

    def _event(self, entry: Any) -> LaneEvent | None:
        identity, fields = entry
        try:
            return read_event((fields or {})[b"event"])
        except (KeyError, ValidationError) as error:
            self.unreadable += 1
            logger.warning("not an event", entry=identity.decode(), reason=type(error).__name__)
            return None


def _count(value: bytes | None) -> int:
    """A count as Redis has it; other clients may have written anything."""
    return int(value) if value is not None and value.isdigit() and len(value) < 20 else 0
