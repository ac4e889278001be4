"""The parts of an installation, each as something that works until it is told to stop.

`serve` runs all of them in one process on a folder; the separate commands run one each, with Redis between them. The
parts are the same: only what stands behind the ports of queue and heartbeats differs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from engine.config import EngineConfig
from pipeline.adapters.folder import FolderStore
from pipeline.adapters.memory_heartbeats import MemoryHeartbeats
from pipeline.adapters.memory_queue import MemoryQueue
from pipeline.catalog import Catalog
from pipeline.dispatcher import Dispatcher, DispatchSettings
from pipeline.doors.drop_watch import DropWatch, WatchSettings
from pipeline.doors.drops import DropDoor
from pipeline.doors.folder_watch import INCOMING, FolderInbox
from pipeline.foreman import Foreman, ForemanSettings
from pipeline.intake import Intake
from pipeline.ports import Heartbeats, Lease, ShardQueue
from pipeline.shard_client import ShardClient
from pipeline.worker_api import HEARTBEAT_SECONDS
from schemas.job import CatalogEntry
from schemas.settings import Settings
from tokenmill.errors import UserError
from tokenmill.job_options import ChosenModel
from tokenmill.logs import log_to_stderr
from tokenmill.output import say
from tokenmill.processes import Part, run_together, unique_name, until_told
from tokenmill.root import Root, intake_settings, open_root
from tokenmill.wiring import settled_heap
from workers.model_host import LoadedModel
from workers.shard_worker import ShardWorker, WorkerSettings

SILENCE: Final = 4 * HEARTBEAT_SECONDS
"""Seconds without a heartbeat after which a worker counts as dead, and its shards are given to others."""

FOLDER_SWEEP_SECONDS: Final = 1.0
"""A folder tells of nothing: it is listed often."""

REMOTE_LOOK_SECONDS: Final = 0.2

LEASE_SECONDS: Final = 6.0
"""A dispatcher that is gone is followed by another after this long."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Hints:
    """What carries hints between the parts: nothing that is lost here is lost for good."""

    queue: ShardQueue
    heartbeats: Heartbeats
    look_seconds: float
    settle: float = 0.0
    lease: Lease | None = None


def hints_in_process(root: Root) -> Hints:
    """Between threads of this process."""
    return Hints(MemoryQueue(), MemoryHeartbeats(root.world.clock, SILENCE), look_seconds=0.02)


@contextmanager
def hints_on_servers(settings: Settings) -> Iterator[Hints]:
    """On Redis, and on the broker that Celery uses. Raises `UserError` when none is named."""
    from pipeline.adapters.celery_queue import CeleryQueue, CeleryQueueSettings
    from pipeline.adapters.redis_connection import RedisSettings
    from pipeline.adapters.redis_heartbeats import RedisHeartbeats
    from pipeline.adapters.redis_lock import RedisLease
    from pipeline.adapters.system import SystemClock, SystemRandomness

    if settings.redis_url is None:
        raise UserError("TOKENMILL_REDIS_URL is not set; name a Redis, or use 'tokenmill serve', which needs none")
    redis_url = settings.redis_url.get_secret_value()
    broker_url = redis_url if settings.broker_url is None else settings.broker_url.get_secret_value()
    with ExitStack() as closing:
        heartbeats = RedisHeartbeats(RedisSettings(redis_url), lifetime=SILENCE)
        closing.callback(heartbeats.close)
        queue = CeleryQueue(CeleryQueueSettings(broker_url), SystemClock())
        closing.callback(queue.close)
        lease = RedisLease(RedisSettings(redis_url), "dispatcher", LEASE_SECONDS, SystemClock(), SystemRandomness())
        closing.callback(lease.close)
        yield Hints(queue, heartbeats, REMOTE_LOOK_SECONDS, settle=2 * HEARTBEAT_SECONDS, lease=lease)


def dispatcher_part(root: Root, hints: Hints, settings: Settings, price_per_hour: float | None = None) -> Part:
    """Finds open jobs, plans them, hands out their shards, and ends them."""
    dispatching = DispatchSettings(
        settle=hints.settle, weights=settings.tenant_weights, isolate=True, price_per_hour=price_per_hour
    )
    dispatcher = Dispatcher(root.world, hints.queue, hints.heartbeats, settings=dispatching)
    foreman = Foreman(root.world, dispatcher, root.open_input, ForemanSettings(planners=settings.planners), hints.lease)
    return foreman.run


def folder_part(root: Root, settings: Settings, settle: float) -> Part:
    """Makes jobs of what is dropped into the folder's incoming/."""
    store = root.world.store
    if not isinstance(store, FolderStore):
        raise UserError(f"{root.url}: only a folder can be watched; a bucket tells of drops through a queue")
    (store.root / INCOMING).mkdir(exist_ok=True)
    inbox = FolderInbox(store, root.world.clock, settle=settle)
    door = DropDoor(inbox, Intake(root.world, intake_settings(settings)), root.world)
    return DropWatch([door], root.world, WatchSettings(sweep_every=FOLDER_SWEEP_SECONDS)).run


def load(chosen: ChosenModel, config: EngineConfig, chat_template: str | None) -> LoadedModel:
    """A model for any job that may come."""
    path = Path(chosen.source.path)
    return LoadedModel.load(
        path, name=chosen.name, config=config, revision=chosen.source.revision, chat_template=chat_template
    )


def run_worker(root_url: str | None, settings: Settings, load: Callable[[], LoadedModel]) -> None:
    """A worker process with the model that `load` gives, until told to stop.

    Raises `UserError` where settings lack something, and what `load` and the work raise.
    """
    log_to_stderr(logging.INFO)
    with until_told() as stop, open_root(root_url, settings) as root, hints_on_servers(settings) as hints:
        loaded = load()
        say(f"working for {root.url} with {loaded.name}")
        run_together(stop, worker_part(root, hints, loaded, settings), {})


def worker_part(root: Root, hints: Hints, model: LoadedModel, settings: Settings) -> Part:
    """Announces the model, then works on its shards. What is unfinished at the end is given back with its tokens."""
    pin = model.pin()
    Catalog(root.world.store).publish(CatalogEntry(pin=pin, max_model_len=model.limits.max_model_len))
    name = unique_name(root.world.random)
    worker_settings = WorkerSettings(
        request_timeout=settings.request_timeout,
        checkpoint_seconds=settings.checkpoint_seconds,
        look_seconds=hints.look_seconds,
    )

    def work(stop: threading.Event) -> None:
        client = ShardClient(
            name, root.world, root.ledger, hints.queue, hints.heartbeats, lambda: False, models=[pin.key]
        )
        try:
            with settled_heap():
                ShardWorker(model, client, client, root.world.clock, worker_settings).run(stop)
        finally:
            client.close()
        logger.info("worker ended", worker=name)

    return work
