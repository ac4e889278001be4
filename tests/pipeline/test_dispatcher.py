"""The reconcile loop, in histories where the queue loses, repeats and reorders, and workers die, stall and race."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.adapters.memory_heartbeats import MemoryHeartbeats
from pipeline.dispatcher import Dispatcher, DispatchSettings
from pipeline.events import JobEvent
from pipeline.ledger import JobLedger, LedgerError, part_key
from pipeline.manifest import BrokenInvariant
from pipeline.ports import PipelineError, World
from pipeline.shard_client import ShardClient
from pipeline.submit import submit
from pipeline.worker_api import ShardWork
from schemas.events import JobChanged, ProgressMade, ShardCommitted
from schemas.job import JobStatus, Manifest, Tier
from tests.pipeline.made_jobs import all_rows, answers, order, plan_by_hand, report
from tests.pipeline.simulation import START, ChaoticQueue, MemoryStore, SimulatedClock, simulated_world

LIFETIME = 10.0
WEIGHTS = {
    "tick": 3, "take": 4, "commit": 4, "wait": 2, "stall": 1, "wake": 3,
    "beat": 1, "lose": 1, "repeat": 1, "mix": 1, "die": 1,
}  # fmt: skip
EVENTS = [event for event, weight in WEIGHTS.items() for _ in range(weight)]


@dataclass
class House:
    """One job's pipeline in a simulated world."""

    world: World
    ledger: JobLedger
    queue: ChaoticQueue = field(default_factory=ChaoticQueue)
    settings: DispatchSettings = field(default_factory=DispatchSettings)

    def __post_init__(self) -> None:
        self.heartbeats = MemoryHeartbeats(self.world.clock, LIFETIME)
        self.dispatcher = Dispatcher(self.world, self.queue, self.heartbeats, settings=self.settings)

    def client(self, name: str) -> ShardClient:
        return ShardClient(
            name, self.world, lambda _: self.ledger, self.queue, self.heartbeats, self.dispatcher.finished
        )


@pytest.fixture
def house(tmp_path: Path) -> House:
    world = simulated_world(tmp_path)
    return House(world, JobLedger(world.store))


def finish(house: House, client: ShardClient) -> Manifest:
    """One good worker brings the job to its end."""
    for _ in range(200):
        house.dispatcher.tick()
        if house.dispatcher.finished():
            break
        while (work := client.take(0)) is not None:
            client.commit(work, answers(work), report(work))
        house.world.clock.sleep(1.0)
    manifest = house.ledger.manifest()
    assert manifest is not None, "the job never ended"
    return manifest


@dataclass
class Worker:
    client: ShardClient
    works: list[ShardWork] = field(default_factory=list)
    stalled: bool = False


def act(house: House, workers: list[Worker], chaos: random.Random, deaths: list[Worker]) -> int:
    """One random event; the tokens that a lost race repeated."""
    worker = chaos.choice(workers)
    event = chaos.choice(EVENTS)
    if event == "tick":
        house.dispatcher.tick()
    elif event == "take" and not worker.stalled and len(worker.works) < 3:
        if (work := worker.client.take(0)) is not None:
            worker.works.append(work)
    elif event == "commit" and worker.works and not worker.stalled:
        work = worker.works.pop(chaos.randrange(len(worker.works)))
        if not worker.client.commit(work, answers(work, mark=work.attempt_id), report(work)):
            return 11 * work.table.num_rows
    elif event == "beat" and not worker.stalled:
        worker.client.holding(worker.works)
    elif event == "lose":
        house.queue.lose(chaos.randrange(100))
    elif event == "repeat":
        house.queue.repeat(chaos.randrange(100))
    elif event == "mix":
        house.queue.shuffle(chaos.randrange(100))
    elif event == "wait":
        house.world.clock.sleep(chaos.choice([0.1, 3.0, 40.0]))
        house.dispatcher.tick()
    elif event == "die" and chaos.random() < 0.3:
        deaths.append(Worker(worker.client, list(worker.works)))
        worker.client, worker.works = house.client(f"reborn-{len(deaths)}"), []
    elif event == "stall":
        # Long enough to be given up: its shards go to another, and later it comes back and commits them too.
        worker.stalled = True
        house.world.clock.sleep(LIFETIME + 1)
        house.dispatcher.tick()
    elif event == "wake":
        worker.stalled = False
    return 0


def give_back(workers: list[Worker]) -> int:
    """Whoever lives gives back what it holds; the tokens computed for nothing."""
    tokens = 0
    for worker in workers:
        for work in worker.works:
            worker.client.release(work, report(work))
            tokens += 11 * work.table.num_rows
    return tokens


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shard_sizes=st.lists(st.integers(1, 6), max_size=12),
    rejected=st.integers(0, 4),
    events=st.integers(20, 120),
)
def test_whatever_happens_each_row_has_exactly_one_result(
    tmp_path_factory: pytest.TempPathFactory, seed: int, shard_sizes: list[int], rejected: int, events: int
) -> None:
    chaos = random.Random(seed)
    world = simulated_world(tmp_path_factory.mktemp("scratch"), seed)
    house = House(world, JobLedger(world.store))
    rows = list(range(sum(shard_sizes) + rejected))
    chaos.shuffle(rows)
    refused, left, shards = sorted(rows[:rejected]), rows[rejected:], []
    for size in shard_sizes:
        shards.append(left[:size])
        left = left[size:]
    job = plan_by_hand(house.ledger, world, shards, refused)
    house.dispatcher.add(house.ledger)
    workers, deaths, repeated = [Worker(house.client(f"w{index}")) for index in range(2)], [], 0
    committed: dict[str, bytes] = {}
    for _ in range(events):
        if house.dispatcher.finished():
            break
        repeated += act(house, workers, chaos, deaths)
        progress = house.dispatcher.progress(job.id)
        assert progress is None or progress.counts.total in (0, rejected, len(rows))
        for key, body in committed.items():
            assert world.store.read(key) == body, "a committed part changed"
        committed = {info.key: world.store.read(info.key) for info in world.store.list("results/")}
    if house.dispatcher.finished():
        deaths += workers  # what they still hold can only be bounded
    else:
        repeated += give_back(workers)
    manifest = finish(house, house.client("last"))

    results = all_rows(house.ledger)
    assert sorted(result["row"] for result in results) == sorted(rows)
    assert all(result["custom_id"] in (None, f"id-{result['row']}") for result in results)
    assert manifest.counts.total == len(rows)
    assert manifest.counts.failed == rejected + sum(row % 5 == 4 for row in rows if row not in refused)
    assert manifest.counts.succeeded + manifest.counts.failed == len(rows)
    assert manifest.usage.completion == 7 * (len(rows) - rejected)
    assert manifest.usage.repeated == repeated
    lost = sum(12 * work.table.num_rows for dead in deaths for work in dead.works)
    assert manifest.usage.repeated <= manifest.repeated_at_most <= manifest.usage.repeated + lost
    assert house.dispatcher.outcome(job.id) == manifest


def test_the_backlog_stays_short_and_in_the_planners_order(house: House) -> None:
    plan_by_hand(house.ledger, house.world, [[n] for n in range(10)])
    house.dispatcher.add(house.ledger)
    for _ in range(5):
        house.dispatcher.tick()
    assert [task.shard for task in house.queue.tasks] == [1, 2]
    client = house.client("w")
    taken = client.take(0)
    assert taken is not None
    house.dispatcher.tick()
    assert [task.shard for task in house.queue.tasks] == [2, 3], "a shard that is held makes room for the next"


def test_a_lost_message_is_put_again_after_a_while_and_less_and_less_often(house: House) -> None:
    plan_by_hand(house.ledger, house.world, [[0]])
    house.dispatcher.add(house.ledger)
    put_at = []
    for _ in range(300):
        house.dispatcher.tick()
        if house.queue.tasks:
            put_at.append(house.world.clock.monotonic())
            house.queue.lose(0)
        house.world.clock.sleep(1.0)
    assert put_at == [0.0, 30.0, 90.0, 210.0]


def test_a_dead_workers_shards_are_put_again_at_once(house: House) -> None:
    plan_by_hand(house.ledger, house.world, [[0]])
    house.dispatcher.add(house.ledger)
    house.dispatcher.tick()
    assert house.client("dies").take(0) is not None
    house.dispatcher.tick()
    assert house.queue.tasks == []
    house.world.clock.sleep(LIFETIME + 0.1)
    house.dispatcher.tick()
    assert [task.shard for task in house.queue.tasks] == [1]
    again = house.client("next").take(0)
    assert again is not None
    assert again.attempt == 2


def test_a_worker_that_lives_keeps_its_shards_however_long_they_take(house: House) -> None:
    plan_by_hand(house.ledger, house.world, [[0]])
    house.dispatcher.add(house.ledger)
    house.dispatcher.tick()
    client = house.client("slow")
    work = client.take(0)
    assert work is not None
    for _ in range(100):
        house.world.clock.sleep(3.0)
        client.holding([work])
        house.dispatcher.tick()
    assert house.queue.put_count == 1


def test_a_message_repeated_while_the_shard_is_held_or_done_is_dropped(house: House) -> None:
    plan_by_hand(house.ledger, house.world, [[0]])
    house.dispatcher.add(house.ledger)
    house.dispatcher.tick()
    house.queue.repeat(0)
    house.queue.repeat(0)
    client = house.client("w")
    work = client.take(0)
    assert work is not None
    house.queue.tasks, later = house.queue.tasks[:1], house.queue.tasks[1:]
    assert client.take(0) is None, "held"
    assert client.commit(work, answers(work), report(work)) is True
    house.queue.tasks = later
    assert client.take(0) is None, "done"


def test_urgent_jobs_go_first(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    wanted = {
        "bulk": order(tier=Tier.BULK),
        "late": order(tier=Tier.STANDARD, deadline=START + timedelta(hours=9)),
        "soon": order(tier=Tier.STANDARD, deadline=START + timedelta(hours=1)),
        "none": order(tier=Tier.STANDARD),
    }
    queue = ChaoticQueue()
    dispatcher = Dispatcher(world, queue, MemoryHeartbeats(world.clock, 10), settings=DispatchSettings(backlog=10))
    names = {}
    for name, one in wanted.items():
        ledger = JobLedger(world.store, f"jobs/{name}/")
        job = plan_by_hand(ledger, world, [[0], [1]], tier=one.tier, deadline=one.deadline)
        names[job.id] = name
        dispatcher.add(ledger)
    dispatcher.tick()
    assert [names[task.job] for task in queue.tasks] == [
        name for name in ("soon", "late", "none", "bulk") for _ in range(2)
    ]


def test_nothing_is_dispatched_before_the_plan_and_part_0_stand(house: House) -> None:
    job = plan_by_hand(house.ledger, house.world, [[0]])
    store = house.world.store
    for missing in (part_key(0), "plan/00000.json"):
        kept = store.read(missing)
        store.delete(missing)
        dispatcher = Dispatcher(house.world, house.queue, house.heartbeats)
        dispatcher.add(house.ledger)
        dispatcher.tick()
        progress = dispatcher.progress(job.id)
        assert house.queue.tasks == []
        assert progress is not None
        assert progress.status is JobStatus.VALIDATING
        store.create(missing, kept)
        dispatcher.tick()
        assert len(house.queue.tasks) == 1
        house.queue.tasks.clear()


def test_a_job_of_refused_rows_only_ends_without_a_worker(house: House) -> None:
    job = plan_by_hand(house.ledger, house.world, [], rejected=[0, 1])
    house.dispatcher.add(house.ledger)
    house.dispatcher.tick()
    manifest = house.dispatcher.outcome(job.id)
    assert manifest is not None
    assert (manifest.counts.total, manifest.counts.failed, manifest.engine_seconds) == (2, 2, 0.0)
    assert manifest.tokens_per_second is None


def test_an_empty_job_ends_with_nothing(house: House) -> None:
    plan_by_hand(house.ledger, house.world, [])
    house.dispatcher.add(house.ledger)
    assert finish(house, house.client("w")).counts.total == 0


def test_the_manifest_tells_times_rates_and_cost(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    house = House(world, JobLedger(world.store), settings=DispatchSettings(price_per_hour=3.6))
    plan_by_hand(house.ledger, world, [[0, 1], [2]])
    house.dispatcher.add(house.ledger)
    house.dispatcher.tick()
    client = house.client("w")
    first = client.take(0)
    world.clock.sleep(2.0)
    second = client.take(0)
    assert first is not None
    assert second is not None
    world.clock.sleep(8.0)
    client.commit(first, answers(first), report(first, seconds=5))  # engine 0 to 5
    client.commit(second, answers(second), report(second, seconds=6))  # engine 2 to 8
    world.clock.sleep(100.0)
    manifest = finish(house, client)
    assert manifest.wall_seconds == 10.0
    assert manifest.engine_seconds == 8.0, "shards overlap in the running batch; time is not counted twice"
    assert manifest.tokens_per_second == pytest.approx(21 / 8)
    assert manifest.total_tokens_per_second == pytest.approx((21 + 15) / 8)
    assert manifest.cost == pytest.approx(0.01)
    assert manifest.engine == {"block_size": 16}
    assert manifest.versions["torch"] == "2.13.0"
    assert [file.rows for file in manifest.files] == [0, 2, 1]
    assert manifest.usage.repeated == manifest.repeated_at_most == 0


def test_the_time_between_two_runs_is_not_billed(house: House) -> None:
    plan_by_hand(house.ledger, house.world, [[0], [1]])
    house.dispatcher.add(house.ledger)
    house.dispatcher.tick()
    client = house.client("w")
    work = client.take(0)
    assert work is not None
    house.world.clock.sleep(7.0)
    client.commit(work, answers(work), report(work))
    house.world.clock.sleep(86_400.0)
    submit(order(), house.ledger, house.world)
    assert finish(house, house.client("next day")).wall_seconds == pytest.approx(7.0, abs=2.0)


def test_an_attempt_that_died_without_a_word_is_bounded(house: House) -> None:
    plan_by_hand(house.ledger, house.world, [[0, 1]])
    house.dispatcher.add(house.ledger)
    house.dispatcher.tick()
    assert house.client("dies").take(0) is not None
    house.world.clock.sleep(LIFETIME + 1)
    manifest = finish(house, house.client("w"))
    assert (manifest.usage.repeated, manifest.repeated_at_most) == (0, 24)


def broken_store(house: House) -> MemoryStore:
    store = house.world.store
    assert isinstance(store, MemoryStore)
    return store


def commit_all(house: House) -> None:
    plan_by_hand(house.ledger, house.world, [[0, 1], [2, 3, 4]], rejected=[5])
    house.dispatcher.add(house.ledger)
    house.dispatcher.tick()
    client = house.client("w")
    while (work := client.take(0)) is not None:
        client.commit(work, answers(work), report(work))


def test_given_a_part_of_another_shard_then_the_job_is_not_ended(house: House) -> None:
    commit_all(house)
    objects = broken_store(house).objects
    objects[part_key(1)] = objects[part_key(2)]
    with pytest.raises(LedgerError, match="damaged or renamed"):
        house.dispatcher.tick()
    assert house.ledger.manifest() is None


def test_given_a_part_of_another_job_then_the_job_is_not_ended(house: House, tmp_path: Path) -> None:
    commit_all(house)
    other = House(simulated_world(tmp_path, seed=9), JobLedger(MemoryStore()))
    other.ledger = JobLedger(other.world.store)
    commit_all(other)
    broken_store(house).objects[part_key(1)] = broken_store(other).objects[part_key(1)]
    with pytest.raises(BrokenInvariant, match="belongs to job"):
        house.dispatcher.tick()
    assert house.ledger.manifest() is None


def test_given_a_plan_that_promises_more_rows_then_the_job_is_not_ended(house: House) -> None:
    commit_all(house)
    objects = broken_store(house).objects
    text = objects["plan/00000.json"].decode()
    objects["plan/00000.json"] = (
        text.replace('"rejected": 1', '"rejected": 2').replace('"end_row": 6', '"end_row": 7').encode()
    )
    dispatcher = Dispatcher(house.world, house.queue, house.heartbeats)
    dispatcher.add(house.ledger)
    with pytest.raises(BrokenInvariant, match="holds 1 results for 2 rows"):
        dispatcher.tick()
    assert house.ledger.manifest() is None


def test_given_a_part_that_no_plan_has_then_it_is_refused(house: House) -> None:
    commit_all(house)
    objects = broken_store(house).objects
    objects[part_key(77)] = objects[part_key(1)]
    dispatcher = Dispatcher(house.world, house.queue, house.heartbeats)
    dispatcher.add(house.ledger)
    with pytest.raises(PipelineError, match=r"part-00077.*no such part is planned"):
        dispatcher.tick()


def test_progress_is_cached_now_and_then_and_always_at_the_end(house: House) -> None:
    commit_all(house)
    assert isinstance(house.world.clock, SimulatedClock)
    house.dispatcher.tick()
    cached = house.ledger.progress()
    assert cached is not None
    assert cached.status is JobStatus.COMPLETED
    assert (cached.counts.total, cached.counts.pending, cached.shards_done) == (6, 0, 2)


def test_events_tell_the_story_once_and_in_order(house: House) -> None:
    heard: list[JobEvent] = []

    class Listener:
        def emit(self, event: JobEvent) -> None:
            heard.append(event)

    house.dispatcher = Dispatcher(house.world, house.queue, house.heartbeats, Listener())
    plan_by_hand(house.ledger, house.world, [[0, 1], [2]], rejected=[3])
    house.dispatcher.add(house.ledger)
    finish(house, house.client("w"))
    assert [event.status for event in heard if isinstance(event, JobChanged)] == [
        JobStatus.IN_PROGRESS, JobStatus.COMPLETED,
    ]  # fmt: skip
    shards = [event for event in heard if isinstance(event, ShardCommitted)]
    assert [(event.shard, event.rows) for event in shards] == [(0, 1), (1, 2), (2, 1)]
    progress = [event for event in heard if isinstance(event, ProgressMade)]
    assert [(event.counts.total, event.counts.pending) for event in progress] == [(4, 3), (4, 0)]
    assert len({event.id for event in heard}) == len(heard)
