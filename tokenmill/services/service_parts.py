"""The parts of an installation, each of which works until a stop signal.

`serve` runs all of them in one process on a folder; the separate commands run one each, with Redis between them. The
parts are the same: only the adapters of queue and heartbeats differ.
"""

from __future__ import annotations

import threading
from typing import Final

from pipeline.adapters.folder.store import FolderStore
from pipeline.answers.index import AnswerIndex
from pipeline.dispatcher.controller import JobController, JobControllerSettings
from pipeline.dispatcher.dispatch_counts import DispatchMetrics
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.dispatcher.spend_limiter import SpendSettings
from pipeline.ingest.files.folder_inbox import INCOMING, FolderInbox
from pipeline.ingest.files.source import FileIngestSource
from pipeline.ingest.files.watcher import FileIngestWatcher, WatchSettings
from pipeline.maintenance.scheduler import RetentionScheduler, RetentionSchedulerSettings
from pipeline.routing.rules import RuleRouter
from pipeline.runtime.inline_executor import MAX_BACKGROUND_REQUESTS, MAX_CONCURRENT_REQUESTS
from pipeline.scaling.autoscaler import Autoscaler
from pipeline.scaling.backlog import BacklogReader
from schemas.settings.settings import Settings
from tokenmill.errors import UserError
from tokenmill.processes.logging import LogFormat
from tokenmill.processes.planner_pool import PlannerPool
from tokenmill.processes.runtime import Part
from tokenmill.root import Root, open_intake, request_executor, retention_settings
from tokenmill.services.backends import Backends

FOLDER_SWEEP_SECONDS: Final = 1.0
"""A folder has no notifications, so it is listed often."""


def dispatcher_part(
    root: Root,
    backends: Backends,
    settings: Settings,
    metrics: DispatchMetrics,
    price_per_hour: float | None = None,
    command: str = "dispatcher",
    log_format: LogFormat | None = None,
    router: RuleRouter | None = None,
) -> Part:
    """The dispatcher: it finds open jobs, plans them, dispatches their shards, and ends them. It updates `metrics`.
    `command`, `log_format`: of the planner processes. `router`: applies the rules of virtual models; None: one without
    loads and labels."""
    limits = settings.spending
    dispatching = DispatchSettings(
        settle_seconds=backends.settle, weights=settings.tenant_weights, isolate=True, price_per_hour=price_per_hour,
        spending=SpendSettings(limits.of_each, limits.tenants, limits.wait),
    )  # fmt: skip

    def dispatch(stop: threading.Event) -> None:
        # Requests to a bucket run concurrently; a folder is fast.
        with (
            request_executor(root, MAX_CONCURRENT_REQUESTS) as readers,
            request_executor(root, MAX_BACKGROUND_REQUESTS) as others,
        ):
            dispatcher = Dispatcher(
                root.world, backends.queue, backends.heartbeats,
                settings=dispatching, together=readers, beside=others, metrics=metrics,
                answers=AnswerIndex(root.world.store, root.world.clock, settings.answers, metrics.answers),
            )  # fmt: skip
            planning = JobControllerSettings(planners=settings.planners)
            planner = PlannerPool(
                root.url, command, log_format or settings.log_format,
                settings.planner_memory_bytes, settings.planner_stuck_seconds, root.world.clock, router,
                metrics.answers,
            )  # fmt: skip
            JobController(root.world, dispatcher, settings=planning, lease=backends.lease, planner=planner).run(stop)

    return dispatch


def housekeeping_part(root: Root, backends: Backends, settings: Settings) -> Part:
    """The retention scheduler."""
    interval = RetentionSchedulerSettings(settings.retention.interval.total_seconds())
    return RetentionScheduler(root.world, retention_settings(settings), interval, backends.housekeeping).run


def backlog_part(root: Root, backends: Backends, settings: Settings) -> Part | None:
    """Sends backlog and desired workers to CloudWatch; None where the settings name no namespace."""
    chosen = settings.cloudwatch
    if chosen.namespace is None:
        return None
    from pipeline.scaling.cloudwatch import CloudWatch

    target = CloudWatch(chosen.namespace, chosen.installation, settings.s3.region)
    options = settings.autoscale.model_copy(update={"interval_seconds": chosen.interval_seconds})

    def scale(stop: threading.Event) -> None:
        with request_executor(root, MAX_CONCURRENT_REQUESTS) as readers:
            reader = BacklogReader(
                root.world, backends.heartbeats, chosen.worker_tokens_per_second, backends.lane, readers
            )
            Autoscaler(root.world, reader, backends.heartbeats, options, [target]).run(stop)

    return scale


def folder_part(root: Root, settings: Settings, settle: float) -> Part:
    """Ingests files from the folder's incoming/."""
    store = root.world.store
    if not isinstance(store, FolderStore):
        raise UserError(f"{root.url}: only a folder can be watched; a bucket reports new files through a queue")
    (store.root / INCOMING).mkdir(exist_ok=True)
    inbox = FolderInbox(store, root.world.clock, settle=settle)
    source = FileIngestSource(inbox, open_intake(root, settings), root.world)
    return FileIngestWatcher([source], root.world, WatchSettings(sweep_interval_seconds=FOLDER_SWEEP_SECONDS)).run
