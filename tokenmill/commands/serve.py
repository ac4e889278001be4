"""The long-running commands: all parts in one process (`serve`), or one part each (`worker`, `dispatcher`,
`intake`, `gateway`)."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.config.cli_options import (
    Adapters,
    ChatTemplate,
    ContentPolicies,
    Debug,
    DeviceOption,
    DTypeOption,
    EngineOption,
    EngineOptionValues,
    ExpertParallel,
    GenerationConfigOption,
    KvCacheDir,
    KvCacheDirSize,
    KvCacheMemory,
    KvDTypeOption,
    KvOffloadingSize,
    LogForm,
    MaxLoras,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MergeAdapter,
    MetricsPort,
    MicroBatches,
    Models,
    PipelineParallel,
    PricePerHour,
    QuantizeOption,
    ReasoningParser,
    Replicas,
    RootUrl,
    ScoreTokens,
    SpeculateOption,
    SwitchAfter,
    TensorParallel,
    ThinkingTokenBudget,
    Threads,
    WorkerRole,
    folder,
)
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from schemas.settings.settings import Settings
    from tokenmill.config.engine_options import EngineOptions
    from workers.model.loaded_model import LoadedModel
    from workers.text.chat_options import ChatOptions

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
Candidate = Annotated[
    bool,
    typer.Option(
        "--candidate", help="The model is a new version: work for its release only, until that has promoted it."
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65_535, help="0: any that is free.")]


def serve(
    model: Models = ["demo"],  # noqa: B006 - typer only reads it
    data: Data = Path("tokenmill-data"),
    host: Host = "127.0.0.1",
    port: Port = 8000,
    engine: EngineOption = None,
    engine_option: EngineOptionValues = None,
    dtype: DTypeOption = "auto",
    quantize: QuantizeOption = "none",
    kv_dtype: KvDTypeOption = "auto",
    speculate: SpeculateOption = None,
    adapter: Adapters = None,
    max_loras: MaxLoras = 8,
    merge_adapter: MergeAdapter = False,
    generation_config: GenerationConfigOption = None,
    content_policy: ContentPolicies = None,
    device: DeviceOption = "auto",
    threads: Threads = None,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    micro_batches: MicroBatches = None,
    expert_parallel: ExpertParallel = False,
    chat_template: ChatTemplate = None,
    reasoning_parser: ReasoningParser = None,
    thinking_token_budget: ThinkingTokenBudget = None,
    score_tokens: ScoreTokens = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    kv_cache_memory: KvCacheMemory = None,
    kv_offloading_size: KvOffloadingSize = None,
    kv_cache_dir: KvCacheDir = None,
    kv_cache_dir_size: KvCacheDirSize = None,
    price_per_hour: PricePerHour = None,
    settle: Settle = 2.0,
    switch_after: SwitchAfter = 60.0,
    metrics_port: MetricsPort = None,
    log_format: LogForm = None,
    _debug: Debug = False,
) -> None:
    """Answer HTTP requests and files in DIR/incoming, until stopped: everything in one process, no other
    server.

    OpenAI's clients work with http://HOST:PORT/v1 as their base_url. A file DIR/incoming/NAME.jsonl becomes a job, as
    do .jsonl.gz, .jsonl.zst, .csv, .arrow and .parquet; DIR/incoming/bulk/NAME.jsonl one of the tier bulk. Options such
    as model, tier and deadline come in NAME.job.json, which must lie there first. Results are in DIR/jobs/ID/results.
    After a kill the same command goes on where the checkpoints stand.
    """
    from pipeline import metric_collectors
    from pipeline.adapters.folder.locks import RunLock
    from pipeline.dispatcher.dispatch_counts import DispatchMetrics
    from pipeline.experiments.controller import ExperimentController
    from tokenmill.config.engine_options import engine_options
    from tokenmill.config.job_options import chat_options, content_policies
    from tokenmill.local.pricing import price_of_worker
    from tokenmill.processes.logging import log_to_stderr
    from tokenmill.processes.metrics_server import metrics_served
    from tokenmill.processes.runtime import run_until_stopped
    from tokenmill.processes.signals import stop_on_signals
    from tokenmill.processes.tracing import traces_of
    from tokenmill.root import open_root
    from tokenmill.services.backends import in_process_backends
    from tokenmill.services.gateway import GatewayService
    from tokenmill.services.service_parts import dispatcher_part, folder_part, housekeeping_part
    from tokenmill.services.virtual_models import job_router
    from tokenmill.services.worker import WorkerService

    settings = read_settings()
    report_up = log_to_stderr(logging.INFO, log_format or settings.log_format, "serve")
    policies = content_policies(content_policy, settings)
    options = engine_options(
        settings, dtype=dtype, device=device, threads=threads, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, kv_cache_memory=kv_cache_memory,
        kv_offloading_size=kv_offloading_size, kv_cache_dir=kv_cache_dir, kv_cache_dir_size=kv_cache_dir_size,
        quantize=quantize,
        kv_dtype=kv_dtype, speculate=speculate, tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel, micro_batches=micro_batches,
        expert_parallel=expert_parallel, engine=engine,
        engine_option=engine_option, generation_config=generation_config,
        adapter=adapter, max_loras=max_loras,
        merge_adapter=merge_adapter,
    )  # fmt: skip
    chat = chat_options(chat_template, reasoning_parser, thinking_token_budget, score_tokens)
    loads = _loads(model, settings, options, chat)
    with (
        stop_on_signals() as stop,
        traces_of("serve") as traces,
        open_root(str(data), settings, traces=traces) as root,
        RunLock(data.expanduser()),
    ):
        backends = in_process_backends(root, settings)
        price = price_of_worker(settings, price_per_hour)
        metrics = DispatchMetrics()
        sources = metric_collectors.all_of(
            metric_collectors.dispatching(metrics, root.world.clock),
            metric_collectors.prices(backends.heartbeats, price),
        )
        gateway = GatewayService(root, settings, backends, host, port, dispatching=sources)
        folders = folder_part(root, settings, settle)
        worker_service = WorkerService(root, backends, loads, settings, switch_after, policies, price)
        incoming = data.expanduser() / "incoming"
        report_up(
            f"serving {', '.join(worker_service.models)}: {gateway.url}/v1, and files dropped into {incoming}; "
            "Ctrl-C ends in order"
        )
        router = job_router(root.world, backends.heartbeats, backends.lane, gateway.route_counts)
        dispatching = dispatcher_part(root, backends, settings, metrics, price, "serve", log_format, router)
        housekeeping = housekeeping_part(root, backends, settings)
        experiments = ExperimentController(root.world).run
        parts = {
            "dispatcher": dispatching, "folder": folders, "housekeeping": housekeeping, "experiments": experiments,
        }  # fmt: skip
        with metrics_served(settings, metrics_port, *gateway.sources):
            run_until_stopped(stop, root.world, worker_service, parts | gateway.parts)


def worker(
    model: Models,
    root_url: RootUrl = None,
    engine: EngineOption = None,
    engine_option: EngineOptionValues = None,
    dtype: DTypeOption = "auto",
    quantize: QuantizeOption = "none",
    kv_dtype: KvDTypeOption = "auto",
    speculate: SpeculateOption = None,
    adapter: Adapters = None,
    max_loras: MaxLoras = 8,
    merge_adapter: MergeAdapter = False,
    generation_config: GenerationConfigOption = None,
    content_policy: ContentPolicies = None,
    device: DeviceOption = "auto",
    threads: Threads = None,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    micro_batches: MicroBatches = None,
    expert_parallel: ExpertParallel = False,
    replicas: Replicas = 1,
    chat_template: ChatTemplate = None,
    reasoning_parser: ReasoningParser = None,
    thinking_token_budget: ThinkingTokenBudget = None,
    score_tokens: ScoreTokens = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    kv_cache_memory: KvCacheMemory = None,
    kv_offloading_size: KvOffloadingSize = None,
    kv_cache_dir: KvCacheDir = None,
    kv_cache_dir_size: KvCacheDirSize = None,
    price_per_hour: PricePerHour = None,
    switch_after: SwitchAfter = 60.0,
    metrics_port: MetricsPort = None,
    log_format: LogForm = None,
    role: WorkerRole = "both",
    candidate: Candidate = False,
    _debug: Debug = False,
) -> None:
    """Own an engine, and compute the shards that a dispatcher dispatches, until stopped.

    With --candidate its model is a new version, which works for its release only until that has promoted it: see
    'tokenmill release --help'.

    On SIGTERM or Ctrl-C it writes a checkpoint and releases its shards; other workers resume them. With
    --replicas it is as many workers, which end together.
    """
    from tokenmill.config.engine_options import engine_options
    from tokenmill.config.job_options import chat_options, content_policies
    from tokenmill.local.pricing import price_of_worker
    from tokenmill.processes.replicas import environments
    from tokenmill.services.worker import run_replicas, run_worker

    settings = read_settings()
    policies = content_policies(content_policy, settings)
    options = engine_options(
        settings, dtype=dtype, device=device, threads=threads, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, kv_cache_memory=kv_cache_memory,
        kv_offloading_size=kv_offloading_size, kv_cache_dir=kv_cache_dir, kv_cache_dir_size=kv_cache_dir_size,
        quantize=quantize,
        kv_dtype=kv_dtype, speculate=speculate, tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel, micro_batches=micro_batches,
        expert_parallel=expert_parallel, replicas=replicas, engine=engine,
        engine_option=engine_option, generation_config=generation_config, role=role,
        adapter=adapter, max_loras=max_loras,
        merge_adapter=merge_adapter,
    )  # fmt: skip
    chat = chat_options(chat_template, reasoning_parser, thinking_token_budget, score_tokens)
    loads = _loads(model, settings, options, chat)
    price = price_of_worker(settings, price_per_hour)
    if candidate:
        from tokenmill.errors import UserError
        from tokenmill.services.candidate_worker import run_candidate

        if len(loads) != 1 or replicas > 1 or role != "both" or adapter:
            message = "--candidate takes one --model, no --replicas, --role or --adapter; start a worker for each"
            raise UserError(message)
        run_candidate(root_url, settings, loads[0], switch_after, policies, metrics_port, log_format, price)
        return
    if replicas > 1:
        variables = environments(replicas, options.num_ranks, on_gpus=options.on_gpus)
        run_replicas(
            variables, root_url, settings, loads, switch_after, policies, metrics_port, log_format, price, role
        )
    else:
        run_worker(root_url, settings, loads, switch_after, policies, metrics_port, log_format, price, role)


def dispatcher(
    root_url: RootUrl = None,
    price_per_hour: PricePerHour = None,
    metrics_port: MetricsPort = None,
    log_format: LogForm = None,
    _debug: Debug = False,
) -> None:
    """Plan open jobs, dispatch their shards to workers, and end the jobs, until stopped. Several may run."""
    from pipeline import metric_collectors
    from pipeline.dispatcher.dispatch_counts import DispatchMetrics
    from pipeline.experiments.controller import ExperimentController
    from pipeline.models.rollout_controller import RolloutController
    from tokenmill.local.pricing import price_of_worker
    from tokenmill.processes.logging import log_to_stderr
    from tokenmill.processes.metrics_server import metrics_served
    from tokenmill.processes.runtime import run_until_stopped, wait_for_stop
    from tokenmill.processes.signals import stop_on_signals
    from tokenmill.processes.tracing import traces_of
    from tokenmill.root import open_root
    from tokenmill.services.backends import redis_backends
    from tokenmill.services.service_parts import backlog_part, dispatcher_part, housekeeping_part
    from tokenmill.services.virtual_models import job_router

    settings = read_settings()
    report_up = log_to_stderr(logging.INFO, log_format or settings.log_format, "dispatcher")
    with (
        stop_on_signals() as stop,
        traces_of("dispatcher") as traces,
        open_root(root_url, settings, traces=traces) as root,
        redis_backends(settings) as backends,
    ):
        report_up(f"dispatching for {root.url}")
        price = price_of_worker(settings, price_per_hour)
        metrics = DispatchMetrics()
        router = job_router(root.world, backends.heartbeats, backends.lane)
        dispatching = dispatcher_part(root, backends, settings, metrics, price, log_format=log_format, router=router)
        sources = (
            metric_collectors.dispatching(metrics, root.world.clock),
            metric_collectors.workers(backends.heartbeats, each=False),
            metric_collectors.prices(backends.heartbeats, price),
            metric_collectors.unexpected_errors(root.world.errors),
            metric_collectors.virtual_models(router.counts),
        )
        rollouts = RolloutController(root.world)
        parts = {
            "dispatcher": dispatching,
            "housekeeping": housekeeping_part(root, backends, settings),
            "releases": rollouts.run,
            "experiments": ExperimentController(root.world).run,
        }
        backlog = backlog_part(root, backends, settings)
        if backlog is not None:
            parts["backlog"] = backlog
        with metrics_served(settings, metrics_port, *sources, metric_collectors.releases(lambda: rollouts.metrics)):
            run_until_stopped(stop, root.world, wait_for_stop, parts)


def intake(
    root_url: RootUrl = None,
    metrics_port: MetricsPort = None,
    log_format: LogForm = None,
    _debug: Debug = False,
) -> None:
    """Ingest jobs from the configured sources, until stopped. Several may run.

    With an s3:// root: files below incoming/, from the events of TOKENMILL_BUCKET__QUEUE_URL or by listing.
    With TOKENMILL_KAFKA__BOOTSTRAP_SERVERS: Kafka's topics of requests and jobs; results and events are announced
    there, too.
    With TOKENMILL_CELERY__QUEUES: tasks of Celery.
    """
    from pipeline import metric_collectors
    from tokenmill.processes.logging import log_to_stderr
    from tokenmill.processes.metrics_server import metrics_served
    from tokenmill.processes.runtime import run_until_stopped, wait_for_stop
    from tokenmill.processes.signals import stop_on_signals
    from tokenmill.processes.tracing import traces_of
    from tokenmill.root import open_root
    from tokenmill.services.intake import ingest_services

    settings = read_settings()
    report_up = log_to_stderr(logging.INFO, log_format or settings.log_format, "intake")
    with (
        stop_on_signals() as stop,
        traces_of("intake") as traces,
        open_root(root_url, settings, traces=traces) as root,
    ):
        parts = ingest_services(root, settings)
        report_up(f"taking in for {root.url}: {', '.join(parts)}")
        with metrics_served(
            settings, metrics_port, metric_collectors.intake(root.ingest_metrics, root.world.dead_letters),
            metric_collectors.unexpected_errors(root.world.errors),
        ):  # fmt: skip
            run_until_stopped(stop, root.world, wait_for_stop, parts)


def gateway(
    root_url: RootUrl = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    metrics_port: MetricsPort = None,
    log_format: LogForm = None,
    _debug: Debug = False,
) -> None:
    """Serve the HTTP API of OpenAI's clients, until stopped. Several may run, behind a load balancer.

    On SIGTERM or Ctrl-C it refuses new requests, and completes those that are running.
    """
    from tokenmill.processes.logging import log_to_stderr
    from tokenmill.processes.metrics_server import metrics_served
    from tokenmill.processes.runtime import run_until_stopped, wait_for_stop
    from tokenmill.processes.signals import stop_on_signals
    from tokenmill.processes.tracing import traces_of
    from tokenmill.root import open_root
    from tokenmill.services.backends import redis_backends
    from tokenmill.services.gateway import GatewayService, shared_on_redis

    settings = read_settings()
    report_up = log_to_stderr(logging.INFO, log_format or settings.log_format, "gateway")
    with (
        stop_on_signals() as stop,
        traces_of("gateway") as traces,
        open_root(root_url, settings, traces=traces) as root,
        redis_backends(settings) as backends,
        shared_on_redis(root, settings) as shared,
    ):
        served = GatewayService(root, settings, backends, host, port, shared)
        report_up(f"serving {served.url}/v1 for {root.url}")
        with metrics_served(settings, metrics_port, *served.sources):
            run_until_stopped(stop, root.world, wait_for_stop, served.parts)


def _loads(
    models: list[str], settings: Settings, options: EngineOptions, chat: ChatOptions
) -> list[Callable[[], LoadedModel]]:
    """A loader of each of the models. Raises what `choose_models` and `check_adapters` raise."""
    from tokenmill.config.engine_choice import choose_engines
    from tokenmill.config.engine_options import slo_config
    from tokenmill.config.job_options import choose_models
    from tokenmill.models.adapters import check_adapters
    from tokenmill.services.worker import load_any, served_name
    from workers.model.loaded_model import model_path

    options = replace(options, slo=slo_config(settings))
    chosen = choose_engines(choose_models(models, settings.model_cache), options)
    first = chosen[0]
    path = model_path(first.source.path)
    config = options.config()
    check_adapters(served_name(first), path, first.engine, len(chosen), config)  # before weights are loaded
    loading = partial(load_any, config=config, chat=chat, vllm_options=options.vllm)
    return [partial(loading, one, generation_config=options.generation_config) for one in chosen]
