"""Heartbeats on Redis: for each worker a key that expires when the worker is silent, another with its metrics, and an
index of the workers' names.

Silence is meaningful only if heartbeats were recorded meanwhile, and Redis may have been emptied, restarted, or stopped
while keys expired. So each call also writes a mark, by the server's clock: after a gap in the marks (or without any, as
on a fresh server), the recorded period restarts at that moment. `since` counts from there. No client's clock is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import structlog
from pydantic import ValidationError

from pipeline.adapters.redis.connection import RedisClient, RedisSettings, milliseconds
from pipeline.ports import WorkerState
from schemas.stored import StoredModel
from schemas.workers.heartbeat import StoredHeartbeat
from schemas.workers.metrics import WorkerMetrics

_P = TypeVar("_P", bound=StoredModel)

logger = structlog.get_logger(__name__)

# KEYS: 1 start of the recorded period, 2 the last mark.  ARGV: 1 the longest gap in ms.
_MARK: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last = tonumber(redis.call('GET', KEYS[2]))
if not last or now < last or now - last > tonumber(ARGV[1]) then
  redis.call('SET', KEYS[1], string.format('%d', now))
end
redis.call('SET', KEYS[1], string.format('%d', now), 'NX')
redis.call('SET', KEYS[2], string.format('%d', now))
"""
# KEYS: also 3 the index, 4 the worker.  ARGV: also 2 lifetime in ms, 3 name, 4 state.
_BEAT: Final = (
    _MARK
    + """
redis.call('SET', KEYS[4], ARGV[4], 'PX', ARGV[2])
redis.call('ZADD', KEYS[3], now, ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[2] * 10)
"""
)
# Workers that have been silent for ten lifetimes are removed from the index; the keys determine which ones live.
_LIST: Final = (
    _MARK
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - ARGV[2] * 10)
return redis.call('ZRANGEBYSCORE', KEYS[3], now - ARGV[2], '+inf')
"""
)
_SINCE: Final = (
    _MARK
    + """
return now - tonumber(redis.call('GET', KEYS[1]))
"""
)


class RedisHeartbeats:
    """`Heartbeats` on Redis; threads may share it. All calls raise `ServiceUnavailable` when the server can't be
    reached.

    Args:
        lifetime: seconds after which a silent worker counts as dead; the same for all users of the server, and at least
            three times the interval of heartbeats.

    Attributes:
        unreadable: number of skipped values that are no heartbeats.
    """

    def __init__(self, settings: RedisSettings, lifetime: float) -> None:
        self._client = RedisClient(settings)
        self.lifetime = lifetime
        self.unreadable = 0
        self._marks = [self._client.key("beats", "since"), self._client.key("beats", "last")]
        self._index = self._client.key("beats", "workers")
        self._beat = self._client.script(_BEAT)
        self._list = self._client.script(_LIST)
        self._since = self._client.script(_SINCE)

    def send_heartbeat(self, state: WorkerState) -> None:
        """See `Heartbeats.send_heartbeat`."""
        record = StoredHeartbeat(
            name=state.name,
            models=tuple(sorted(state.models)),
            held=tuple(sorted(state.held)),
            waiting_tokens=state.waiting_tokens,
            tokens_per_second=state.tokens_per_second,
            draining=state.draining,
            price_per_hour=state.price_per_hour,
            passed_over=tuple(sorted(state.passed_over)),
            max_num_seqs=state.max_num_seqs,
            takes_lane_requests=state.takes_lane_requests,
            role=state.role,
        )
        keys = [*self._marks, self._index, self._key(state.name)]
        with self._client.translate_errors("leave a heartbeat"):
            self._beat(keys=keys, args=[*self._times(), state.name, record.model_dump_json(exclude_defaults=True)])

    def leave(self, worker: str) -> None:
        """See `Heartbeats.leave`."""
        with self._client.translate_errors("remove a heartbeat"), self._client.raw.pipeline(transaction=True) as pipe:
            pipe.delete(self._key(worker), self._metrics_key(worker))
            pipe.zrem(self._index, worker)
            pipe.execute()

    def report_metrics(self, worker: str, metrics: WorkerMetrics) -> None:
        """See `Heartbeats.report_metrics`."""
        data = metrics.model_dump_json(exclude_defaults=True)
        with self._client.translate_errors("report metrics"):
            self._client.raw.set(self._metrics_key(worker), data, px=milliseconds(self.lifetime))

    def metrics(self) -> dict[str, WorkerMetrics]:
        """The latest metrics of each live worker, by name."""
        found = ((name, self._parse(name, data, WorkerMetrics)) for name, data in self._read_all(self._metrics_key))
        return {name: metrics for name, metrics in found if metrics is not None}

    def workers(self) -> list[WorkerState]:
        """The latest state of each live worker, sorted by name."""
        states = [self._read(name, beat) for name, beat in self._read_all(self._key)]
        return [state for state in states if state is not None]

    def _read_all(self, key: Callable[[str], str]) -> list[tuple[str, bytes]]:
        """The value under this key of each live worker, with its name."""
        with self._client.translate_errors("read the heartbeats"):
            found: list[bytes] = self._list(keys=[*self._marks, self._index], args=self._times())
            names = sorted(name.decode(errors="replace") for name in found)
            values = self._client.raw.mget([key(name) for name in names]) if names else []
        return [(name, data) for name, data in zip(names, values, strict=True) if data is not None]

    def since(self) -> float:
        """Seconds for which the server has recorded heartbeats without a gap."""
        with self._client.translate_errors("read since when heartbeats are recorded"):
            recorded: Any = self._since(keys=self._marks, args=self._times())
        return max(0.0, int(recorded) / 1_000)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _times(self) -> list[int]:
        # A worker that beats every third of the lifetime loses its key in a gap of two thirds; half is safe.
        return [milliseconds(self.lifetime / 2), milliseconds(self.lifetime)]

    def _key(self, worker: str) -> str:
        return self._client.key("beats", "worker", worker)

    def _metrics_key(self, worker: str) -> str:
        return self._client.key("beats", "figures", worker)

    def _parse(self, name: str, data: bytes, kind: type[_P]) -> _P | None:
        """Parse a worker's value; None, with a warning in the log, when it is invalid."""
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            self.unreadable += 1
            logger.warning("not a heartbeat", worker=name, reason=error.errors(include_url=False)[0]["msg"])
            return None

    def _read(self, name: str, beat: bytes) -> WorkerState | None:
        record = self._parse(name, beat, StoredHeartbeat)
        if record is None:
            return None
        return WorkerState(
            name=name,
            models=frozenset(record.models),
            held=frozenset(record.held),
            waiting_tokens=record.waiting_tokens,
            tokens_per_second=record.tokens_per_second,
            draining=record.draining,
            price_per_hour=record.price_per_hour,
            passed_over=frozenset(record.passed_over),
            max_num_seqs=record.max_num_seqs,
            takes_lane_requests=record.takes_lane_requests,
            role=record.role,
        )
