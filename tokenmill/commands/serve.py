"""The long-running commands: all parts in one process (`serve`), or one part each (`worker`, `dispatcher`,
`intake`, `gateway`)."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.options import (
    ChatTemplate,
    ContentPolicies,
    Debug,
    DeviceOption,
    DTypeOption,
    KvCacheMemory,
    KvDTypeOption,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MetricsPort,
    Models,
    PricePerHour,
    QuantizeOption,
    RootUrl,
    SpeculateOption,
    SwitchAfter,
    Threads,
    folder,
)
from tokenmill.output import say
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from schemas.settings import Settings
    from tokenmill.engine_options import EngineOptions
    from workers.model_host import LoadedModel

Data = Annotated[
    Path, typer.Option("--data", parser=folder, metavar="DIR", help="The folder that holds all jobs; made if missing.")
]
Settle = Annotated[
    float,
    typer.Option(min=0, help="Seconds for which a dropped file must not change before it is taken."),
]
Host = Annotated[
    str, typer.Option(help="The address on which HTTP is served. Others than this machine's own need an API key.")
]
Port = Annotated[int, typer.Option(min=0, max=65_535, help="0: any that is free.")]


def serve(
    model: Models = ["demo"],  # noqa: B006 - typer reads it, nobody writes
    data: Data = Path("tokenmill-data"),
    host: Host = "127.0.0.1",
    port: Port = 8000,
    dtype: DTypeOption = "auto",
    quantize: QuantizeOption = "none",
    kv_dtype: KvDTypeOption = "auto",
    speculate: SpeculateOption = None,
    content_policy: ContentPolicies = None,
    device: DeviceOption = "auto",
    threads: Threads = None,
    chat_template: ChatTemplate = None,
    max_num_seqs: MaxNumSeqs = 128,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    kv_cache_memory: KvCacheMemory = None,
    price_per_hour: PricePerHour = None,
    settle: Settle = 2.0,
    switch_after: SwitchAfter = 60.0,
    metrics_port: MetricsPort = None,
    _debug: Debug = False,
) -> None:
    """Answer HTTP and what is dropped into DIR/incoming, until told to stop: everything in one process, no other
    server.

    OpenAI's clients work with http://HOST:PORT/v1 as their base_url. A file DIR/incoming/NAME.jsonl or .parquet becomes
    a job; DIR/incoming/bulk/NAME.jsonl one of the tier bulk. Options such as model, tier and deadline come in
    NAME.job.json, which must lie there first. Results are in DIR/jobs/ID/results. After a kill the same command goes on
    where the checkpoints stand.
    """
    from pipeline.adapters.locks import RunLock
    from pipeline.dispatching.figures import DispatchFigures
    from pipeline.metrics import sources
    from tokenmill import service
    from tokenmill.engine_options import engine_options
    from tokenmill.gateway import Gateway
    from tokenmill.hints import hints_in_process
    from tokenmill.job_options import content_policies
    from tokenmill.logs import log_to_stderr
    from tokenmill.metrics import metrics_served
    from tokenmill.processes import run_together
    from tokenmill.root import open_root
    from tokenmill.stopping import until_told
    from tokenmill.working import Worker

    log_to_stderr(logging.INFO)
    settings = read_settings()
    policies = content_policies(content_policy, settings)
    options = engine_options(
        settings, dtype, device, threads, max_num_seqs, max_num_batched_tokens, kv_cache_memory, quantize, kv_dtype,
        speculate,
    )  # fmt: skip
    with until_told() as stop, open_root(str(data), settings) as root, RunLock(data.expanduser()):
        hints = hints_in_process(root)
        price = _price(price_per_hour, settings)
        figures = DispatchFigures(priced=price is not None)
        gateway = Gateway(root, settings, hints, host, port, dispatching=sources.dispatching(figures, root.world.clock))
        folders = service.folder_part(root, settings, settle)
        loads = _loads(model, settings, options, chat_template)
        work = Worker(root, hints, loads, settings, switch_after, policies)
        place = data.expanduser() / "incoming"
        say(f"serving {', '.join(work.models)}: {gateway.url}/v1, and files dropped into {place}; Ctrl-C ends in order")
        dispatching = service.dispatcher_part(root, hints, settings, figures, price)
        keeping = service.housekeeping_part(root, hints, settings)
        parts = {"dispatcher": dispatching, "folder": folders, "housekeeping": keeping}
        with metrics_served(settings, metrics_port, *gateway.sources):
            run_together(stop, work, parts | gateway.parts)


def worker(
    model: Models,
    root_url: RootUrl = None,
    dtype: DTypeOption = "auto",
    quantize: QuantizeOption = "none",
    kv_dtype: KvDTypeOption = "auto",
    speculate: SpeculateOption = None,
    content_policy: ContentPolicies = None,
    device: DeviceOption = "auto",
    threads: Threads = None,
    chat_template: ChatTemplate = None,
    max_num_seqs: MaxNumSeqs = 128,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    kv_cache_memory: KvCacheMemory = None,
    switch_after: SwitchAfter = 60.0,
    metrics_port: MetricsPort = None,
    _debug: Debug = False,
) -> None:
    """Own an engine, and compute the shards that a dispatcher hands out, until told to stop.

    Told to stop (SIGTERM, Ctrl-C) it logs what it has reached and gives its shards back; others go on from there.
    """
    from tokenmill.engine_options import engine_options
    from tokenmill.job_options import content_policies
    from tokenmill.working import run_worker

    settings = read_settings()
    policies = content_policies(content_policy, settings)
    options = engine_options(
        settings, dtype, device, threads, max_num_seqs, max_num_batched_tokens, kv_cache_memory, quantize, kv_dtype,
        speculate,
    )  # fmt: skip
    loads = _loads(model, settings, options, chat_template)
    run_worker(root_url, settings, loads, switch_after, policies, metrics_port)


def dispatcher(
    root_url: RootUrl = None,
    price_per_hour: PricePerHour = None,
    metrics_port: MetricsPort = None,
    _debug: Debug = False,
) -> None:
    """Plan open jobs, hand their shards to workers, and end them, until told to stop. Several may run."""
    from pipeline.dispatching.figures import DispatchFigures
    from pipeline.metrics import sources
    from tokenmill import service
    from tokenmill.hints import hints_on_servers
    from tokenmill.logs import log_to_stderr
    from tokenmill.metrics import metrics_served
    from tokenmill.processes import run_together
    from tokenmill.root import open_root
    from tokenmill.stopping import until_told

    log_to_stderr(logging.INFO)
    settings = read_settings()
    with until_told() as stop, open_root(root_url, settings) as root, hints_on_servers(settings) as hints:
        say(f"dispatching for {root.url}")
        price = _price(price_per_hour, settings)
        figures = DispatchFigures(priced=price is not None)
        dispatching = service.dispatcher_part(root, hints, settings, figures, price)
        told = sources.dispatching(figures, root.world.clock), sources.workers(hints.heartbeats, each=False)
        others = {"housekeeping": service.housekeeping_part(root, hints, settings)}
        telling = service.backlog_part(root, hints, settings)
        with metrics_served(settings, metrics_port, *told):
            run_together(stop, dispatching, others if telling is None else others | {"backlog": telling})


def intake(root_url: RootUrl = None, metrics_port: MetricsPort = None, _debug: Debug = False) -> None:
    """Make jobs of what comes in by the doors that are set up, until told to stop. Several may run.

    With an s3:// root: what is dropped below incoming/, told of by TOKENMILL_BUCKET__QUEUE_URL or found by listing.
    With TOKENMILL_KAFKA__BOOTSTRAP: Kafka's topics of requests and jobs; results and events are announced there, too.
    With TOKENMILL_CELERY__QUEUES: tasks of Celery.
    """
    from pipeline.metrics import sources
    from tokenmill.doors import door_parts
    from tokenmill.logs import log_to_stderr
    from tokenmill.metrics import metrics_served
    from tokenmill.processes import run_together
    from tokenmill.root import open_root
    from tokenmill.stopping import until_told

    log_to_stderr(logging.INFO)
    settings = read_settings()
    with until_told() as stop, open_root(root_url, settings) as root:
        parts = door_parts(root, settings)
        say(f"taking in for {root.url}: {', '.join(parts)}")
        with metrics_served(settings, metrics_port, sources.intake(root.came_in)):
            run_together(stop, _wait, parts)


def gateway(
    root_url: RootUrl = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    metrics_port: MetricsPort = None,
    _debug: Debug = False,
) -> None:
    """Serve HTTP as OpenAI's clients speak it, until told to stop. Several may run, behind a balancer.

    Told to stop (SIGTERM, Ctrl-C) it takes no new requests, and ends those that are under way.
    """
    from tokenmill.gateway import Gateway, shared_on_redis
    from tokenmill.hints import hints_on_servers
    from tokenmill.logs import log_to_stderr
    from tokenmill.metrics import metrics_served
    from tokenmill.processes import run_together
    from tokenmill.root import open_root
    from tokenmill.stopping import until_told

    log_to_stderr(logging.INFO)
    settings = read_settings()
    with (
        until_told() as stop,
        open_root(root_url, settings) as root,
        hints_on_servers(settings) as hints,
        shared_on_redis(root, settings) as shared,
    ):
        served = Gateway(root, settings, hints, host, port, shared)
        say(f"serving {served.url}/v1 for {root.url}")
        with metrics_served(settings, metrics_port, *served.sources):
            run_together(stop, _wait, served.parts)


def _loads(
    models: list[str], settings: Settings, options: EngineOptions, chat_template: Path | None
) -> list[Callable[[], LoadedModel]]:
    """What loads each of the models. Raises `UserError` for a name twice, and where one can't be found."""
    from tokenmill.engine_options import pace_config
    from tokenmill.errors import UserError
    from tokenmill.job_options import choose_model, read_template
    from tokenmill.working import load_any

    options = replace(options, pace=pace_config(settings))
    chosen = [choose_model(model, settings.model_cache) for model in models]
    names = [one.name for one in chosen]
    if len(set(names)) != len(names):
        raise UserError(f"two models are called {max(names, key=names.count)}; give them names with NAME=MODEL")
    template = read_template(chat_template)
    return [partial(load_any, one, options.config(), template) for one in chosen]


def _price(given: float | None, settings: Settings) -> float | None:
    return settings.price_per_hour if given is None else given


def _wait(stop: threading.Event) -> None:
    """The main thread's part where all others are on threads of their own; signals get through to it."""
    while not stop.wait(1.0):
        pass
