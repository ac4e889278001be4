"""A worker as a part of an installation: which models it serves, and what may end it."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from engine.config import EngineConfig
from pipeline.models.catalog import BY_DIGEST
from pipeline.models.registry import ModelRegistry
from pipeline.ports import StoreUnavailable
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.job import Tier
from schemas.models import ModelPin
from schemas.settings.settings import Settings
from schemas.workers.metrics import WorkerMetrics
from tokenmill.config.job_options import ChosenModel
from tokenmill.errors import ModelError
from tokenmill.processes.logging import LogFormat, log_to_stderr
from tokenmill.processes.model_switching import ModelRotation, RotatingShardSource
from tokenmill.processes.replicas import ReplicaConnection, Replicas, ReplicaTask
from tokenmill.processes.runtime import settled_heap, unique_name
from tokenmill.processes.signals import until_told
from tokenmill.root import Root
from tokenmill.services.backends import Backends
from tokenmill.services.readiness import LoadModel, Readiness
from tokenmill.services.worker_process import entry_of, run_worker_process, worker_settings
from workers.lane.requests import LaneRules
from workers.lane.server import LaneServer, LaneServing
from workers.model.loaded_model import LoadedModel
from workers.observability.watchdog import Watchdog
from workers.policies.loader import load_policies
from workers.policies.policy import NO_POLICIES, Policies
from workers.shards.store_outage import OutageTolerantClient
from workers.shards.worker import ShardWorker

logger = structlog.get_logger(__name__)


def load_any(chosen: ChosenModel, config: EngineConfig, chat_template: str | None) -> LoadedModel:
    """A model for any job that may come. One that is called NAME@sha256:DIGEST is called NAME, and must have that
    digest: raises `ModelError`, and what loading raises."""
    path = Path(chosen.source.path)
    name, mark, digits = chosen.name.rpartition(BY_DIGEST)
    model = LoadedModel.load(
        path,
        name=name if mark and name else chosen.name,
        config=config,
        revision=chosen.source.revision,
        chat_template=chat_template,
    )
    if mark and name and model.digest != f"sha256:{digits}":
        raise ModelError(f"--model {chosen.name}: {path} is {model.digest}; give the model's own digest, or none")
    return model


def run_worker(
    root_url: str | None,
    settings: Settings,
    models: Sequence[LoadModel],
    switch_after: float,
    policies: Policies = NO_POLICIES,
    metrics_port: int | None = None,
    log_format: LogFormat | None = None,
    price_per_hour: float | None = None,
) -> None:
    """A worker process with the models that these load, one at a time, until told to stop.

    Raises `UserError` where settings lack something, and what loading and the work raise.
    """

    def make(root: Root, hints: Backends) -> WorkerService:
        return WorkerService(root, hints, models, settings, switch_after, policies, price_per_hour)

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
) -> None:
    """As `run_worker`, in a process for each of these environments; each tells its figures on a port of its own, the
    first on the one that is given, and has its part of the price. Raises `UserError` when one of them fails, after all
    have ended."""
    tell = log_to_stderr(logging.INFO, log_format or settings.log_format, "worker")
    port = settings.metrics.port if metrics_port is None else metrics_port
    names = [name for name, _ in policies.named]
    price = None if price_per_hour is None else price_per_hour / len(environments)
    tasks = [
        ReplicaTask(
            _replica,
            (root_url, settings, models, switch_after, names, port + number if port else port, log_format, price),
        )
        for number in range(len(environments))
    ]
    with until_told() as stop, Replicas(tasks, environments) as replicas:
        tell(f"{len(tasks)} workers begin")
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
) -> None:
    """A replica's task: `run_worker`, with policies by their names."""
    judges = load_policies(policies)
    run_worker(root_url, settings, models, switch_after, judges, metrics_port, log_format, price_per_hour)


class WorkerService:
    """A `Part`: announces its models, and works on their shards, one model at a time, with the lane's requests beside
    them. What is unfinished at the end is given back with its tokens.

    All models are loaded here once and made ready, so that one that can't be is known at once.

    Args:
        switch_after: seconds after which a model with work makes room for another that is asked for.
        policies: judge prompts and answers.

    Attributes:
        models: their names, in the order of their turns.
        readiness: knows how long each took to get ready.
        greeting: what its process says of it.
    """

    def __init__(
        self,
        root: Root,
        hints: Backends,
        models: Sequence[LoadModel],
        settings: Settings,
        switch_after: float,
        policies: Policies = NO_POLICIES,
        price_per_hour: float | None = None,
    ) -> None:
        self._root = root
        self._price = price_per_hour
        self._hints = hints
        self._name = unique_name(root.world.random)
        self.readiness = Readiness(root.world, settings.warmup, self._name)
        pins = [_publish(root, self.readiness.load(load), policies) for load in models[1:]]
        self._first: LoadedModel | None = self.readiness.load(models[0])
        pins.insert(0, _publish(root, self._first, policies))
        self.models = [pin.name for pin in pins]
        self._loads = {pin.key: load for pin, load in zip(pins, models, strict=True)}
        self._client: ShardClient | None = None
        self._lane = hints.lane.worker(self._name)
        self._turns = ModelRotation(list(self._loads), hints.queue, self._lane, root.world.clock, switch_after)
        self._lane_rules = lane_rules(settings, policies)
        self._serving = LaneServing(most=settings.lane.most_requests, grace=settings.lane.drain_seconds)
        self._watchdog = Watchdog(settings.stuck_seconds)
        self._settings = worker_settings(settings, hints, policies)
        self.greeting = f"working for {root.url} with {', '.join(self.models)}"

    def figures(self) -> WorkerMetrics | None:
        """What the worker counted since it began to serve the model that it has loaded; None: nothing yet."""
        client = self._client
        return None if client is None else client.figures

    def __call__(self, stop: threading.Event) -> None:
        """Work until `stop` is set."""
        try:
            while not stop.is_set():
                try:
                    model = self._first or self.readiness.load(self._loads[self._turns.loaded], stop)
                except StoreUnavailable:  # it was waited for until the word to stop
                    break
                self._first = None
                self._serve(model, stop)
                del model
                gc.collect()  # what the next one needs may not be free beside this one
        finally:
            self._lane.close()
        logger.info("worker ended", worker=self._name)

    def _serve(self, model: LoadedModel, stop: threading.Event) -> None:
        """Until the model's turn is over, or the worker is told to stop."""
        key, world = model.pin().key, self._root.world
        client = ShardClient(
            self._name, world, self._root.ledger, self._hints.queue, self._hints.heartbeats, lambda: False,
            models=[key], price_per_hour=self._price,
        )  # fmt: skip
        self._client = client
        server = LaneServer(model, self._lane, world.clock, self._lane_rules, self._serving, traces=world.traces)
        logger.info("model's turn", model=model.name, key=key)
        try:
            with settled_heap(), self._watchdog.watching(), server.running(stop) as beside:
                self._turns.begin()
                tolerant = OutageTolerantClient(client, world.clock, stop)
                source = RotatingShardSource(tolerant, self._turns, lambda: beside.busy)
                ShardWorker(
                    model, source, tolerant, world.clock, self._settings, self._watchdog,
                    beside=beside, traces=world.traces,
                ).run(stop)  # fmt: skip
        finally:
            self._client = None
            client.close()


def _publish(root: Root, model: LoadedModel, policies: Policies) -> ModelPin:
    """Let jobs be submitted for the model; its pin."""
    entry = entry_of(model, policies, root)
    if not ModelRegistry(root.world.store).publish(entry):
        logger.info("another version is served under this name", model=entry.pin.name, digest=entry.pin.digest)
    return entry.pin


def lane_rules(settings: Settings, policies: Policies) -> LaneRules:
    """What the lane's requests may ask for, by the same settings as jobs' rows."""
    return LaneRules(
        default_max_tokens=settings.default_max_tokens,
        caps={tier: settings.max_output_tokens.of(tier) for tier in Tier},
        limits=settings.limits,
        request_timeout=settings.request_timeout,
        policies=policies,
    )
