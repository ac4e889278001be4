"""Answers that may be given again, on Redis: a key each that runs out, and of each tenant an index of them in the order
in which they run out, with their sizes, so that there are never too many and never too large ones."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from pipeline.adapters.redis.connection import RedisClient, milliseconds

# KEYS: 1 the answer, 2 the tenant's index, 3 its sizes by name, "" for all together.  ARGV: 1 data, 2 lifetime in ms,
# 3 most, 4 most bytes, 5 the beginning of the answers' keys, 6 this one's name.
_PUT: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function forget(name)
  redis.call('HINCRBY', KEYS[3], '', -(redis.call('HGET', KEYS[3], name) or 0))
  redis.call('HDEL', KEYS[3], name)
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('ZREM', KEYS[2], name)
  forget(name)
end
forget(ARGV[6])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[2], ARGV[6])
redis.call('HSET', KEYS[3], ARGV[6], #ARGV[1])
local held = redis.call('HINCRBY', KEYS[3], '', #ARGV[1])
while redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[3]) or held > tonumber(ARGV[4]) do
  local popped = redis.call('ZPOPMIN', KEYS[2])
  if #popped == 0 then break end
  redis.call('DEL', ARGV[5] .. popped[1])
  forget(popped[1])
  held = tonumber(redis.call('HGET', KEYS[3], ''))
end
for i = 2, 3 do
  if redis.call('PTTL', KEYS[i]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[i], ARGV[2]) end
end
"""


class RedisAnswers:
    """`AnswerStore` on Redis; threads may share it. Calls raise `ServiceUnavailable` when the server can't be asked.

    Args:
        max_tenant_bytes: of each tenant's answers; those that were put first go.
    """

    def __init__(self, client: RedisClient, max_tenant_bytes: int = 64 << 20) -> None:
        self._client = client
        self._max_tenant_bytes = max_tenant_bytes
        self._put = client.script(_PUT)

    def get(self, tenant: str, key: str) -> bytes | None:
        """What was put under this key, while its time lasts."""
        with self._client.told("look for an answer"):
            found: bytes | None = self._client.raw.get(self._place(tenant) + key)
        return found

    def put(self, tenant: str, key: str, data: bytes, seconds: float, most: int) -> None:
        """Keep it; of the tenant's, those that were put first go when there are more than `most`."""
        place = self._place(tenant)
        args: list[Any] = [data, milliseconds(seconds), most, self._max_tenant_bytes, place, key]
        with self._client.told("keep an answer"):
            self._put(keys=[place + key, f"{place}index", f"{place}sizes"], args=args)

    def _place(self, tenant: str) -> str:
        """One slot of a cluster holds a tenant's."""
        name = hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:32]
        return self._client.key("answers", f"{{{name}}}", "")
