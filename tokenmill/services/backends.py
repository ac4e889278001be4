"""Coordination back ends of an installation (queue, heartbeats, lane, leases), in this process or on servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Final

from pipeline.adapters.memory.degradation import MemoryDegradationBoard
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import LaneMonitor, OpenLane
from pipeline.overload.ports import DegradationBoard
from pipeline.ports import Heartbeats, Lease, ShardQueue, World
from pipeline.worker_client.ports import HEARTBEAT_SECONDS
from schemas.settings.settings import Settings
from tokenmill.errors import UserError
from tokenmill.root import Root

SILENCE: Final = 4 * HEARTBEAT_SECONDS
"""Seconds without a heartbeat after which a worker counts as dead, and its shards are reassigned."""

REMOTE_POLL_SECONDS: Final = 0.2

LEASE_SECONDS: Final = 6.0
"""Time after which another process takes over from a dead dispatcher or publisher."""


@dataclass(frozen=True, slots=True)
class Backends:
    """The coordination back ends. Their contents may be lost without losing results.

    `lease`, `housekeeping`: leases of the active dispatcher, and of the last garbage collection.
    """

    queue: ShardQueue
    heartbeats: Heartbeats
    lane: OpenLane
    degradation: DegradationBoard
    poll_seconds: float
    settle: float = 0.0
    lease: Lease | None = None
    housekeeping: Lease | None = None


def in_process_backends(root: Root, settings: Settings) -> Backends:
    """Back ends for threads of this process."""
    clock = root.world.clock
    return Backends(
        MemoryQueue(),
        MemoryHeartbeats(clock, SILENCE),
        MemoryLane(clock, settings.lane.limits),
        MemoryDegradationBoard(clock),
        poll_seconds=0.02,
    )


@contextmanager
def redis_worker_backends(settings: Settings) -> Iterator[tuple[Heartbeats, LaneMonitor]]:
    """The heartbeats of workers and the lane, on Redis. Raises `UserError` when none is named."""
    from pipeline.adapters.redis.connection import RedisSettings
    from pipeline.adapters.redis.heartbeats import RedisHeartbeats
    from pipeline.adapters.system_clock import SystemClock
    from pipeline.lane.redis import RedisLane

    if settings.redis_url is None:
        raise UserError("TOKENMILL_REDIS_URL is not set; name the Redis that the workers beat on")
    connection = RedisSettings(settings.redis_url.get_secret_value())
    with (
        closing(RedisHeartbeats(connection, lifetime=SILENCE)) as heartbeats,
        closing(RedisLane(connection, SystemClock(), settings.lane.limits)) as lane,
    ):
        yield heartbeats, lane


@contextmanager
def redis_backends(settings: Settings) -> Iterator[Backends]:
    """Back ends on Redis, and on Celery's broker. Raises `UserError` when none is named."""
    from pipeline.adapters.celery.shard_queue import CeleryQueue, CeleryQueueSettings
    from pipeline.adapters.redis.connection import RedisSettings
    from pipeline.adapters.redis.degradation import RedisDegradationBoard
    from pipeline.adapters.redis.heartbeats import RedisHeartbeats
    from pipeline.adapters.redis.lease import RedisLease
    from pipeline.adapters.system_clock import SystemClock, SystemRandomness
    from pipeline.lane.redis import RedisLane

    if settings.redis_url is None:
        raise UserError("TOKENMILL_REDIS_URL is not set; name a Redis, or use 'tokenmill serve', which needs none")
    redis_url = settings.redis_url.get_secret_value()
    broker_url = redis_url if settings.broker_url is None else settings.broker_url.get_secret_value()
    with ExitStack() as stack:
        heartbeats = RedisHeartbeats(RedisSettings(redis_url), lifetime=SILENCE)
        stack.callback(heartbeats.close)
        queue = CeleryQueue(CeleryQueueSettings(broker_url), SystemClock())
        stack.callback(queue.close)
        every = settings.retention.interval.total_seconds()
        leases = [
            RedisLease(RedisSettings(redis_url), name, lifetime, SystemClock(), SystemRandomness())
            for name, lifetime in (("dispatcher", LEASE_SECONDS), ("housekeeping", every))
        ]
        for lease in leases:
            stack.callback(lease.close)
        lane = RedisLane(RedisSettings(redis_url), SystemClock(), settings.lane.limits)
        stack.callback(lane.close)
        degradation = RedisDegradationBoard(RedisSettings(redis_url))
        stack.callback(degradation.close)
        yield Backends(queue, heartbeats, lane, degradation, REMOTE_POLL_SECONDS, 2 * HEARTBEAT_SECONDS, *leases)


@contextmanager
def publisher_lease(settings: Settings, world: World) -> Iterator[Lease | None]:
    """The lease of the active publisher; None without Redis: then each publisher sends everything."""
    from pipeline.adapters.redis.connection import RedisSettings
    from pipeline.adapters.redis.lease import RedisLease

    if settings.redis_url is None:
        yield None
        return
    connection = RedisSettings(settings.redis_url.get_secret_value())
    lease = RedisLease(connection, "publisher", LEASE_SECONDS, world.clock, world.random)
    try:
        yield lease
    finally:
        lease.close()
