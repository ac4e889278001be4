"""What the processes of workers have in common, whether they serve a model or only try it (`working`, `candidate`)."""

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
from tokenmill.processes.runtime import run_together
from tokenmill.processes.signals import until_told
from tokenmill.processes.tracing import traces_of
from tokenmill.root import Root, open_root
from tokenmill.services.backends import Backends, redis_backends
from tokenmill.services.readiness import Readiness
from tokenmill.services.spot_interruption import watch_for_notice
from workers.model.loaded_model import LoadedModel
from workers.policies.policy import Policies
from workers.settings import WorkerSettings


class WorkerPart(Protocol):
    """A `Part` whose models are ready."""

    @property
    def readiness(self) -> Readiness:
        """Knows how long they took to get so."""

    @property
    def greeting(self) -> str:
        """What the process says of it to whoever started it."""

    def figures(self) -> WorkerMetrics | None:
        """What it counts now; None: nothing yet."""

    def __call__(self, stop: threading.Event) -> None:
        """Work until `stop` is set."""


def run_worker_process(
    root_url: str | None,
    settings: Settings,
    make: Callable[[Root, Backends], WorkerPart],
    metrics_port: int | None,
    log_format: LogFormat | None,
) -> None:
    """A process with the worker that `make` makes, until told to stop or the spot instance's notice comes.

    Raises `UserError` where settings lack something, and what `make` and the work raise.
    """
    tell = log_to_stderr(logging.INFO, log_format or settings.log_format, "worker")
    with (
        until_told() as stop,
        traces_of("worker") as traces,
        open_root(root_url, settings, traces=traces) as root,
        redis_backends(settings) as hints,
    ):
        worker = make(root, hints)
        tell(worker.greeting)
        with metrics_served(
            settings,
            metrics_port,
            own_work(worker.figures),
            worker.readiness.tell(),
            unexpected_errors(root.world.errors),
        ):
            run_together(stop, root.world, worker, {"spot notice": watch_for_notice} if settings.spot_notice else {})


def worker_settings(settings: Settings, hints: Backends, policies: Policies) -> WorkerSettings:
    """How shards are worked on in an installation."""
    return WorkerSettings(
        request_timeout=settings.request_timeout,
        checkpoint_seconds=settings.checkpoint_seconds,
        look_seconds=hints.look_seconds,
        stuck_seconds=settings.stuck_seconds,
        policies=policies,
        traced_step_seconds=settings.tracing.step_seconds,
    )


def entry_of(model: LoadedModel, policies: Policies, root: Root) -> CatalogEntry:
    """The model as the catalog has it."""
    return CatalogEntry(
        pin=model.pin(),
        max_model_len=model.limits.max_model_len,
        policies=policies.fingerprint,
        published_at=root.world.clock.now(),
    )
