"""Counters of rate limits on Redis: the `limits` library's windows, and running requests: for each name a sorted set of
their rows, by the time (of the server's clock) at which a row expires."""

from __future__ import annotations

from typing import Any, Final

from limits.storage import RedisStorage

from pipeline.adapters.redis.connection import RedisClient, milliseconds

# KEYS: 1 the set.  ARGV: 1 maximum, 2 lifetime in ms, 3 and following: rows.
_ENTER: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) + #ARGV - 2 > tonumber(ARGV[1]) then return 0 end
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[i]) end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
"""


def redis_windows(client: RedisClient) -> RedisStorage:
    """The library's windows, on the connections of `client`. They raise its `StorageError`."""
    pool = client.raw.connection_pool
    return RedisStorage("redis://", connection_pool=pool, key_prefix=client.key("limits"), wrap_exceptions=True)


class RedisRunning:
    """`Running` on Redis; threads may share it. Calls raise `ServiceUnavailable` when the server can't be reached."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._enter = client.script(_ENTER)

    def enter(self, name: str, request: str, most: int, seconds: float, rows: int = 1) -> bool:
        """Take a slot for each row, for so many seconds at most; False, without taking any, when fewer of `most` are
        free."""
        args: list[Any] = [most, milliseconds(seconds), *_rows(request, rows)]
        with self._client.translate_errors("count a request"):
            entered: Any = self._enter(keys=[self._key(name)], args=args)
        return bool(entered)

    def leave(self, name: str, request: str, rows: int = 1) -> None:
        """Release the slots; harmless when there are none."""
        with self._client.translate_errors("count a request no more"):
            self._client.raw.zrem(self._key(name), *_rows(request, rows))

    def _key(self, name: str) -> str:
        return self._client.key("running", name)


def _rows(request: str, count: int) -> list[str]:
    """The rows' names in the set."""
    return [f"{request}/{number}" for number in range(count)]
