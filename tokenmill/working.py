"""A worker as a part of an installation: which models it serves, and what may end it."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from engine.config import EngineConfig
from pipeline.catalog import Catalog
from pipeline.metrics.sources import own_work
from pipeline.shard_client import ShardClient
from schemas.figures import WorkerFigures
from schemas.job import CatalogEntry, ModelPin, Tier
from schemas.settings import Settings
from tokenmill.hints import Hints, hints_on_servers
from tokenmill.job_options import ChosenModel
from tokenmill.logs import log_to_stderr
from tokenmill.metrics import metrics_served
from tokenmill.output import say
from tokenmill.processes import run_together, settled_heap, unique_name
from tokenmill.root import Root, open_root
from tokenmill.spot_notice import watch_for_notice
from tokenmill.stopping import until_told
from tokenmill.switching import SourceInTurn, Turns
from workers.content_policies import NO_POLICIES, Policies
from workers.lane_requests import LaneRules
from workers.lane_server import LaneServer, LaneServing
from workers.model_host import LoadedModel
from workers.settings import WorkerSettings
from workers.shard_worker import ShardWorker
from workers.watchdog import Watchdog

LoadModel = Callable[[], LoadedModel]

logger = structlog.get_logger(__name__)


def load_any(chosen: ChosenModel, config: EngineConfig, chat_template: str | None) -> LoadedModel:
    """A model for any job that may come."""
    path = Path(chosen.source.path)
    return LoadedModel.load(
        path, name=chosen.name, config=config, revision=chosen.source.revision, chat_template=chat_template
    )


def run_worker(
    root_url: str | None,
    settings: Settings,
    models: Sequence[LoadModel],
    switch_after: float,
    policies: Policies = NO_POLICIES,
    metrics_port: int | None = None,
) -> None:
    """A worker process with the models that these load, one at a time, until told to stop.

    Raises `UserError` where settings lack something, and what loading and the work raise.
    """
    log_to_stderr(logging.INFO)
    with until_told() as stop, open_root(root_url, settings) as root, hints_on_servers(settings) as hints:
        worker = Worker(root, hints, models, settings, switch_after, policies)
        say(f"working for {root.url} with {', '.join(worker.models)}")
        with metrics_served(settings, metrics_port, own_work(worker.figures)):
            run_together(stop, worker, {"spot notice": watch_for_notice} if settings.spot_notice else {})


class Worker:
    """A `Part`: announces its models, and works on their shards, one model at a time, with the lane's requests beside
    them. What is unfinished at the end is given back with its tokens.

    All models are loaded here once, so that one that can't be is known at once.

    Args:
        switch_after: seconds after which a model with work makes room for another that is asked for.
        policies: judge prompts and answers.

    Attributes:
        models: their names, in the order of their turns.
    """

    def __init__(
        self,
        root: Root,
        hints: Hints,
        models: Sequence[LoadModel],
        settings: Settings,
        switch_after: float,
        policies: Policies = NO_POLICIES,
    ) -> None:
        self._root = root
        self._hints = hints
        pins = [_publish(root, load(), policies) for load in models[1:]]
        self._first: LoadedModel | None = models[0]()
        pins.insert(0, _publish(root, self._first, policies))
        self.models = [pin.name for pin in pins]
        self._loads = {pin.key: load for pin, load in zip(pins, models, strict=True)}
        self._name = unique_name(root.world.random)
        self._client: ShardClient | None = None
        self._lane = hints.lane.worker(self._name)
        self._turns = Turns(list(self._loads), hints.queue, self._lane, root.world.clock, switch_after)
        self._lane_rules = lane_rules(settings, policies)
        self._serving = LaneServing(most=settings.lane.most_requests, grace=settings.lane.drain_seconds)
        self._watchdog = Watchdog(settings.stuck_seconds)
        self._settings = WorkerSettings(
            request_timeout=settings.request_timeout,
            checkpoint_seconds=settings.checkpoint_seconds,
            look_seconds=hints.look_seconds,
            policies=policies,
        )

    def figures(self) -> WorkerFigures | None:
        """What the worker counted since it began to serve the model that it has loaded; None: nothing yet."""
        client = self._client
        return None if client is None else client.figures

    def __call__(self, stop: threading.Event) -> None:
        """Work until `stop` is set."""
        try:
            while not stop.is_set():
                model, self._first = self._first or self._loads[self._turns.loaded](), None
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
            self._name, world, self._root.ledger, self._hints.queue, self._hints.heartbeats, lambda: False, models=[key]
        )
        self._client = client
        server = LaneServer(model, self._lane, world.clock, self._lane_rules, self._serving)
        logger.info("model's turn", model=model.name, key=key)
        try:
            with settled_heap(), self._watchdog.watching(), server.running(stop) as beside:
                self._turns.begin()
                source = SourceInTurn(client, self._turns, lambda: beside.busy)
                ShardWorker(model, source, client, world.clock, self._settings, self._watchdog, beside=beside).run(stop)
        finally:
            self._client = None
            client.close()


def _publish(root: Root, model: LoadedModel, policies: Policies) -> ModelPin:
    """Let jobs be submitted for the model; its pin."""
    pin, longest = model.pin(), model.limits.max_model_len
    entry = CatalogEntry(
        pin=pin, max_model_len=longest, policies=policies.fingerprint, published_at=root.world.clock.now()
    )
    Catalog(root.world.store).publish(entry)
    return pin


def lane_rules(settings: Settings, policies: Policies) -> LaneRules:
    """What the lane's requests may ask for, by the same settings as jobs' rows."""
    return LaneRules(
        default_max_tokens=settings.default_max_tokens,
        caps={tier: settings.max_output_tokens.of(tier) for tier in Tier},
        limits=settings.limits,
        request_timeout=settings.request_timeout,
        policies=policies,
    )
