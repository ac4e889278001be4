"""A worker with a new version of a model: while a release is open it computes shadow copies and its own requests on the
lane; after its promotion it serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from pipeline.models.canaries import Canaries
from pipeline.models.registry import ModelRegistry, ReleaseState
from pipeline.models.shadow_client import ShadowClient
from pipeline.ports import StoreUnavailable
from schemas.releases import Release
from schemas.settings.settings import Settings
from schemas.workers.metrics import WorkerMetrics
from tokenmill.processes.logging import LogFormat
from tokenmill.processes.runtime import frozen_heap, unique_name
from tokenmill.root import Root
from tokenmill.services.backends import Backends
from tokenmill.services.readiness import LoadModel, Readiness
from tokenmill.services.worker import WorkerService, lane_rules
from tokenmill.services.worker_process import entry_of, run_worker_process, worker_settings
from workers.lane.routes import CatalogModels
from workers.lane.server import LaneServer, LaneServing
from workers.model.warmup import drift_from
from workers.observability.watchdog import Watchdog
from workers.policies.policy import Policies
from workers.shards.store_outage import OutageTolerantClient
from workers.shards.worker import ShardWorker
from workers.side_work import NoSideWork, SideWork

IDLE_SECONDS: Final = 1.0
"""Interval of polling for a release."""

logger = structlog.get_logger(__name__)


def run_candidate(
    root_url: str | None,
    settings: Settings,
    load: LoadModel,
    switch_after: float,
    policies: Policies,
    metrics_port: int | None = None,
    log_format: LogFormat | None = None,
    price_per_hour: float | None = None,
) -> None:
    """Run a process with a candidate until a stop signal. Raises as `run_worker` does."""

    def make(root: Root, backends: Backends) -> CandidateWorker:
        return CandidateWorker(root, backends, load, settings, switch_after, policies, price_per_hour)

    run_worker_process(root_url, settings, make, metrics_port, log_format)


class CandidateWorker:
    """A `Part`. Before a release, and after a rollback, it waits for the next release or the stop signal.

    Attributes:
        version: name and digest of its model.
        readiness: has the durations of loading and warm-up.
        greeting: the process's message after its start.
    """

    def __init__(
        self,
        root: Root,
        backends: Backends,
        load: LoadModel,
        settings: Settings,
        switch_after: float,
        policies: Policies,
        price_per_hour: float | None = None,
    ) -> None:
        self._root = root
        self._backends = backends
        self._lane_limits = settings.lane.limits
        self._lane_rules = lane_rules(settings, policies)
        # What it holds at the end of a release is handed back at once: others answer it, and it serves without a gap.
        self._lane_serving = LaneServing(most=settings.lane.max_requests, grace_seconds=0.0)
        self._name = unique_name(root.world.random)
        self._registry = ModelRegistry(root.world.store)
        self._watchdog = Watchdog(settings.stuck_seconds)
        own = worker_settings(settings, backends, policies)
        self._settings = replace(own, checkpoint_seconds=float("inf"))  # a lost copy is no loss
        self.readiness = Readiness(root.world, settings.warmup, self._name)
        self._model = model = self.readiness.load(load)
        self._pin = model.pin()
        self._registry.publish(entry_of(model, policies, root), candidate=True)
        self.version = f"{self._pin.name}@{self._pin.digest}"
        self.greeting = f"ready to be released in {root.url}: {self.version}"
        self._promote = partial(
            WorkerService, root, backends, [lambda: model], settings, switch_after, policies, price_per_hour
        )
        self._serving: WorkerService | None = None
        self._client: ShadowClient | None = None

    def metrics(self) -> WorkerMetrics | None:
        """The worker's metrics of its current activity; None: none yet."""
        if self._serving is not None:
            return self._serving.metrics()
        return None if self._client is None else self._client.metrics

    def __call__(self, stop: threading.Event) -> None:
        """Work until `stop` is set. The model stays loaded while the store is unavailable."""
        state: str
        logged: str | None = None
        while not stop.is_set():
            try:
                last = self._registry.last(self._pin.name)
                if self._is_served(last):
                    serving = self._promote()
                    break
                if last is not None and self._is_tried(last):
                    self._shadow(last.release, stop)
                    continue
                state = "waiting" if last is None or last.outcome is None else last.outcome.verdict
                if state != logged:
                    logger.info("no release to work for", model=self.version, last=state)
            except StoreUnavailable as error:
                state = "store outage"
                if state != logged:
                    logger.error("the store can't be used: the candidate keeps its model, and waits", why=str(error))
            logged = state
            stop.wait(IDLE_SECONDS)
        else:
            return
        logger.info("promoted, and serving", model=self.version)
        self._serving = serving
        serving(stop)

    def _is_served(self, last: ReleaseState | None) -> bool:
        return last is not None and last.served.pin.key == self._pin.key

    def _is_tried(self, last: ReleaseState) -> bool:
        return last.outcome is None and last.release.candidate.pin.key == self._pin.key

    def _shadow(self, release: Release, stop: threading.Event) -> None:
        """Compute copies until the release has ended, or until `stop`."""
        logger.info("working on copies", model=self.version, release=release.number, share=release.rules.share)
        self._record_drift(release)
        self._client = client = ShadowClient(self._name, self._root.world, release)
        clock = self._root.world.clock
        tolerant = OutageTolerantClient(client, clock, stop)
        try:
            with frozen_heap(), self._watchdog.watching(), self._serving_lane(release, stop) as side_work:
                ShardWorker(
                    self._model, tolerant, tolerant, clock, self._settings, self._watchdog, beside=side_work,
                    traces=self._root.world.traces,
                ).run(stop)  # fmt: skip
        finally:
            self._client = None

    @contextmanager
    def _serving_lane(self, release: Release, stop: threading.Event) -> Iterator[SideWork]:
        """Serve the lane's requests for this version, if the release has some."""
        world, rules = self._root.world, release.rules
        if not rules.mirror and not rules.canary:
            yield NoSideWork(world.clock)
            return
        lane = self._backends.lane.worker(unique_name(world.random))
        server = LaneServer(
            self._model, lane, world.clock, self._lane_rules, self._lane_serving, self._lane_limits, world.traces,
            find_model=CatalogModels(world.store, world.clock),
        )  # fmt: skip
        try:
            with server.running(stop) as side_work:
                yield side_work
        finally:
            lane.close()

    def _record_drift(self, release: Release) -> None:
        """Record its drift from the stable version's log-probabilities, unless another worker already has."""
        record = Canaries(self._root.world.store).find(release.stable.pin)
        if record is None or self._model.weightless or self._registry.drift(release) is not None:
            return
        drift = drift_from(self._model, record.answers)
        if drift is not None:
            self._registry.record_drift(release, drift)
