"""A lease on Redis: of several dispatchers that run, one does the work.

It only saves work. A holder that is stopped and goes on later, a server that was emptied, clocks that run apart: in
each case two may believe that they hold it, and both are right to work, because all that counts is created if absent.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from pipeline.adapters.redis.connection import RedisClient, RedisSettings, milliseconds
from pipeline.ports import Clock, Randomness

# Take it where it is free, and keep it where it is ours.  KEYS: 1 the lease.  ARGV: 1 token, 2 lifetime in ms.
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
    be asked; the lease then runs out by itself.

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
        """Whether it is held here, as far as can be known without asking."""
        return self._clock.monotonic() < self._until

    def renew(self) -> bool:
        """Take the lease where it is free, keep it where it is held here; whether it is held here now. Where the server
        forgot whose it was, whoever asks first has it."""
        with self._lock:
            asked = self._clock.monotonic()  # before the server's time begins to count, so that it is never held longer
            with self._client.told("renew a lease"):
                won: Any = self._renew(keys=[self._key], args=[self._token, milliseconds(self._lifetime)])
            self._until = asked + self._lifetime if won else 0.0
            return bool(won)

    def release(self) -> None:
        """Give it back, so that another needn't wait; harmless when it is another's."""
        with self._lock:
            self._until = 0.0
            with self._client.told("release a lease"):
                self._release(keys=[self._key], args=[self._token])

    def close(self) -> None:
        """Close the connections; the lease stays as it is."""
        self._client.close()
