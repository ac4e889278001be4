"""A worker's side of the pipeline: what it may take, what commits, and who wins when two did the same shard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.adapters.folder import FolderStore
from pipeline.adapters.memory_heartbeats import MemoryHeartbeats
from pipeline.adapters.memory_queue import MemoryQueue
from pipeline.adapters.system import SystemClock, SystemRandomness
from pipeline.availability import ServiceUnavailable
from pipeline.ledger import CLOSING, JobLedger, part_key
from pipeline.ports import ShardTask, WorkerState, World
from pipeline.results import RowsMismatch, read_part
from pipeline.shard_client import ShardClient
from pipeline.worker_api import ShardReport, ShardWork, WorkerLoad
from schemas.checkpoints import FinishedRows
from schemas.job import Closing
from tests.pipeline.made_jobs import MODELS, QUEUE, all_rows, computed, held, plan_by_hand, report
from tests.pipeline.simulation import simulated_world


@dataclass
class Bench:
    """Two workers and a planned job of two shards."""

    world: World
    ledger: JobLedger
    queue: MemoryQueue
    beats: MemoryHeartbeats
    job: str

    def client(self, name: str, *, deaf: bool = False) -> ShardClient:
        """A worker's; a deaf one hears of nobody else, as when Redis was emptied."""
        beats = MemoryHeartbeats(self.world.clock, 10.0) if deaf else self.beats
        return ShardClient(name, self.world, lambda _: self.ledger, self.queue, beats, lambda: False, models=MODELS)

    def take(self, client: ShardClient, shard: int = 1) -> ShardWork | None:
        self.queue.put(QUEUE, ShardTask(self.job, shard))
        return client.take(0)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    world = simulated_world(tmp_path)
    ledger = JobLedger(world.store)
    job = plan_by_hand(ledger, world, [[4, 1, 2], [3]], rejected=[0])
    return Bench(world, ledger, MemoryQueue(), MemoryHeartbeats(world.clock, 10.0), job.id)


def test_a_shard_comes_with_all_that_is_needed_and_is_held(bench: Bench) -> None:
    work = bench.take(bench.client("w"))
    assert work is not None
    assert (work.job, work.shard, work.attempt) == (bench.ledger.job(), 1, 1)
    assert work.table["row"].to_pylist() == [4, 1, 2], "the planner's order"
    assert held(bench.beats) == {(bench.job, 1)}
    assert bench.ledger.attempts(1) == [], "nothing of it has been in an engine yet"


def test_an_attempt_is_recorded_when_it_begins(bench: Bench) -> None:
    one, two = bench.client("one"), bench.client("two", deaf=True)
    first, second = bench.take(one), bench.take(two)
    assert first is not None
    assert second is not None
    one.begin(first)
    two.begin(second)
    assert [(record.attempt, record.attempt_id) for record in bench.ledger.attempts(1)] == [
        (1, first.attempt_id),
        (2, second.attempt_id),
    ]
    third = bench.take(bench.client("three", deaf=True))
    assert third is not None
    assert third.attempt == 3
    assert third.history.silent == 2
    one.release(first, 0)
    two.release(second, 5)
    assert [(record.attempt_id, record.generated) for record in bench.ledger.ended(1)] == sorted(
        [(first.attempt_id, 0), (second.attempt_id, 5)]
    )


def test_of_two_workers_that_did_the_same_shard_the_first_counts(bench: Bench) -> None:
    one, two = bench.client("one"), bench.client("two", deaf=True)
    mine = bench.take(one)
    assert mine is not None
    one.begin(mine)
    yours = bench.take(two)
    assert yours is not None
    two.begin(yours)
    assert (mine.attempt, yours.attempt) == (1, 2)
    assert two.commit(yours, computed(yours, mark=" of two"), report(yours)) is True
    stands = bench.world.store.read(part_key(1))
    assert one.commit(mine, computed(mine, mark=" of one"), report(mine)) is False
    assert bench.world.store.read(part_key(1)) == stands
    assert [row["text"] for row in all_rows(bench.ledger)] == [None, "answer 1 of two", "answer 2 of two", None]
    assert read_part(bench.ledger, 1).summary.worker == "two"
    (lost,) = bench.ledger.ended(1)
    assert (lost.attempt_id, lost.generated) == (mine.attempt_id, 3 * 7)
    assert held(bench.beats) == set()
    assert list(bench.world.scratch.iterdir()) == []


def test_results_that_are_not_the_shards_are_refused_and_nothing_is_committed(bench: Bench) -> None:
    client = bench.client("w")
    work = bench.take(client)
    assert work is not None
    with pytest.raises(RowsMismatch, match="1 rows have none"):
        client.commit(work, FinishedRows(computed(work).rows[1:], computed(work).usages[1:]), report(work))
    assert not bench.ledger.has_part(1)
    assert client.commit(work, computed(work), report(work)) is True


def test_a_shard_given_back_can_be_taken_again(bench: Bench) -> None:
    client = bench.client("w")
    work = bench.take(client)
    assert work is not None
    assert bench.take(client) is None, "held"
    client.release(work, 0)
    assert held(bench.beats) == set()
    assert bench.ledger.ended(1) == [], "it had not begun"
    again = bench.take(client)
    assert again is not None
    assert again.attempt == 1
    client.begin(again)
    client.release(again, 0)
    later = bench.take(client)
    assert later is not None
    assert (later.attempt, later.history.silent) == (2, 0)


def test_a_shard_that_another_holds_is_passed_over_until_that_one_lets_go(bench: Bench) -> None:
    # Given a name that was put twice, since nobody took it for long, or by two dispatchers
    one, two = bench.client("one"), bench.client("two")
    work = bench.take(one)
    assert work is not None
    assert bench.take(two) is None
    assert held(bench.beats) == {(bench.job, 1)}
    one.release(work, 0)
    assert bench.take(two) is not None


def test_given_no_word_of_who_holds_what_a_shard_is_taken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> list[WorkerState]:
        raise ServiceUnavailable("Redis is away")

    assert bench.take(bench.client("one")) is not None
    monkeypatch.setattr(bench.beats, "workers", silent)
    assert bench.take(bench.client("two")) is not None


def test_given_a_shard_that_is_taken_and_not_begun_when_the_heart_beats_then_it_is_held(bench: Bench) -> None:
    client = bench.client("w")
    assert bench.take(client) is not None
    assert client.holding([]) == frozenset()
    assert held(bench.beats) == {(bench.job, 1)}
    assert bench.take(client) is None
    bench.ledger.create_closing(Closing(kind="cancel", at=bench.world.clock.now()))
    assert client.holding([]) == {bench.job}


def test_nothing_is_taken_from_a_job_that_closes(bench: Bench) -> None:
    bench.ledger.create(CLOSING, Closing(kind="cancel", at=bench.world.clock.now()).to_json())
    assert bench.take(bench.client("w")) is None


def test_a_job_that_is_gone_is_passed_over(bench: Bench) -> None:
    """Names on a queue outlive jobs that are removed, and others may write there."""
    client = ShardClient(
        "w",
        bench.world,
        lambda job: bench.ledger if job == bench.job else JobLedger(bench.world.store, "nowhere/"),
        bench.queue,
        bench.beats,
        lambda: False,
        models=MODELS,
    )
    bench.queue.put(QUEUE, ShardTask("job-gone", 1))
    assert bench.take(client) is not None, "the one behind it"
    assert held(bench.beats) == {(bench.job, 1)}


def test_a_shard_that_no_plan_has_is_passed_over(bench: Bench) -> None:
    bench.queue.put(QUEUE, ShardTask(bench.job, 9))
    client = bench.client("w")
    assert client.take(0) is None
    assert held(bench.beats) == set()
    assert bench.take(client) is not None


def test_a_shard_that_was_removed_with_its_job_is_passed_over(bench: Bench) -> None:
    client = bench.client("w")
    assert bench.take(client, shard=2) is not None
    store = bench.world.store
    for info in list(store.list("plans/")):
        store.delete(info.key)
    store.delete("job.json")
    assert bench.take(client) is None
    assert held(bench.beats) == {(bench.job, 2)}


def test_a_shard_that_cant_be_read_is_not_held(bench: Bench) -> None:
    segment = bench.ledger.segment(0)
    assert segment is not None
    bench.world.store.delete(segment.shards[0].key)
    with pytest.raises(Exception, match="no such object"):
        bench.take(bench.client("w"))
    assert held(bench.beats) == set()


def test_a_report_without_engine_time_is_fine(bench: Bench) -> None:
    client = bench.client("w")
    work = bench.take(client, shard=2)
    assert work is not None
    assert client.commit(work, computed(work), ShardReport()) is True
    assert read_part(bench.ledger, 2).summary.engine_started_at is None


def test_given_a_full_disk_when_a_part_is_committed_then_nothing_half_is_left(tmp_path: Path) -> None:
    """The part is built outside the store's folder, on a device that is always full."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("NOT TESTED HERE: a part on a full disk; there is no /dev/full")
    with FolderStore(tmp_path / "out") as store:
        good = World(store, SystemClock(), SystemRandomness(), store.scratch)
        ledger = JobLedger(store)
        job = plan_by_hand(ledger, good, [[0]])
        queue = MemoryQueue()
        client = ShardClient(
            "w", good, lambda _: ledger, queue, MemoryHeartbeats(good.clock, 10.0), lambda: False, models=MODELS
        )  # fmt: skip
        queue.put(QUEUE, ShardTask(job.id, 1))
        work = client.take(0)
        assert work is not None
        (store.scratch / f"part-00001-{work.attempt_id}.parquet").symlink_to(full)
        with pytest.raises(Exception, match=r"can't write results: .*free some space"):
            client.commit(work, computed(work), report(work))
        assert list(store.scratch.iterdir()) == []
    assert [path.name for path in (tmp_path / "out" / "results").iterdir()] == ["part-00000.parquet"]


def test_a_job_that_is_removed_while_it_is_known_is_passed_over(bench: Bench) -> None:
    client = bench.client("w")
    work = bench.take(client)
    assert work is not None
    client.release(work, 0)
    for info in list(bench.world.store.list("")):
        bench.world.store.delete(info.key)
    assert bench.take(client) is None
    assert held(bench.beats) == set()


def test_what_a_worker_has_left_counts_the_rows_without_an_outcome(bench: Bench) -> None:
    client = bench.client("w")
    one, two = bench.take(client, 1), bench.take(client, 2)
    assert one is not None
    assert two is not None
    client.holding([one, two], WorkerLoad(tokens_per_second=50.0, unfinished={(bench.job, 1): 1 / 3}))
    (state,) = bench.beats.workers()
    assert state.tokens_per_second == 50.0
    assert state.waiting_tokens == 12 + 12, "a third of three rows, and all of the one that nothing is said of"
