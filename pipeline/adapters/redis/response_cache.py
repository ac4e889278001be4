"""The response cache on Redis: an expiring key for each answer, and for each tenant an index in order of expiry, with
sizes, which bounds the number and the size of cached answers."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from pipeline.adapters.redis.connection import RedisClient, milliseconds

# KEYS: 1 the answer, 2 the tenant's index, 3 its sizes by name, "" for their sum.  ARGV: 1 data, 2 lifetime in ms,
# 3 maximum number, 4 maximum bytes, 5 prefix of the answers' keys, 6 this one's name.
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
    """`AnswerStore` on Redis; threads may share it. Calls raise `ServiceUnavailable` when the server can't be reached.

    Args:
        max_tenant_bytes: maximum bytes of each tenant's answers; those with the earliest expiry are evicted.
    """

    def __init__(self, client: RedisClient, max_tenant_bytes: int = 64 << 20) -> None:
        self._client = client
        self._max_tenant_bytes = max_tenant_bytes
        self._put = client.script(_PUT)

    def get(self, tenant: str, key: str) -> bytes | None:
        """The cached answer under this key, until it expires."""
        with self._client.translate_errors("read an answer"):
            found: bytes | None = self._client.raw.get(self._prefix(tenant) + key)
        return found

    def put(self, tenant: str, key: str, data: bytes, seconds: float, most: int) -> None:
        """Cache the answer; the tenant's answers with the earliest expiry are evicted when there are more than
        `most`."""
        prefix = self._prefix(tenant)
        args: list[Any] = [data, milliseconds(seconds), most, self._max_tenant_bytes, prefix, key]
        with self._client.translate_errors("store an answer"):
            self._put(keys=[prefix + key, f"{prefix}index", f"{prefix}sizes"], args=args)

    def _prefix(self, tenant: str) -> str:
        """The prefix of a tenant's keys, which are on one slot of a cluster."""
        name = hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:32]
        return self._client.key("answers", f"{{{name}}}", "")
