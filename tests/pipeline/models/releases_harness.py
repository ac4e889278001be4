"""A root in memory with two versions of a model, jobs that the stable one has answered, and a candidate's worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.ledger.active_index import mark
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.ledger.records import ShardReport
from pipeline.models.registry import ModelRegistry
from pipeline.models.rollout_controller import RolloutController
from pipeline.models.shadow_client import ShadowClient
from pipeline.ports import ShardTask, World, queue_name
from pipeline.results.rejected_part import commit_rejects
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.job import Tier
from schemas.models import CatalogEntry, ModelPin
from schemas.releases import Release
from schemas.settings.releases import ReleaseRules
from tests.pipeline.made_jobs import MODEL, PIN, computed, plan_by_hand, report
from tests.pipeline.simulation import simulated_world

OLD = CatalogEntry(pin=PIN.model_copy(update={"digest": "sha256:" + "0" * 64}), max_model_len=512)
NEW = CatalogEntry(pin=PIN.model_copy(update={"digest": "sha256:" + "1" * 64}), max_model_len=512)
RULES = ReleaseRules(share=1.0, least_shards=4, most_shards=16, more_errors=0.5)


class ReleasesHarness:
    """One root; `world`: in which it lies, instead of a simulated one."""

    def __init__(self, scratch: Path, world: World | None = None) -> None:
        self.world: World = world or simulated_world(scratch)
        self.registry = ModelRegistry(self.world.store)
        self.controller = RolloutController(self.world)
        self.registry.publish(OLD)
        self.registry.publish(NEW, candidate=True)

    def begin(self, rules: ReleaseRules = RULES, **how: object) -> Release:
        return self.registry.begin(MODEL, NEW, rules, self.world.clock.now(), **how)  # type: ignore[arg-type]

    def job(self, name: str, shards: int, pin: ModelPin = OLD.pin) -> JobLedger:
        """A job of shards with four rows each, all answered by a worker with the pinned model."""
        ledger = JobLedger(self.world.store, f"{JOBS}{name}/")
        mark(ledger)
        plan_by_hand(ledger, self.world, [list(range(4 * n, 4 * n + 4)) for n in range(shards)], models=(pin,))
        segment = ledger.segment(0)
        assert segment is not None
        commit_rejects(ledger, segment, self.world)
        client, queue = self.worker([pin])
        for number in range(1, shards + 1):
            queue.put(queue_name(pin.key, Tier.STANDARD), ShardTask(name, number))
            work = client.take(0)
            assert work is not None
            client.begin(work)
            client.commit(work, computed(work), report(work))
        return ledger

    def worker(self, pins: list[ModelPin]) -> tuple[ShardClient, MemoryQueue]:
        queue = MemoryQueue()
        client = ShardClient(
            "stable", self.world, lambda job: JobLedger(self.world.store, f"{JOBS}{job}/"), queue,
            MemoryHeartbeats(self.world.clock, 10.0), lambda: False, models=[pin.key for pin in pins],
        )  # fmt: skip
        return client, queue

    def shadow(self, release: Release, mark: str = "", most: int = 100) -> int:
        """A candidate's worker computes what there is to copy; how many shards it took. `mark`: what it adds to each
        answer."""
        client = ShadowClient("candidate", self.world, release)
        for count in range(most):
            work = client.take(0)
            if work is None:
                return count
            assert work.job.model_named(MODEL) == NEW.pin
            client.begin(work)
            done = computed(work)
            rows = [row if row.text is None else replace(row, text=mark + row.text) for row in done.rows]
            assert client.commit(work, FinishedRows(rows, done.usages), ShardReport())
            self.world.clock.sleep(0.01)
        return most
