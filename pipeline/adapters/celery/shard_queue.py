"""The shard queues on any broker that Celery speaks: Redis, RabbitMQ, SQS, …

Shards are task messages of Celery (`tokenmill.compute_shard`, JSON), which operators can inspect with common tools,
sent by Celery's producer; each queue is a queue of the broker. Celery's worker does not run them. A shard isn't a
function to be called when a message comes: the engine takes the next one when it has room, from the most urgent queue
that has any, and computes several at once. A consumer would prefetch messages that it doesn't need yet, out of other
workers' reach; and its connection can stay open and silent for ever after the broker went away (the known fault of
workers that run and consume nothing). So `take` polls, queue by queue. Each poll has an answer or an error, any error
closes the connection, and the next poll opens a new one. Delivery acknowledges a message; the dispatcher puts lost ones
again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import structlog
from kombu import Connection, Exchange, Queue
from kombu.exceptions import KombuError

from pipeline.adapters.celery.app import REDIS, private_app, scheme_of, security, socket_options
from pipeline.ports import Clock, ShardTask
from pipeline.runtime.availability import ServiceUnavailable, redacted
from schemas.workers.queue import COMPUTE_SHARD, task_arguments

MAX_MESSAGE_BYTES: Final = 16_384  # a valid message has some hundred
MAX_DROPS: Final = 100  # before other queues, and the time, are checked again

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CeleryQueueSettings:
    """The broker's address and its time-outs; seconds.

    Attributes:
        url: the broker's, in Celery's format; several, separated by ";", are tried in order.
        prefix: of the queues' names.
        timeout_seconds: for an answer or a connection.
        poll_interval_seconds: between two polls while all queues are empty.
        message_lifetime_seconds: an untaken message expires after this long: the dispatcher has decided anew. Longer
            than the dispatcher's `max_retry_timeout_seconds`, so that a waiting shard always has a message.
        queue_lifetime_seconds: an unused queue expires after this long, with its messages.
        transport_options: for kombu's transport; they override the defaults.
    """

    url: str = field(repr=False)
    prefix: str = "tokenmill.shards"
    timeout_seconds: float = 5.0
    poll_interval_seconds: float = 0.1
    message_lifetime_seconds: float = 600.0
    queue_lifetime_seconds: float = 3_600.0
    transport_options: Mapping[str, Any] = field(default_factory=dict, repr=False)


class CeleryQueue:
    """`ShardQueue` on a broker; threads may share it. `put` and `take` each have a connection of their own. Calls raise
    `ServiceUnavailable` when the broker can't be reached; the constructor doesn't connect, and raises `BadAddress`.

    Attributes:
        dropped: number of foreign or expired messages.
    """

    def __init__(self, settings: CeleryQueueSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._address = redacted(settings.url)
        self._app = private_app(settings.url)
        self._app.conf.update(task_ignore_result=True)
        self._puts = _BrokerConnection(self._connect)
        self._takes = _BrokerConnection(self._connect)
        self._seen_empty: dict[str, float] = {}  # queue -> when (monotonic)
        self.dropped = 0

    def put(self, queue: str, task: ShardTask) -> None:
        """Append to the queue. After an error it may or may not have been appended."""
        with self._puts.lock, self._translate_errors(self._puts, f"put a shard on {queue}"):
            channel = self._puts.channel()
            self._app.send_task(
                COMPUTE_SHARD,
                (task.job, task.shard, task.attempt),
                queue=self._queue(queue),
                producer=self._app.amqp.Producer(channel, auto_declare=False),
                expires=self._settings.message_lifetime_seconds,
                ignore_result=True,
                retry=False,
            )

    def take(self, queues: Sequence[str], timeout: float) -> ShardTask | None:
        """The next task of the first of `queues` that has one, or None after `timeout` seconds (0: at once). While the
        broker is unavailable, connecting is retried until then."""
        until = self._clock.monotonic() + timeout
        while True:
            left = until - self._clock.monotonic()
            try:
                for queue in queues:
                    if (task := self._take(queue)) is not None:
                        return task
            except ServiceUnavailable:
                if left <= self._settings.poll_interval_seconds:
                    raise
            if left <= 0:
                return None
            self._clock.sleep(min(left, self._settings.poll_interval_seconds))

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        for connection in (self._puts, self._takes):
            with connection.lock:
                connection.disconnect()

    # -- inside

    def _take(self, queue: str) -> ShardTask | None:
        """The next valid task of the queue, if any."""
        with self._takes.lock:
            for _ in range(MAX_DROPS):
                with self._translate_errors(self._takes, f"take a shard from {queue}"):
                    channel = self._takes.channel()
                    self._takes.ensure_queue(self._queue(queue), channel)
                    got, message = self._next(queue, channel)
                if not got:
                    self._seen_empty[queue] = self._clock.monotonic()
                    return None
                if (task := self._read(queue, message)) is not None:
                    return task
        return None

    def _next(self, queue: str, channel: Any) -> tuple[bool, Any]:
        """Whether there was a message, and the message, or None if it can't be unpacked."""
        try:
            message = channel.basic_get(self._queue(queue).name, no_ack=True)
        except Exception as error:  # foreign bytes break kombu's unpacking in many ways
            # Kombu counts KeyError among the errors of a connection; here it is a missing field of the message.
            if isinstance(error, self._takes.connection_errors()) and not isinstance(error, KeyError):
                raise
            self._drop(queue, f"can't be unpacked ({type(error).__name__})")
            # If the connection was at fault after all, a new one helps.
            self._takes.disconnect()
            return True, None
        if message is None:
            return False, None
        convert = getattr(channel, "message_to_python", None)
        return True, convert(message) if convert is not None else message

    def _read(self, queue: str, message: Any) -> ShardTask | None:
        """The task in a message; None for a foreign or an expired message."""
        if message is None:
            return None
        try:
            if (problem := _problem(message)) is None:
                found = task_arguments(message.body)
                if not self._is_late(queue, message.headers.get("expires")):
                    return ShardTask(found.job, found.shard, found.attempt)
                problem = f"has expired (job {found.job}, shard {found.shard})"
        except (AttributeError, TypeError, ValueError) as error:  # pydantic's is a ValueError
            problem = f"isn't one of ours ({type(error).__name__})"
        self._drop(queue, problem)
        return None

    def _is_late(self, queue: str, expires: str | None) -> bool:
        """Whether the message has expired. Clocks of two machines may differ, so the sender's expiry isn't enough: a
        message in a queue that was empty here a short while ago can't be old, whatever the clocks show."""
        if expires is None or datetime.fromisoformat(expires) >= self._clock.now():
            return False
        emptied = self._seen_empty.get(queue)
        return emptied is None or self._clock.monotonic() - emptied > self._settings.message_lifetime_seconds

    def _drop(self, queue: str, why: str) -> None:
        self.dropped += 1
        logger.warning("message dropped", queue=queue, reason=why)

    def _queue(self, name: str) -> Any:
        """The queue on the default exchange, so that only the queue itself is left on the broker, until it expires."""
        return Queue(
            f"{self._settings.prefix}.{name}", Exchange("", "direct"), expires=self._settings.queue_lifetime_seconds
        )

    def _connect(self) -> Any:
        connection = Connection(
            self._settings.url,
            connect_timeout=self._settings.timeout_seconds,
            ssl=security(self._settings.url),
            transport_options=_options(self._settings.url, self._settings.timeout_seconds)
            | dict(self._settings.transport_options),
        )
        others = len(connection.alt) - 1 if connection.alt else 0
        connection.ensure_connection(
            max_retries=others, interval_start=0, interval_step=0, timeout=self._settings.timeout_seconds
        )
        return connection

    @contextmanager
    def _translate_errors(self, connection: _BrokerConnection, what: str) -> Iterator[None]:
        """Raise `ServiceUnavailable` for the broker's errors inside, and close the connection."""
        try:
            yield
        except connection.connection_errors() as error:
            connection.disconnect()
            raise ServiceUnavailable(
                f"{self._address}: can't {what}: {_reason(error)}; see that the broker runs and answers within "
                f"{self._settings.timeout_seconds:g} s"
            ) from error


class _BrokerConnection:
    """One connection to the broker and its channel, opened on first use. Used under its lock."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.lock = threading.Lock()
        self._connect = connect
        self._connection: Any = None
        self._channel: Any = None
        self._declared: set[str] = set()

    def channel(self) -> Any:
        if self._channel is None:
            self._connection = self._connect()
            self._channel = self._connection.channel()
        return self._channel

    def ensure_queue(self, queue: Any, channel: Any) -> None:
        """Declare the queue, if necessary. On Redis a queue exists when it has messages, and declaring it would cost
        two more round trips with each poll."""
        if queue.name not in self._declared:
            if self._connection.transport.driver_type != "redis":
                queue(channel).declare()
            self._declared.add(queue.name)

    def connection_errors(self) -> tuple[type[BaseException], ...]:
        """Exceptions after which the connection is unusable."""
        if self._connection is None:
            return (KombuError, OSError)
        return (KombuError, OSError, *self._connection.connection_errors, *self._connection.channel_errors)

    def disconnect(self) -> None:
        """Close the connection."""
        ignored = self.connection_errors()
        connection, self._connection, self._channel = self._connection, None, None
        self._declared.clear()
        if connection is not None:
            with suppress(*ignored):  # the connection is discarded; errors of closing it don't matter
                connection.release()


def _options(url: str, timeout: float) -> dict[str, Any]:
    """Options that make each kind of transport answer or fail in time."""
    scheme = scheme_of(url)
    if scheme in (*REDIS, "sentinel"):
        return socket_options(timeout) | {"priority_steps": [0]}  # one list a queue
    if scheme in ("amqp", "amqps", "pyamqp"):
        return {"read_timeout": timeout, "write_timeout": timeout, "confirm_publish": True}
    return {}


def _problem(message: Any) -> str | None:
    """Why a message is no shard task, by its headers and size; None if it may be one."""
    size = len(message.body)
    if message.errors or message.content_type != "application/json" or size > MAX_MESSAGE_BYTES:
        return f"is {message.content_type!r:.80} of {size} bytes"
    if message.headers.get("task") != COMPUTE_SHARD:
        return f"is the task {message.headers.get('task')!r:.80}"
    return None


def _reason(error: BaseException) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__
