"""The common parts of worker processes, for workers that serve a model and for candidates."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from pipeline.metric_collectors import own_work, unexpected_errors
from schemas.models import CatalogEntry
from schemas.settings.settings import Settings
from schemas.workers.metrics import WorkerMetrics
from tokenmill.processes.logging import LogFormat, log_to_stderr
from tokenmill.processes.metrics_server import metrics_served
from tokenmill.processes.runtime import run_until_stopped
from tokenmill.processes.signals import stop_on_signals
from tokenmill.processes.tracing import traces_of
from tokenmill.root import Root, open_root
from tokenmill.services.backends import Backends, redis_backends
from tokenmill.services.readiness import Readiness
from tokenmill.services.spot_interruption import watch_for_notice
from workers.model.loaded_model import LoadedModel
from workers.policies.policy import Policies
from workers.settings import WorkerSettings


class WorkerPart(Protocol):
    """A `Part` with loaded and checked models."""

    @property
    def readiness(self) -> Readiness:
        """Has the durations of loading and warm-up."""

    @property
    def greeting(self) -> str:
        """The process's message after its start."""

    def metrics(self) -> WorkerMetrics | None:
        """The current metrics; None: none yet."""

    def __call__(self, stop: threading.Event) -> None:
        """Work until `stop` is set."""


def run_worker_process(
    root_url: str | None,
    settings: Settings,
    make: Callable[[Root, Backends], WorkerPart],
    metrics_port: int | None,
    log_format: LogFormat | None,
) -> None:
    """Run a process with the worker of `make`, until a stop signal or the spot instance's interruption notice.

    Raises `UserError` for missing settings, and what `make` and the work raise.
    """
    report_up = log_to_stderr(logging.INFO, log_format or settings.log_format, "worker")
    with (
        stop_on_signals() as stop,
        traces_of("worker") as traces,
        open_root(root_url, settings, traces=traces) as root,
        redis_backends(settings) as backends,
    ):
        worker = make(root, backends)
        report_up(worker.greeting)
        with metrics_served(
            settings,
            metrics_port,
            own_work(worker.metrics),
            worker.readiness.samples(),
            unexpected_errors(root.world.errors),
        ):
            run_until_stopped(
                stop, root.world, worker, {"spot notice": watch_for_notice} if settings.spot_notice else {}
            )


def worker_settings(settings: Settings, backends: Backends, policies: Policies) -> WorkerSettings:
    """A worker's settings in an installation."""
    return WorkerSettings(
        request_timeout_seconds=settings.request_timeout_seconds,
        checkpoint_seconds=settings.checkpoint_seconds,
        poll_interval_seconds=backends.poll_seconds,
        stuck_seconds=settings.stuck_seconds,
        policies=policies,
        trace_interval_seconds=settings.tracing.step_seconds,
    )


def entry_of(model: LoadedModel, policies: Policies, root: Root) -> CatalogEntry:
    """The catalog entry of the model."""
    return CatalogEntry(
        pin=model.pin(),
        max_model_len=model.limits.max_model_len,
        policies=policies.fingerprint,
        published_at=root.world.clock.now(),
    )
