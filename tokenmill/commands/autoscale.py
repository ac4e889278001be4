"""`tokenmill autoscale`: the desired number of workers of each pool, for the system that starts and ends them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.config.cli_options import Debug, Json, MetricsPort, RootUrl
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.scaling.autoscaler import ScalingTarget
    from schemas.settings.settings import Settings

ADAPTERS = ("print", "cloudwatch", "http")


def _adapter(name: str) -> str:
    if name not in ADAPTERS:
        raise typer.BadParameter(f"{name!r} is not known; give one of {', '.join(ADAPTERS)}")
    return name


def autoscale(
    root_url: RootUrl = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            parser=_adapter,
            metavar="ADAPTER",
            help="Where decisions go: print (default), cloudwatch (TOKENMILL_CLOUDWATCH__NAMESPACE), http (JSON "
            "at /autoscale/POOL on the metrics port, for KEDA). Repeat for several.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Decide once, and end.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds between two decisions. Default: TOKENMILL_AUTOSCALE__INTERVAL_SECONDS (30)."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print only, and write nothing down for the next decision."),
    ] = False,
    metrics_port: MetricsPort = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Decide how many workers each pool should have, and publish the decision, until stopped.

    By the work that waits, at the speed that workers measure, against deadlines; by how long it has waited; by TTFT and
    KV cache use while callers wait. Limits are in TOKENMILL_AUTOSCALE__LIMITS and __POOLS. A dispatcher with
    TOKENMILL_CLOUDWATCH__NAMESPACE does this by itself; several may run.
    """
    from pipeline.metric_collectors import unexpected_errors
    from pipeline.runtime.inline_executor import MAX_CONCURRENT_REQUESTS
    from pipeline.scaling.autoscaler import Autoscaler
    from pipeline.scaling.backlog import BacklogReader
    from tokenmill.errors import UserError
    from tokenmill.processes.logging import log_to_stderr
    from tokenmill.processes.metrics_server import metrics_served
    from tokenmill.processes.runtime import run_until_stopped, wait_for_stop
    from tokenmill.processes.signals import stop_on_signals
    from tokenmill.root import open_root, request_executor
    from tokenmill.services.autoscaler_outputs import DecisionEndpoint, DecisionPrinter
    from tokenmill.services.backends import redis_worker_backends

    log_to_stderr(logging.WARNING if once else logging.INFO)
    settings = read_settings()
    chosen = adapter or ["print"]
    if dry_run and chosen != ["print"]:
        raise typer.BadParameter("--dry-run only prints; leave --adapter out")
    if once and "http" in chosen:
        raise typer.BadParameter("--once ends before a request could arrive; leave out --once or --adapter http")
    port = settings.metrics.port if metrics_port is None else metrics_port
    if "http" in chosen and port is None:
        raise UserError("--adapter http needs a port; give --metrics-port, or set TOKENMILL_METRICS__PORT")
    served = DecisionEndpoint()
    targets: list[ScalingTarget] = [served]
    if "print" in chosen:
        targets.append(DecisionPrinter(as_json=as_json))
    if "cloudwatch" in chosen:
        targets.append(_cloudwatch(settings))
    options = settings.autoscale
    if interval is not None:
        options = options.model_copy(update={"interval_seconds": interval})
    with (
        stop_on_signals() as stop,
        open_root(root_url, settings) as root,
        redis_worker_backends(settings) as (heartbeats, lane),
        request_executor(root, MAX_CONCURRENT_REQUESTS) as readers,
    ):
        backlog = BacklogReader(root.world, heartbeats, settings.cloudwatch.worker_tokens_per_second, lane, readers)
        scaler = Autoscaler(root.world, backlog, heartbeats, options, targets, keep=not dry_run)
        if once:
            scaler.decide_once()
            return
        documents = served.document if "http" in chosen else None
        with metrics_served(
            settings, metrics_port, served.write_samples, unexpected_errors(root.world.errors), documents=documents
        ):
            run_until_stopped(stop, root.world, wait_for_stop, {"autoscaler": scaler.run})


def _cloudwatch(settings: Settings) -> ScalingTarget:
    from pipeline.scaling.cloudwatch import CloudWatch
    from tokenmill.errors import UserError

    if settings.cloudwatch.namespace is None:
        raise UserError("--adapter cloudwatch needs a namespace; set TOKENMILL_CLOUDWATCH__NAMESPACE")
    return CloudWatch(settings.cloudwatch.namespace, settings.cloudwatch.installation, settings.s3.region)
