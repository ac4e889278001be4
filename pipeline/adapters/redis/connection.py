"""The Redis client of adapters that store hints: every call has a time-out, and nothing is retried implicitly.

A command that timed out may have been executed, so the adapter, not the client, decides whether to send it again. The
next call replaces a broken connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline.runtime.availability import BadAddress, ServiceUnavailable, redacted

_WHOLE_SECOND: Final = 1_000


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Redis' address and time-outs; seconds.

    Attributes:
        url: redis://, rediss:// (TLS) or unix://, with user and password if there are any.
        prefix: of all keys, so that several installations can share a server.
        connect_timeout_seconds: to reach the server.
        timeout_seconds: of one answer. Shorter than a heartbeat's lifetime, or a slow server would make workers seem
            dead.
        max_connections: maximum number of connections, opened on demand. A reader that waits for events of the lane
            occupies one.
    """

    url: str = field(repr=False)
    prefix: str = "tokenmill"
    connect_timeout_seconds: float = 2.0
    timeout_seconds: float = 2.0
    max_connections: int = 256


class RedisClient:
    """A client with the pipeline's errors. Threads may share it.

    Attributes:
        raw: redis-py's client; bytes in and out. Use it inside `translate_errors`.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        try:
            self.raw: Any = redis.Redis.from_url(  # Any: its commands are typed for two kinds of client at once
                settings.url,
                socket_timeout=settings.timeout_seconds,
                socket_connect_timeout=settings.connect_timeout_seconds,
                socket_keepalive=True,
                max_connections=settings.max_connections,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except ValueError as error:
            raise BadAddress(
                f"{redacted(settings.url)}: is no URL of a Redis server; give one such as redis://host:6379/0"
            ) from error

    def key(self, *parts: str) -> str:
        """A key of this installation."""
        return ":".join((self.settings.prefix, *parts))

    def script(self, text: str) -> Any:
        """A Lua script; it is loaded whenever the server lacks it, such as an emptied one."""
        return self.raw.register_script(text)

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self.raw.close()

    @contextmanager
    def translate_errors(self, what: str) -> Iterator[None]:
        """Raise `ServiceUnavailable` for redis-py's errors inside. `what`: the operation, for the message."""
        try:
            yield
        except redis.RedisError as error:
            raise ServiceUnavailable(
                f"{redacted(self.settings.url)}: can't {what}: {_reason(error)}; see that the server runs and answers "
                f"within {self.settings.timeout_seconds:g} s"
            ) from error


def milliseconds(seconds: float) -> int:
    """Seconds as milliseconds, Redis' unit of time; at least one."""
    return max(1, round(seconds * _WHOLE_SECOND))


def _reason(error: redis.RedisError) -> str:
    if isinstance(error, redis.TimeoutError):
        return "no answer in time"
    if isinstance(error, redis.AuthenticationError):
        return "user or password is refused"
    return str(error).strip().rstrip(".") or type(error).__name__
