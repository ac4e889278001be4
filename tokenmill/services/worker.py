"""A worker as a part of an installation."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from engine.config import EngineConfig
from pipeline.experiments.registry import ExperimentRegistry
from pipeline.lane.placement import LatencyTargets
from pipeline.lane.queue_order import queues_of_no_worker
from pipeline.models.catalog import BY_DIGEST
from pipeline.models.registry import ModelRegistry
from pipeline.overload.observer import DegradationObserver
from pipeline.ports import StoreUnavailable
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.job import Tier
from schemas.models import ModelPin
from schemas.settings.kv_transfer import Role
from schemas.settings.settings import GenerationConfig, Settings
from schemas.workers.metrics import WorkerMetrics
from tokenmill.config.job_options import ChosenModel
from tokenmill.errors import ModelError
from tokenmill.processes.logging import LogFormat, log_to_stderr
from tokenmill.processes.model_switching import ModelRotation, RotatingShardSource
from tokenmill.processes.replicas import ReplicaConnection, Replicas, ReplicaTask
from tokenmill.processes.runtime import frozen_heap, machine_name, unique_name
from tokenmill.processes.signals import stop_on_signals
from tokenmill.root import Root
from tokenmill.services.backends import Backends
from tokenmill.services.handover import open_handover
from tokenmill.services.readiness import LoadModel, Readiness
from tokenmill.services.worker_process import entry_of, run_worker_process, worker_settings
from workers.experiments import ExperimentSideWork
from workers.lane.requests import LaneRules
from workers.lane.routes import CatalogModels
from workers.lane.server import LaneServer, LaneServing
from workers.model.loaded_model import LoadedModel
from workers.observability.watchdog import Watchdog
from workers.policies.loader import load_policies
from workers.policies.policy import NO_POLICIES, Policies
from workers.shards.store_outage import OutageTolerantClient
from workers.shards.worker import ShardWorker
from workers.text.chat_options import ChatOptions

logger = structlog.get_logger(__name__)


def load_any(
    chosen: ChosenModel,
    config: EngineConfig,
    chat: ChatOptions,
    vllm_options: Mapping[str, Any] | None = None,
    generation_config: GenerationConfig = "auto",
) -> LoadedModel:
    """Load a model for any job. One named NAME@sha256:DIGEST is served as NAME, and must have that digest: raises
    `ModelError`, and what loading raises."""
    path = Path(chosen.source.path)
    name, mark, digits = chosen.name.rpartition(BY_DIGEST)
    model = LoadedModel.load(
        path,
        name=served_name(chosen),
        config=config,
        revision=chosen.source.revision,
        chat=chat,
        engine_name=chosen.engine,
        vllm_options=vllm_options,
        use_generation_config=generation_config == "auto",
    )
    if mark and name and model.digest != f"sha256:{digits}":
        raise ModelError(f"--model {chosen.name}: {path} is {model.digest}; give the model's own digest, or none")
    return model


def served_name(chosen: ChosenModel) -> str:
    """The name under which a model is served: without the digest of NAME@sha256:DIGEST."""
    name, mark, _ = chosen.name.rpartition(BY_DIGEST)
    return name if mark and name else chosen.name


def run_worker(
    root_url: str | None,
    settings: Settings,
    models: Sequence[LoadModel],
    switch_after: float,
    policies: Policies = NO_POLICIES,
    metrics_port: int | None = None,
    log_format: LogFormat | None = None,
    price_per_hour: float | None = None,
    role: Role = "both",
) -> None:
    """Run a worker process with these models, one loaded at a time, until a stop signal.

    Raises `UserError` for missing settings, and what loading and the work raise.
    """

    def make(root: Root, backends: Backends) -> WorkerService:
        return WorkerService(root, backends, models, settings, switch_after, policies, price_per_hour, role)

    run_worker_process(root_url, settings, make, metrics_port, log_format)


def run_replicas(
    environments: Sequence[Mapping[str, str]],
    root_url: str | None,
    settings: Settings,
    models: Sequence[LoadModel],
    switch_after: float,
    policies: Policies,
    metrics_port: int | None,
    log_format: LogFormat | None = None,
    price_per_hour: float | None = None,
    role: Role = "both",
) -> None:
    """As `run_worker`, in a process for each of these environments. Each exports its metrics, and its KV blocks, on a
    port of its own, from the given one upwards, and has an equal share of the price. Raises `UserError` when one of
    them fails, after all have ended."""
    report_up = log_to_stderr(logging.INFO, log_format or settings.log_format, "worker")
    port = settings.metrics.port if metrics_port is None else metrics_port
    names = policies.chosen
    price = None if price_per_hour is None else price_per_hour / len(environments)
    tasks = [
        ReplicaTask(
            _replica,
            (
                root_url,
                _with_transfer_port(settings, number),
                models,
                switch_after,
                names,
                port + number if port else port,
                log_format,
                price,
                role,
            ),
        )
        for number in range(len(environments))
    ]
    with stop_on_signals() as stop, Replicas(tasks, environments) as replicas:
        report_up(f"{len(tasks)} workers begin")
        stop.begin()
        replicas.wait(stop)


def _replica(
    _line: ReplicaConnection,
    root_url: str | None,
    settings: Settings,
    models: Sequence[LoadModel],
    switch_after: float,
    policies: Sequence[str],
    metrics_port: int | None,
    log_format: LogFormat | None,
    price_per_hour: float | None,
    role: Role,
) -> None:
    """The task of a replica: `run_worker`, with policies by their names."""
    loaded = load_policies(policies)
    run_worker(root_url, settings, models, switch_after, loaded, metrics_port, log_format, price_per_hour, role)


def _with_transfer_port(settings: Settings, number: int) -> Settings:
    """The settings of the replica with this number."""
    transfer = settings.kv_transfer
    port = transfer.port + number if transfer.port else 0
    return settings.model_copy(update={"kv_transfer": transfer.model_copy(update={"port": port})})


class WorkerService:
    """A `Part`: it publishes its models and computes their shards, one model at a time, together with the lane's
    requests. At the end it releases unfinished shards with their tokens.

    All models are loaded once at the start and checked, so that an unusable one is reported at once.

    Args:
        switch_after: seconds after which a model with work is replaced by another that has requests.
        policies: checks of prompts and answers.

    Attributes:
        models: their names, in order of rotation, and those of its adapters.
        readiness: has the durations of loading and warm-up.
        greeting: the process's message after its start.
    """

    def __init__(
        self,
        root: Root,
        backends: Backends,
        models: Sequence[LoadModel],
        settings: Settings,
        switch_after: float,
        policies: Policies = NO_POLICIES,
        price_per_hour: float | None = None,
        role: Role = "both",
    ) -> None:
        self._root = root
        self._role: Role = role
        self._transfer = settings.kv_transfer
        self._redis_url = None if settings.redis_url is None else settings.redis_url.get_secret_value()
        self._targets = LatencyTargets(settings.lane.slo.ttft_seconds, settings.lane.slo.itl_seconds)
        self._price = price_per_hour
        self._backends = backends
        self._name = unique_name(root.world.random)
        self.readiness = Readiness(root.world, settings.warmup, self._name)
        pins = [self._publish_unloaded(load, policies) for load in models[1:]]
        self._first: LoadedModel | None = self.readiness.load(models[0])
        pins.insert(0, _publish(root, self._first, policies))
        self.models = [pin.name for pin in pins] + list(self._first.adapters)
        self._loads = {pin.key: load for pin, load in zip(pins, models, strict=True)}
        self._client: ShardClient | None = None
        self._lane = backends.lane.worker(self._name)
        steal_after_seconds = settings.lane.routing.steal_after_seconds
        queues = partial(
            queues_of_no_worker,
            steal_after_seconds=steal_after_seconds,
            role=role,
            help_after_seconds=settings.kv_transfer.help_after_seconds,
        )
        self._rotation = ModelRotation(
            list(self._loads), backends.queue, self._lane, root.world.clock, switch_after, queues
        )
        self._lane_limits = settings.lane.limits
        self._lane_rules = lane_rules(settings, policies)
        self._find_model = CatalogModels(root.world.store, root.world.clock)
        self._serving = LaneServing(
            most=settings.lane.max_requests,
            grace_seconds=settings.lane.drain_seconds,
            steal_after_seconds=steal_after_seconds,
        )
        self._watchdog = Watchdog(settings.stuck_seconds)
        self._settings = worker_settings(settings, backends, policies)
        self.greeting = f"working for {root.url} with {', '.join(self.models)}"

    def _publish_unloaded(self, load: LoadModel, policies: Policies) -> ModelPin:
        """Load the model once, to check and publish it."""
        model = self.readiness.load(load)
        pin = _publish(self._root, model, policies)
        model.close()
        return pin

    def metrics(self) -> WorkerMetrics | None:
        """The worker's metrics since it began to serve the loaded model; None: none yet."""
        client = self._client
        return None if client is None else client.metrics

    def __call__(self, stop: threading.Event) -> None:
        """Work until `stop` is set."""
        try:
            while not stop.is_set():
                try:
                    model = self._first or self.readiness.load(self._loads[self._rotation.loaded], stop)
                except StoreUnavailable:  # the outage lasted until the stop signal
                    break
                self._first = None
                self._serve(model, stop)
                model.close()
                del model
                gc.collect()  # the next model needs the memory
        finally:
            self._lane.close()
        logger.info("worker ended", worker=self._name)

    def _serve(self, model: LoadedModel, stop: threading.Event) -> None:
        """Serve the model until its turn is over or the stop signal."""
        keys, world = [pin.key for pin in model.pins], self._root.world
        client = ShardClient(
            self._name, world, self._root.ledger, self._backends.queue, self._backends.heartbeats, lambda: False,
            models=keys, price_per_hour=self._price,
            takes_lane_requests=lambda: self._role != "decode" and not stop.is_set(), role=self._role,
        )  # fmt: skip
        self._client = client
        logger.info("model's turn", model=model.name, key=keys[0], adapters=len(model.adapters))
        degradation = DegradationObserver(self._backends.degradation, model.name)
        try:
            with (
                frozen_heap(),
                open_handover(
                    self._role, model, world.clock, self._transfer, self._backends.heartbeats, self._targets,
                    self._redis_url,
                ) as handover,
                self._watchdog.watching(),
                degradation.polling(),
                LaneServer(
                    model, self._lane, world.clock, self._lane_rules, self._serving, self._lane_limits,
                    world.traces, handover, self._find_model,
                ).running(stop) as lane,
                ExperimentSideWork(
                    lane, model.engine, model.name, world.clock, ExperimentRegistry(world.store), self._name,
                    machine_name(model.gpu_uuids),
                ).running() as side_work,
            ):  # fmt: skip
                self._rotation.begin()
                tolerant = OutageTolerantClient(client, world.clock, stop)
                source = RotatingShardSource(tolerant, self._rotation, lambda: side_work.busy)
                ShardWorker(
                    model, source, tolerant, world.clock, self._settings, self._watchdog,
                    beside=side_work, traces=world.traces, degradation=degradation.steps,
                ).run(stop)  # fmt: skip
        finally:
            self._client = None
            client.close()


def _publish(root: Root, model: LoadedModel, policies: Policies) -> ModelPin:
    """Publish the model and its adapters in the catalog; the model's pin. Where its name selects another version,
    those of the adapters do, too."""
    registry, entry = ModelRegistry(root.world.store), entry_of(model, policies, root)
    is_served = registry.publish(entry)
    if not is_served:
        logger.info("another version is served under this name", model=entry.pin.name, digest=entry.pin.digest)
    for name in model.adapters:
        registry.publish(entry.model_copy(update={"pin": model.pin(name)}), candidate=not is_served)
    return entry.pin


def lane_rules(settings: Settings, policies: Policies) -> LaneRules:
    """The limits of the lane's requests, by the same settings as those of jobs' rows."""
    return LaneRules(
        default_max_tokens=settings.default_max_tokens,
        caps={tier: settings.max_output_tokens.of(tier) for tier in Tier},
        limits=settings.limits,
        request_timeout_seconds=settings.request_timeout_seconds,
        policies=policies,
    )
