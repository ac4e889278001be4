"""Answers that may be given again, on Redis: a key each that runs out, and of each tenant an index of them in the order
in which they run out, so that there are never too many."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from pipeline.adapters.redis_connection import RedisClient, milliseconds

# KEYS: 1 the answer, 2 the tenant's index.  ARGV: 1 data, 2 lifetime in ms, 3 most, 4 the beginning of the answers'
# keys, 5 this one's name.
_PUT: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[2], ARGV[5])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local over = redis.call('ZCARD', KEYS[2]) - ARGV[3]
if over > 0 then
  local popped = redis.call('ZPOPMIN', KEYS[2], over)
  for i = 1, #popped, 2 do redis.call('DEL', ARGV[4] .. popped[i]) end
end
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
"""


class RedisAnswers:
    """`AnswerStore` on Redis; threads may share it. Calls raise `ServiceUnavailable` when the server can't be asked."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._put = client.script(_PUT)

    def get(self, tenant: str, key: str) -> bytes | None:
        """What was put under this key, while its time lasts."""
        with self._client.told("look for an answer"):
            found: bytes | None = self._client.raw.get(self._place(tenant) + key)
        return found

    def put(self, tenant: str, key: str, data: bytes, seconds: float, most: int) -> None:
        """Keep it; of the tenant's, those that were put first go when there are more than `most`."""
        place = self._place(tenant)
        args: list[Any] = [data, milliseconds(seconds), most, place, key]
        with self._client.told("keep an answer"):
            self._put(keys=[place + key, f"{place}index"], args=args)

    def _place(self, tenant: str) -> str:
        """One slot of a cluster holds a tenant's."""
        name = hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:32]
        return self._client.key("answers", f"{{{name}}}", "")
