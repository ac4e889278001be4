"""Heartbeats on Redis: a key for each worker that vanishes when the worker is silent, another with its figures, and an
index of their names.

Silence means something only if beats were kept meanwhile, and Redis may have been emptied, restarted, or stopped while
keys ran out. So each call also leaves a mark, by the server's clock: where the marks have a gap (or there is none, as
on a fresh server), what was kept begins anew at that moment. `since` counts from there. No client's clock is asked.
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

# KEYS: 1 the beginning of what is kept, 2 the last mark.  ARGV: 1 the longest gap in ms.
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
# Who has been silent for ten lifetimes is struck off; who still counts is said by the keys.
_LOOK: Final = (
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
    """`Heartbeats` on Redis; threads may share it. All calls raise `ServiceUnavailable` when the server can't be asked.

    Args:
        lifetime: seconds after which a silent worker counts as dead; the same for all who share the server, and at
            least three times as long as the time between two beats.

    Attributes:
        unreadable: beats that were none of ours, and were passed over.
    """

    def __init__(self, settings: RedisSettings, lifetime: float) -> None:
        self._client = RedisClient(settings)
        self.lifetime = lifetime
        self.unreadable = 0
        self._marks = [self._client.key("beats", "since"), self._client.key("beats", "last")]
        self._index = self._client.key("beats", "workers")
        self._beat = self._client.script(_BEAT)
        self._look = self._client.script(_LOOK)
        self._since = self._client.script(_SINCE)

    def beat(self, state: WorkerState) -> None:
        """The worker lives, and this is how it stands."""
        paper = StoredHeartbeat(
            name=state.name,
            models=tuple(sorted(state.models)),
            held=tuple(sorted(state.held)),
            waiting_tokens=state.waiting_tokens,
            tokens_per_second=state.tokens_per_second,
            draining=state.draining,
            price_per_hour=state.price_per_hour,
            passed_over=tuple(sorted(state.passed_over)),
        )
        keys = [*self._marks, self._index, self._key(state.name)]
        with self._client.told("leave a heartbeat"):
            self._beat(keys=keys, args=[*self._times(), state.name, paper.model_dump_json(exclude_defaults=True)])

    def leave(self, worker: str) -> None:
        """The worker ends in order: it holds nothing any more."""
        with self._client.told("take leave"), self._client.raw.pipeline(transaction=True) as pipe:
            pipe.delete(self._key(worker), self._figures_key(worker))
            pipe.zrem(self._index, worker)
            pipe.execute()

    def tell(self, worker: str, figures: WorkerMetrics) -> None:
        """What the worker has to tell."""
        data = figures.model_dump_json(exclude_defaults=True)
        with self._client.told("tell figures"):
            self._client.raw.set(self._figures_key(worker), data, px=milliseconds(self.lifetime))

    def figures(self) -> dict[str, WorkerMetrics]:
        """What workers that live have told, by name."""
        found = ((name, self._parsed(name, told, WorkerMetrics)) for name, told in self._of_each(self._figures_key))
        return {name: figures for name, figures in found if figures is not None}

    def workers(self) -> list[WorkerState]:
        """Workers that live, by name."""
        states = [self._read(name, beat) for name, beat in self._of_each(self._key)]
        return [state for state in states if state is not None]

    def _of_each(self, key: Callable[[str], str]) -> list[tuple[str, bytes]]:
        """What stands under this key of each worker that lives, by name."""
        with self._client.told("read the heartbeats"):
            found: list[bytes] = self._look(keys=[*self._marks, self._index], args=self._times())
            names = sorted(name.decode(errors="replace") for name in found)
            kept = self._client.raw.mget([key(name) for name in names]) if names else []
        return [(name, data) for name, data in zip(names, kept, strict=True) if data is not None]

    def since(self) -> float:
        """For how many seconds the server has kept beats without a break."""
        with self._client.told("ask since when beats are kept"):
            kept: Any = self._since(keys=self._marks, args=self._times())
        return max(0.0, int(kept) / 1_000)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _times(self) -> list[int]:
        # Who beats every third of the lifetime loses its key in a gap of two thirds; half is on the safe side.
        return [milliseconds(self.lifetime / 2), milliseconds(self.lifetime)]

    def _key(self, worker: str) -> str:
        return self._client.key("beats", "worker", worker)

    def _figures_key(self, worker: str) -> str:
        return self._client.key("beats", "figures", worker)

    def _parsed(self, name: str, data: bytes, paper: type[_P]) -> _P | None:
        """What is kept of a worker; None, and a word in the log, where it is something else."""
        try:
            return paper.model_validate_json(data)
        except ValidationError as error:
            self.unreadable += 1
            logger.warning("not a heartbeat", worker=name, reason=error.errors(include_url=False)[0]["msg"])
            return None

    def _read(self, name: str, beat: bytes) -> WorkerState | None:
        paper = self._parsed(name, beat, StoredHeartbeat)
        if paper is None:
            return None
        return WorkerState(
            name=name,
            models=frozenset(paper.models),
            held=frozenset(paper.held),
            waiting_tokens=paper.waiting_tokens,
            tokens_per_second=paper.tokens_per_second,
            draining=paper.draining,
            price_per_hour=paper.price_per_hour,
            passed_over=frozenset(paper.passed_over),
        )
