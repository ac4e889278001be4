"""One job's whole pipeline in a simulated world, and a good worker that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.dispatcher.dispatch_counts import DispatchMetrics
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import World
from pipeline.worker_client.ports import ShardWork
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.outcome import Manifest
from tests.pipeline.made_jobs import MODELS, computed, plan_by_hand, report
from tests.pipeline.simulation import ChaoticQueue, MemoryStore

LIFETIME = 10.0
"""Seconds of silence after which a worker counts as dead."""


@dataclass
class PipelineHarness:
    """One job's pipeline in a simulated world."""

    world: World
    ledger: JobLedger
    queue: ChaoticQueue = field(default_factory=ChaoticQueue)
    settings: DispatchSettings = field(default_factory=DispatchSettings)
    metrics: DispatchMetrics = field(default_factory=DispatchMetrics)

    def __post_init__(self) -> None:
        self.heartbeats = MemoryHeartbeats(self.world.clock, LIFETIME)
        self.dispatcher = Dispatcher(
            self.world, self.queue, self.heartbeats, settings=self.settings, metrics=self.metrics
        )

    def client(self, name: str, *, isolated: bool = False) -> ShardClient:
        """A worker's client; an isolated one reads no other worker's heartbeats, as when Redis was emptied."""
        heartbeats = MemoryHeartbeats(self.world.clock, LIFETIME) if isolated else self.heartbeats
        return ShardClient(
            name,
            self.world,
            lambda _: self.ledger,
            self.queue,
            heartbeats,
            self.dispatcher.finished,
            models=MODELS,
        )


def finish(harness: PipelineHarness, client: ShardClient) -> Manifest:
    """One good worker ends the job, at the latest when lost messages are put again (`max_retry_timeout_seconds`)."""
    for _ in range(200):
        harness.dispatcher.tick()
        if harness.dispatcher.finished():
            break
        while (work := client.take(0)) is not None:
            client.begin(work)
            client.commit(work, computed(work), report(work))
        harness.world.clock.sleep(1.0)
    manifest = harness.ledger.manifest()
    assert manifest is not None, "the job never ended"
    return manifest


def taken(harness: PipelineHarness, shards: Sequence[Sequence[int]], worker: str) -> tuple[ShardClient, ShardWork]:
    """Plan a job of these shards; returns a worker that holds the first of them, and its work."""
    plan_by_hand(harness.ledger, harness.world, shards)
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    client = harness.client(worker)
    work = client.take(0)
    assert work is not None
    return client, work


def broken_store(harness: PipelineHarness) -> MemoryStore:
    store = harness.world.store
    assert isinstance(store, MemoryStore)
    return store


def commit_all(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [[0, 1], [2, 3, 4]], rejected=[5])
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    client = harness.client("w")
    while (work := client.take(0)) is not None:
        client.begin(work)
        client.commit(work, computed(work), report(work))
