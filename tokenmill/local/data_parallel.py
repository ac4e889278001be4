"""A run by several replicas: the command dispatches shards, and each replica takes them over its connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import ShardTask, WorkerState, World
from pipeline.worker_client.shard_client import ShardClient
from schemas.models import ModelPin
from schemas.workers.metrics import WorkerMetrics
from tokenmill.local.embedded import SILENCE, EmbeddedWork
from tokenmill.local.model_rotation import compute_in_rotation
from tokenmill.local.run_plan import RunPlan, load_model
from tokenmill.local.tracker import RotationObserver, RunTracker
from tokenmill.processes.logging import log_to_stderr
from tokenmill.processes.replicas import ReplicaConnection, Replicas, ReplicaTask, environments
from tokenmill.processes.signals import stop_on_signals
from workers.model.loaded_model import LoadedModel
from workers.policies.loader import load_policies
from workers.policies.policy import NO_POLICIES


def divide(
    plan: RunPlan, pins: Sequence[ModelPin], given: EmbeddedWork, tracker: RunTracker, stop: threading.Event
) -> None:
    """Compute the job by replicas, each of which takes shards. Raises `UserError` when one of them fails."""
    count = plan.engine.replicas
    names = plan.worker.policies.chosen
    sent = replace(plan, worker=replace(plan.worker, policies=NO_POLICIES))
    tasks = [ReplicaTask(_compute, (sent, pins, names, number)) for number in range(count)]
    methods: dict[str, Callable[..., Any]] = {
        "progress": tracker.update, "finished": given.finished,
        "put": given.queue.put, "take": given.queue.take, "send_heartbeat": given.heartbeats.send_heartbeat,
        "leave": given.heartbeats.leave, "report_metrics": given.heartbeats.report_metrics,
        "metrics": given.heartbeats.metrics,
        "workers": given.heartbeats.workers, "since": given.heartbeats.since,
    }  # fmt: skip
    own = environments(count, plan.engine.num_ranks, on_gpus=plan.engine.on_gpus)
    # All start when all are loaded, or the first would take most of a small job.
    with Replicas(tasks, own, methods, tracker.computing, keep=(given.output.lock.descriptor,)) as replicas:
        replicas.wait(stop)


def _compute(
    line: ReplicaConnection, plan: RunPlan, pins: Sequence[ModelPin], policies: Sequence[str], number: int
) -> None:
    """The task of a replica: it computes shards of the job in the plan's folder."""
    log_to_stderr()
    settings = replace(plan.worker, policies=load_policies(policies))
    with stop_on_signals() as stop, FolderStore(plan.output) as store:
        ledger = JobLedger(store)
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        queue, heartbeats = ParentShardQueue(line), ParentHeartbeats(line)

        def load(pin: ModelPin, turn: int) -> LoadedModel:
            model = load_model(plan, pin, list(ledger.segments()))
            if turn == 0:
                line.call("ready")
                stop.begin()
            return model

        def client(pins: Sequence[ModelPin]) -> ShardClient:
            return ShardClient(
                f"local-{number}", world, lambda _: ledger, queue, heartbeats,
                lambda: bool(line.call("finished")), models=[pin.key for pin in pins],
                price_per_hour=plan.price_of_worker,
            )  # fmt: skip

        def observe(turn: int) -> RotationObserver:
            return RotationObserver(partial(line.call, "progress"), number + turn * plan.engine.replicas)

        compute_in_rotation(pins, load, client, observe, queue, world.clock, settings, stop)


class ParentShardQueue:
    """The command's `ShardQueue`, called from a replica."""

    def __init__(self, line: ReplicaConnection) -> None:
        self._line = line

    def put(self, queue: str, task: ShardTask) -> None:
        """See `ShardQueue.put`."""
        self._line.call("put", queue, task)

    def take(self, queues: Sequence[str], timeout: float) -> ShardTask | None:
        """See `ShardQueue.take`. The connection stays free while the queue is empty."""
        until = time.monotonic() + timeout
        while True:
            task: ShardTask | None = self._line.call("take", queues, 0.0)
            left = until - time.monotonic()
            if task is not None or left <= 0:
                return task
            time.sleep(min(left, 0.01))


class ParentHeartbeats:
    """The command's `Heartbeats`, called from a replica."""

    def __init__(self, line: ReplicaConnection) -> None:
        self._line = line

    lifetime = SILENCE

    def send_heartbeat(self, state: WorkerState) -> None:
        """See `Heartbeats.send_heartbeat`."""
        self._line.call("send_heartbeat", state)

    def leave(self, worker: str) -> None:
        """See `Heartbeats.leave`."""
        self._line.call("leave", worker)

    def report_metrics(self, worker: str, metrics: WorkerMetrics) -> None:
        """See `Heartbeats.report_metrics`."""
        self._line.call("report_metrics", worker, metrics)

    def metrics(self) -> dict[str, WorkerMetrics]:
        """See `Heartbeats.metrics`."""
        found: dict[str, WorkerMetrics] = self._line.call("metrics")
        return found

    def workers(self) -> list[WorkerState]:
        """See `Heartbeats.workers`."""
        found: list[WorkerState] = self._line.call("workers")
        return found

    def since(self) -> float:
        """See `Heartbeats.since`."""
        found: float = self._line.call("since")
        return found
