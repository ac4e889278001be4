"""A lease on Redis: of several running dispatchers, one does the work.

It only saves work. After a holder is suspended and resumed, a server is emptied, or clocks drift apart, two may believe
that they hold it. Both may work, because every object that counts is created if absent.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from pipeline.adapters.redis.connection import RedisClient, RedisSettings, milliseconds
from pipeline.ports import Clock, Randomness

# Acquires a free lease, and extends one that is held by this token.  KEYS: 1 the lease.  ARGV: 1 token, 2 lifetime in
# ms.
_RENEW: Final = """
if redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2], 'NX') then return 1 end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisLease:
    """One contender for the lease `name`. Threads may share it. Calls raise `ServiceUnavailable` when the server can't
    be reached; the lease then expires by itself.

    Args:
        lifetime: seconds for which it is held without being renewed; renew it at a third of that.
    """

    def __init__(self, settings: RedisSettings, name: str, lifetime: float, clock: Clock, random: Randomness) -> None:
        self._client = RedisClient(settings)
        self._key = self._client.key("lease", name)
        self._lifetime = lifetime
        self._clock = clock
        self._token = random.token(16).hex()
        self._lock = threading.Lock()
        self._until = 0.0
        self._renew = self._client.script(_RENEW)
        self._release = self._client.script(_RELEASE)

    def held(self) -> bool:
        """Whether the lease is held here, without a request to the server."""
        return self._clock.monotonic() < self._until

    def renew(self) -> bool:
        """Acquire the lease if it is free, extend it if it is held here; returns whether it is held here now. If the
        server lost the holder, the next caller gets the lease."""
        with self._lock:
            asked_at = self._clock.monotonic()  # before the server's TTL starts, so that it is never held longer
            with self._client.translate_errors("renew a lease"):
                won: Any = self._renew(keys=[self._key], args=[self._token, milliseconds(self._lifetime)])
            self._until = asked_at + self._lifetime if won else 0.0
            return bool(won)

    def release(self) -> None:
        """Release the lease, so that another needn't wait; harmless when it is another's."""
        with self._lock:
            self._until = 0.0
            with self._client.translate_errors("release a lease"):
                self._release(keys=[self._key], args=[self._token])

    def close(self) -> None:
        """Close the connections; the lease stays as it is."""
        self._client.close()
