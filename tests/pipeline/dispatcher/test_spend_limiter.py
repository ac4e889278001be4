"""Spending limits: no shard begins that would exceed one, and computed results stay."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.dispatcher.spend_limiter import SpendSettings
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.maintenance.retention import RetentionSweep
from pipeline.ports import World
from pipeline.worker_client.ports import CheckpointWork, ShardWork
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.outcome import JobStatus, Manifest
from schemas.requests.limits import SpendLimits
from tests.pipeline.made_jobs import MODELS, all_rows, computed, plan_by_hand, report
from tests.pipeline.simulated_harness import LIFETIME, PipelineHarness
from tests.pipeline.simulation import ChaoticQueue, SimulatedClock, simulated_world

SHARDS = [[row] for row in range(10)]
HOURLY = 3_600.0
"""So a second costs 1."""


@pytest.fixture
def harness(tmp_path: Path) -> PipelineHarness:
    return limited(simulated_world(tmp_path))


def limited(world: World) -> PipelineHarness:
    return PipelineHarness(world, JobLedger(world.store), settings=DispatchSettings(price_per_hour=HOURLY))


def spend(
    harness: PipelineHarness, seconds: float, client: ShardClient | None = None, turns: int = 200
) -> Manifest | None:
    """A worker that takes so many seconds for each shard."""
    client = client or harness.client("w")
    for _ in range(turns):
        harness.dispatcher.tick()
        if harness.dispatcher.finished():
            break
        if (work := client.take(0)) is not None:
            client.begin(work)
            client.commit(work, computed(work), report(work, seconds))
        harness.world.clock.sleep(1.0)
    return harness.ledger.manifest()


def codes(harness: PipelineHarness) -> Counter[str | None]:
    return Counter(row["error_code"] for row in all_rows(harness.ledger) if row["row"] % 5 != 4)


def test_given_a_limit_when_the_next_shard_would_pass_it_then_the_job_ends_and_keeps_what_it_has(
    harness: PipelineHarness,
) -> None:
    plan_by_hand(harness.ledger, harness.world, SHARDS, max_cost=7.0)
    harness.dispatcher.add(harness.ledger)
    manifest = spend(harness, 2.0)
    assert manifest is not None
    assert manifest.status is harness.ledger.status() is JobStatus.CANCELLED
    assert (manifest.cost, manifest.counts.cancelled) == (6.0, 7), "a fourth shard would have made 8"
    assert manifest.counts.pending == 0
    assert codes(harness) == {None: 3, "spend_limit": 5}
    reason = next(row["error_message"] for row in all_rows(harness.ledger) if row["error_code"] == "spend_limit")
    assert "what the job may cost is 7: 6 is spent, and the next shard should cost 2" in reason


def test_given_a_limit_that_is_enough_then_the_job_is_whole(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, SHARDS, max_cost=20.0)
    harness.dispatcher.add(harness.ledger)
    manifest = spend(harness, 2.0)
    assert manifest is not None
    assert (manifest.status, manifest.cost) == (JobStatus.COMPLETED, 20.0)


def test_given_a_dispatcher_that_takes_over_then_it_counts_earlier_spending_and_dead_attempts(
    harness: PipelineHarness,
) -> None:
    plan_by_hand(harness.ledger, harness.world, SHARDS, max_cost=7.0)
    harness.dispatcher.add(harness.ledger)
    client = harness.client("w")
    spend(harness, 2.0, client, turns=2)
    harness.dispatcher.tick()
    dies = harness.client("dies")
    work = dies.take(0)
    assert work is not None
    dies.begin(work)
    dies.checkpoint(work, CheckpointWork(FinishedRows([], []), [], generated=1, exposed=1, busy_seconds=2.5))
    harness.world.clock.sleep(LIFETIME + 1)
    harness.queue.tasks.clear()
    after = limited(harness.world)
    after.dispatcher.add(after.ledger)
    manifest = spend(after, 2.0)
    assert manifest is not None
    assert manifest.status is JobStatus.CANCELLED
    assert manifest.cost == pytest.approx(6.5), "two shards before, and one that was lost at 2.5: no other fits"


def test_given_workers_with_prices_of_their_own_then_each_second_costs_its_workers_price(
    harness: PipelineHarness,
) -> None:
    plan_by_hand(harness.ledger, harness.world, [[0], [1]])
    harness.dispatcher.add(harness.ledger)
    harness.dispatcher.tick()
    for name, price, seconds in (("spot", 360.0, 10.0), ("on demand", 720.0, 5.0)):
        client = priced(harness, name, price)
        work = client.take(0)
        assert work is not None
        client.begin(work)
        client.commit(work, computed(work), report(work, seconds))
    manifest = spend(harness, 0.0)
    assert manifest is not None
    assert manifest.cost == pytest.approx(10 * 0.1 + 5 * 0.2)
    assert manifest.price_per_hour == pytest.approx(480.0), "of a busy hour, on the mean"
    (spending,) = manifest.spending
    assert spending.cost == manifest.cost
    assert spending.cost_per_million_tokens == pytest.approx(2.0 / (spending.prompt + spending.completion) * 1e6)


def test_given_a_limit_and_workers_of_unknown_price_then_the_job_ends_with_that_reason(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    harness = PipelineHarness(world, JobLedger(world.store))
    plan_by_hand(harness.ledger, harness.world, SHARDS, max_cost=7.0)
    harness.dispatcher.add(harness.ledger)
    client = harness.client("w")
    client.send_heartbeat([])
    manifest = spend(harness, 2.0, client)
    assert manifest is not None
    assert (manifest.counts.cancelled, manifest.cost) == (10, None)
    assert "its workers have no price per hour" in all_rows(harness.ledger)[0]["error_message"]


def test_given_a_shard_under_way_that_has_cost_the_limit_then_the_job_ends_without_waiting_for_it(
    harness: PipelineHarness,
) -> None:
    """While no speed is known one shard goes ahead, however small the limit: its checkpoints say what it costs."""
    plan_by_hand(harness.ledger, harness.world, SHARDS, max_cost=0.001)
    harness.dispatcher.add(harness.ledger)
    client = harness.client("w")
    harness.dispatcher.tick()
    work = client.take(0)
    assert work is not None
    client.begin(work)
    client.checkpoint(work, CheckpointWork(FinishedRows([], []), [], generated=1, exposed=1, busy_seconds=2.5))
    for _ in range(5):  # two heartbeats, and two looks of the dispatcher
        client.send_heartbeat([work])
        closing = client.find_revoked([work]).to_release
        harness.world.clock.sleep(1.0)
        harness.dispatcher.tick()
        if closing:
            break
    assert closing == {(work.job.id, work.shard)}, "the worker is to release it"
    client.release(work, generated=1, busy_seconds=3.0)
    manifest = spend(harness, 100.0, client)
    assert manifest is not None
    assert (manifest.status, manifest.ended_by) == (JobStatus.CANCELLED, "spend")
    assert manifest.cost == pytest.approx(3.0), "and no other shard was begun"
    reason = next(row["error_message"] for row in all_rows(harness.ledger) if row["error_code"] == "spend_limit")
    assert "what the job may cost is 0.001: 2.5 is spent" in reason


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_shard_is_begun_once_the_limit_is_passed_under_random_events(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """So a job costs no more than its limit and what was under way when that was passed. What shards cost has nothing
    to do with what they should, dispatchers come and go, and queues lose and repeat."""
    chaos = random.Random(seed)
    harness = limited(simulated_world(tmp_path_factory.mktemp("w"), seed=seed))
    limit = chaos.uniform(1, 30)
    plan_by_hand(harness.ledger, harness.world, SHARDS, max_cost=limit)
    harness.dispatcher.add(harness.ledger)
    names, works = ["w0", "w1", "w2"], list[tuple[ShardClient, ShardWork]]()
    prices = {name: chaos.choice([HOURLY, HOURLY * 3]) for name in names}
    clients = [priced(harness, name, prices[name]) for name in names]
    money, under_way = 0.0, None
    for turn in range(400):
        harness.dispatcher.tick()
        if harness.dispatcher.finished():
            break
        client = chaos.choice(clients)
        if chaos.random() < 0.5 and (work := client.take(0)) is not None:
            client.begin(work)
            works.append((client, work))
            assert under_way is None or work.shard in under_way, "begun though the limit was passed"
        elif works and chaos.random() < 0.7:
            client, work = works.pop(chaos.randrange(len(works)))
            seconds = chaos.uniform(0.1, 5)
            client.commit(work, computed(work), report(work, seconds))
            money += seconds * prices[client.worker[:2]] / HOURLY
        elif turn < 200 and chaos.random() < 0.1:  # all die, and another dispatcher takes over
            harness = PipelineHarness(harness.world, harness.ledger, harness.queue, harness.settings)
            harness.dispatcher.add(harness.ledger)
            clients = [priced(harness, f"{name} of {turn}", prices[name]) for name in names]
            works.clear()
        elif turn < 200:
            chaos.choice([harness.queue.lose, harness.queue.repeat, harness.queue.shuffle])(chaos.randrange(9))
        for client in clients:
            client.send_heartbeat([work for whose, work in works if whose is client])
        if under_way is None and money > limit:
            under_way = {work.shard for _, work in works} | {task.shard for task in harness.queue.tasks}
        harness.world.clock.sleep(chaos.choice([0.5, 3.0]))
    manifest = harness.ledger.manifest()
    assert manifest is not None
    assert manifest.counts.pending == 0
    assert manifest.cost == pytest.approx(money)


def priced(harness: PipelineHarness, name: str, price: float) -> ShardClient:
    return ShardClient(
        name, harness.world, lambda _: harness.ledger, harness.queue, harness.heartbeats, harness.dispatcher.finished,
        models=MODELS, price_per_hour=price,
    )  # fmt: skip


class Root:
    """Many jobs of tenants in one root, and a worker."""

    def __init__(self, world: World, spending: SpendSettings) -> None:
        self.world = world
        self.spending = spending
        self.queue = ChaoticQueue()
        self.start()

    def start(self) -> None:
        """A dispatcher that knows nothing yet."""
        self.beats = MemoryHeartbeats(self.world.clock, LIFETIME)
        made = DispatchSettings(price_per_hour=HOURLY, spending=self.spending, isolate=True)
        self.dispatcher = Dispatcher(self.world, self.queue, self.beats, settings=made)
        self.client = ShardClient(
            "w", self.world, self.ledger, self.queue, self.beats, lambda: False, models=MODELS
        )  # fmt: skip

    def ledger(self, name: str) -> JobLedger:
        return JobLedger(self.world.store, f"{JOBS}{name}/")

    def add(self, name: str, shards: Sequence[Sequence[int]], tenant: str) -> None:
        plan_by_hand(self.ledger(name), self.world, shards, tenant=tenant)
        self.dispatcher.add(self.ledger(name))

    def work(self, seconds: float, turns: int = 60) -> None:
        for _ in range(turns):
            self.dispatcher.tick()
            if (work := self.client.take(0)) is not None:
                self.client.begin(work)
                self.client.commit(work, computed(work), report(work, seconds))
            self.world.clock.sleep(1.0)

    def cost(self, name: str) -> float | None:
        manifest = self.ledger(name).manifest()
        return None if manifest is None else manifest.cost


def test_given_a_tenants_limit_then_all_its_jobs_count_and_others_go_on(tmp_path: Path) -> None:
    spending = SpendSettings(SpendLimits(per_day=100.0), {"zoe": SpendLimits(per_day=5.0)})
    root = Root(simulated_world(tmp_path), spending)
    root.add("a", [[0], [1]], "zoe")
    root.work(1.0)
    root.start()  # what a cost is known from the ledger only
    root.add("b", [[0], [1], [2], [3], [4], [5]], "zoe")
    root.add("c", [[0], [1], [2], [3], [4], [5]], "amy")
    root.work(1.0)
    assert [root.cost(name) for name in "abc"] == [2.0, 3.0, 6.0]
    manifest = root.ledger("b").manifest()
    assert manifest is not None
    assert (manifest.status, manifest.counts.cancelled) == (JobStatus.CANCELLED, 3)


def test_given_a_limit_a_day_that_is_reached_when_jobs_may_wait_then_they_go_on_the_next_day(tmp_path: Path) -> None:
    root = Root(simulated_world(tmp_path), SpendSettings(SpendLimits(per_day=3.0), wait=True))
    root.add("a", [[0], [1], [2], [3]], "zoe")
    root.work(1.0)
    assert root.cost("a") is None
    assert len(list(root.ledger("a").parts())) == 1 + 3
    assert isinstance(root.world.clock, SimulatedClock)
    root.world.clock.sleep(86_400.0)
    root.work(1.0)
    assert root.cost("a") == 4.0


def test_given_a_limit_a_month_then_yesterdays_jobs_count_too(tmp_path: Path) -> None:
    root = Root(simulated_world(tmp_path), SpendSettings(SpendLimits(per_month=3.0)))
    root.add("a", [[0], [1]], "zoe")
    root.work(1.0)
    root.world.clock.sleep(86_400.0)
    root.add("b", [[0], [1]], "zoe")
    root.work(1.0)
    assert [root.cost(name) for name in "ab"] == [2.0, 1.0]
    for days, name in ((35, "c"), (35, "d")):
        root.world.clock.sleep(days * 86_400.0)
        root.add(name, [[0], [1]], "zoe")
        root.work(1.0)
        assert root.cost(name) == 2.0
    assert spent_markers(root.world) == {"a", "b", "c", "d"}
    RetentionSweep(root.world).run()
    assert spent_markers(root.world) == {"c", "d"}, "of this month and the last one"


def spent_markers(world: World) -> set[str]:
    return {info.key.split("_")[1] for info in world.store.list("tenants/") if "/spent/" in info.key}
