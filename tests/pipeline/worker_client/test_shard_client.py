"""A worker's side of the pipeline: what it may take, what commits, and who wins when two did the same shard."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ledger.ledger import CLOSING, JobLedger, part_key, work_key
from pipeline.ledger.records import AttemptRecord, ShardReport
from pipeline.ports import ShardTask, StoreError, WorkerState, World, queue_name
from pipeline.results.part_files import RowsMismatch, read_part
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.worker_client import shard_client
from pipeline.worker_client.ports import RevokedShards, ShardWork, WorkerLoad
from pipeline.worker_client.shard_client import PASS_OVER_SECONDS, ShardClient
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.job import Closing, Tier
from tests.pipeline.made_jobs import MODELS, PIN, QUEUE, all_rows, computed, held, plan_by_hand, report
from tests.pipeline.simulation import simulated_world


class UnexpectedError(Exception):
    """A programming error, of a class that no code catches by name."""


@dataclass
class ClientsHarness:
    """Two workers and a planned job of two shards."""

    world: World
    ledger: JobLedger
    queue: MemoryQueue
    beats: MemoryHeartbeats
    job: str

    def client(self, name: str, *, isolated: bool = False) -> ShardClient:
        """A worker's client; an isolated one reads no other worker's heartbeats, as when Redis was emptied."""
        beats = MemoryHeartbeats(self.world.clock, 10.0) if isolated else self.beats
        return ShardClient(name, self.world, lambda _: self.ledger, self.queue, beats, lambda: False, models=MODELS)

    def take(self, client: ShardClient, shard: int = 1) -> ShardWork | None:
        self.queue.put(QUEUE, ShardTask(self.job, shard))
        return client.take(0)


@pytest.fixture
def harness(tmp_path: Path) -> ClientsHarness:
    world = simulated_world(tmp_path)
    ledger = JobLedger(world.store)
    job = plan_by_hand(ledger, world, [[4, 1, 2], [3]], rejected=[0])
    return ClientsHarness(world, ledger, MemoryQueue(), MemoryHeartbeats(world.clock, 10.0), job.id)


def test_a_shard_comes_with_all_that_is_needed_and_is_held(harness: ClientsHarness) -> None:
    work = harness.take(harness.client("w"))
    assert work is not None
    assert (work.job, work.shard, work.attempt) == (harness.ledger.job(), 1, 1)
    assert work.table["row"].to_pylist() == [4, 1, 2], "the planner's order"
    assert held(harness.beats) == {(harness.job, 1)}
    assert harness.ledger.attempts(1) == [], "nothing of it has been in an engine yet"


def test_a_worker_of_several_models_takes_shards_of_each_in_turn(tmp_path: Path) -> None:
    world, queue = simulated_world(tmp_path), MemoryQueue()
    pins = {name: PIN.with_adapter(PIN.name, name, name) for name in "abc"}
    ledgers = {name: JobLedger(world.store, f"jobs/{name}/") for name in pins}
    for name, pin in pins.items():
        plan_by_hand(ledgers[name], world, [[row] for row in range(9)], models=(pin,))
        for number in range(1, 10):
            queue.put(queue_name(pin.key, Tier.STANDARD), ShardTask(name, number))
    client = ShardClient(
        "w", world, ledgers.__getitem__, queue, MemoryHeartbeats(world.clock, 10.0), lambda: False,
        models=[pin.key for pin in pins.values()],
    )  # fmt: skip
    taken = [work.job.id for _ in range(9) if (work := client.take(0)) is not None]
    assert Counter(taken) == {"a": 3, "b": 3, "c": 3}


def test_an_attempt_is_recorded_when_it_begins(harness: ClientsHarness) -> None:
    one, two = harness.client("one"), harness.client("two", isolated=True)
    first, second = harness.take(one), harness.take(two)
    assert first is not None
    assert second is not None
    one.begin(first)
    two.begin(second)
    assert [(record.attempt, record.attempt_id) for record in harness.ledger.attempts(1)] == [
        (1, first.attempt_id),
        (2, second.attempt_id),
    ]
    third = harness.take(harness.client("three", isolated=True))
    assert third is not None
    assert third.attempt == 3
    assert third.history.silent == 2
    one.release(first, 0)
    two.release(second, 5)
    assert [(record.attempt_id, record.generated) for record in harness.ledger.ended(1)] == sorted(
        [(first.attempt_id, 0), (second.attempt_id, 5)]
    )


def test_of_two_workers_that_did_the_same_shard_the_first_counts(harness: ClientsHarness) -> None:
    one, two = harness.client("one"), harness.client("two", isolated=True)
    mine = begun(harness, one)
    yours = begun(harness, two)
    assert (mine.attempt, yours.attempt) == (1, 2)
    assert two.commit(yours, computed(yours, mark=" of two"), report(yours)) is True
    stands = harness.world.store.read(part_key(1))
    assert one.commit(mine, computed(mine, mark=" of one"), report(mine)) is False
    assert harness.world.store.read(part_key(1)) == stands
    assert [row["text"] for row in all_rows(harness.ledger)] == [None, "answer 1 of two", "answer 2 of two", None]
    assert read_part(harness.ledger, 1).summary.worker == "two"
    (lost,) = harness.ledger.ended(1)
    assert (lost.attempt_id, lost.generated) == (mine.attempt_id, 3 * 7)
    assert held(harness.beats) == set()
    assert list(harness.world.scratch.iterdir()) == []


def test_results_that_are_not_the_shards_are_refused_and_nothing_is_committed(harness: ClientsHarness) -> None:
    client = harness.client("w")
    work = harness.take(client)
    assert work is not None
    with pytest.raises(RowsMismatch, match="1 rows have none"):
        client.commit(work, FinishedRows(computed(work).rows[1:], computed(work).usages[1:]), report(work))
    assert not harness.ledger.has_part(1)
    assert client.commit(work, computed(work), report(work)) is True


def test_a_shard_given_back_can_be_taken_again(harness: ClientsHarness) -> None:
    client = harness.client("w")
    work = harness.take(client)
    assert work is not None
    assert harness.take(client) is None, "held"
    client.release(work, 0)
    assert held(harness.beats) == set()
    assert harness.ledger.ended(1) == [], "it had not begun"
    again = harness.take(client)
    assert again is not None
    assert again.attempt == 1
    client.begin(again)
    client.release(again, 0)
    later = harness.take(client)
    assert later is not None
    assert (later.attempt, later.history.silent) == (2, 0)


def test_a_shard_that_another_holds_is_passed_over_until_that_one_lets_go(harness: ClientsHarness) -> None:
    # Given a task that was put twice, because it was not taken for long, or by two dispatchers
    one, two = harness.client("one"), harness.client("two")
    work = harness.take(one)
    assert work is not None
    assert harness.take(two) is None
    assert held(harness.beats) == {(harness.job, 1)}
    one.release(work, 0)
    assert harness.take(two) is not None


def test_given_unavailable_heartbeats_then_a_shard_is_taken(
    harness: ClientsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent() -> list[WorkerState]:
        raise ServiceUnavailable("Redis is away")

    assert harness.take(harness.client("one")) is not None
    monkeypatch.setattr(harness.beats, "workers", silent)
    assert harness.take(harness.client("two")) is not None


def test_given_a_shard_that_is_taken_and_not_begun_when_the_heart_beats_then_it_is_held(
    harness: ClientsHarness,
) -> None:
    client = harness.client("w")
    work = harness.take(client)
    assert work is not None
    client.send_heartbeat([])
    assert held(harness.beats) == {(harness.job, 1)}
    assert harness.take(client) is None
    harness.ledger.create_closing(Closing(kind="cancel", at=harness.world.clock.now()))
    assert client.find_revoked([work]).to_release == {(harness.job, 1)}


def begun(harness: ClientsHarness, client: ShardClient) -> ShardWork:
    """The next shard, which the client has begun."""
    work = harness.take(client)
    assert work is not None
    client.begin(work)
    return work


def silent_for(harness: ClientsHarness, client: ShardClient, work: ShardWork, seconds: float) -> None:
    """The worker's process is suspended for so long, and continues with a heartbeat."""
    client.send_heartbeat([work])
    harness.world.clock.sleep(seconds)


def test_given_a_silence_when_another_worker_has_taken_the_shard_then_it_is_revoked(harness: ClientsHarness) -> None:
    one, two = harness.client("one"), harness.client("two")
    work = begun(harness, one)
    silent_for(harness, one, work, 11.0)
    other = harness.take(two)
    assert other is not None
    # When the first goes on, then it must release the shard, whether the other has begun it or not
    one.send_heartbeat([work])
    assert one.find_revoked([work]) == RevokedShards(to_release=frozenset({(harness.job, 1)}))
    two.begin(other)
    assert one.find_revoked([work]).to_release == {(harness.job, 1)}
    assert two.find_revoked([other]) == RevokedShards(), "it was never silent"
    # and once the other's part exists, there is nothing left to log.
    assert two.commit(other, computed(other), report(other)) is True
    assert one.find_revoked([work]) == RevokedShards(committed=frozenset({(harness.job, 1)}))


def test_given_no_silence_or_one_in_which_no_other_worker_began_then_nothing_is_revoked(
    harness: ClientsHarness,
) -> None:
    one, two = harness.client("one"), harness.client("two", isolated=True)
    work = begun(harness, one)
    silent_for(harness, one, work, 9.0)
    begun(harness, two)
    one.send_heartbeat([work])
    assert one.find_revoked([work]) == RevokedShards(), "the attempts differ, but this one was never silent"
    silent_for(harness, one, work, 11.0)
    one.send_heartbeat([work])
    assert one.find_revoked([work]) == RevokedShards(), "the later attempt's worker is not alive"


def test_given_two_workers_that_both_were_silent_then_the_later_attempt_goes_on(harness: ClientsHarness) -> None:
    one, two = harness.client("one"), harness.client("two")
    work = begun(harness, one)
    silent_for(harness, one, work, 11.0)
    other = begun(harness, two)
    harness.world.clock.sleep(11.0)
    one.send_heartbeat([work])
    two.send_heartbeat([other])
    assert one.find_revoked([work]).to_release == {(harness.job, 1)}
    assert two.find_revoked([other]) == RevokedShards()


def test_given_a_silence_and_a_long_step_after_it_then_what_was_taken_over_is_still_found(
    harness: ClientsHarness,
) -> None:
    one, two = harness.client("one"), harness.client("two")
    work = begun(harness, one)
    silent_for(harness, one, work, 11.0)
    other = begun(harness, two)
    # When heartbeats are repeated during a step that outlasts their lifetime
    for _ in range(10):
        one.send_heartbeat([])
        two.send_heartbeat([other])
        harness.world.clock.sleep(3.0)
    one.send_heartbeat([work])
    # Then the shard is revoked, and once that was checked the silence is over
    assert one.find_revoked([work]).to_release == {(harness.job, 1)}
    assert one.find_revoked([work]) == RevokedShards()


def test_given_heartbeats_that_cant_be_sent_or_read_then_a_later_attempt_stands_for_its_worker(
    harness: ClientsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> list[WorkerState]:
        raise ServiceUnavailable("Redis is away")

    one, two = harness.client("one"), harness.client("two", isolated=True)
    work = begun(harness, one)
    silent_for(harness, one, work, 11.0)
    monkeypatch.setattr(harness.beats, "send_heartbeat", away)
    monkeypatch.setattr(harness.beats, "workers", away)
    one.send_heartbeat([work])
    assert one.find_revoked([work]) == RevokedShards(), "no other worker has begun it"
    begun(harness, two)
    assert one.find_revoked([work]).to_release == {(harness.job, 1)}


def test_given_records_of_a_later_version_after_a_silence_then_the_shard_is_released(harness: ClientsHarness) -> None:
    one, two = harness.client("one"), harness.client("two")
    work = begun(harness, one)
    silent_for(harness, one, work, 11.0)
    assert harness.take(two) is not None
    later = AttemptRecord(attempt=2, attempt_id="x", worker="two", session="s", started_at=harness.world.clock.now())
    data = later.to_json().replace(b'"version": 1', b'"version": 2')
    harness.world.store.create(harness.ledger.prefix + work_key(1, "attempt-0002.json"), data)
    one.send_heartbeat([work])
    assert one.find_revoked([work]).to_release == {(harness.job, 1)}
    # nor is the shard blamed by a worker that can't go on with it.
    one.release(work, 0)
    assert harness.take(harness.client("three", isolated=True)) is None
    assert harness.ledger.store.info(work_key(1, "attempt-0002.json")) is not None
    assert harness.ledger.unreadable(1) == []


def test_given_a_shard_that_was_released_meanwhile_when_its_job_is_forgotten_then_it_is_left_out(
    harness: ClientsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Revoked shards are looked up on another thread."""
    monkeypatch.setattr("pipeline.worker_client.shard_client.MAX_JOBS", 0)
    client = harness.client("w")
    work = harness.take(client)
    assert work is not None
    client.release(work, 0)
    client._forget_jobs()
    assert client.find_revoked([work]) == RevokedShards()


def test_nothing_is_taken_from_a_job_that_closes(harness: ClientsHarness) -> None:
    harness.ledger.create(CLOSING, Closing(kind="cancel", at=harness.world.clock.now()).to_json())
    assert harness.take(harness.client("w")) is None


def test_a_job_that_is_gone_is_passed_over(harness: ClientsHarness) -> None:
    """Names on a queue outlive jobs that are removed, and others may write there."""
    client = ShardClient(
        "w",
        harness.world,
        lambda job: harness.ledger if job == harness.job else JobLedger(harness.world.store, "nowhere/"),
        harness.queue,
        harness.beats,
        lambda: False,
        models=MODELS,
    )
    harness.queue.put(QUEUE, ShardTask("job-gone", 1))
    assert harness.take(client) is not None, "the one behind it"
    assert held(harness.beats) == {(harness.job, 1)}


def test_a_shard_that_no_plan_has_is_passed_over(harness: ClientsHarness) -> None:
    harness.queue.put(QUEUE, ShardTask(harness.job, 9))
    client = harness.client("w")
    assert client.take(0) is None
    assert held(harness.beats) == set()
    assert harness.take(client) is not None


def test_a_shard_that_was_removed_with_its_job_is_passed_over(harness: ClientsHarness) -> None:
    client = harness.client("w")
    assert harness.take(client, shard=2) is not None
    store = harness.world.store
    for info in list(store.list("plans/")):
        store.delete(info.key)
    store.delete("job.json")
    assert harness.take(client) is None
    assert held(harness.beats) == {(harness.job, 2)}


def test_given_a_shard_that_cant_be_read_then_that_is_recorded_and_the_worker_takes_the_next_one(
    harness: ClientsHarness,
) -> None:
    segment = harness.ledger.segment(0)
    assert segment is not None
    harness.world.store.delete(segment.shards[0].key)
    client = harness.client("w")
    harness.queue.put(QUEUE, ShardTask(harness.job, 1))
    other = harness.take(client, shard=2)
    assert other is not None
    assert (other.shard, held(harness.beats)) == (2, {(harness.job, 2)})
    (record,) = harness.ledger.unreadable(1)
    assert (record.worker, "is missing, but the plan refers to it" in record.reason) == ("w", True)
    assert harness.take(client, shard=1) is None
    assert len(harness.ledger.unreadable(1)) == 1, "it isn't tried again at once"
    harness.world.clock.sleep(PASS_OVER_SECONDS)
    assert harness.take(client, shard=1) is None
    assert len(harness.ledger.unreadable(1)) == 2


@pytest.mark.slow
def test_given_an_error_that_was_never_foreseen_then_it_is_counted_and_the_worker_goes_on(
    harness: ClientsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_ledger: JobLedger, _shard: object) -> None:
        raise UnexpectedError("planted")

    client = harness.client("w")
    with monkeypatch.context() as planted:
        planted.setattr(shard_client, "read_table", broken)
        assert harness.take(client) is None
    assert harness.world.errors.counts() == {"worker": 1}
    assert "UnexpectedError" in harness.ledger.unreadable(1)[0].reason
    assert harness.take(client, shard=2) is not None


def test_given_too_little_memory_then_it_is_counted_and_nothing_is_blamed_on_the_shard(
    harness: ClientsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_file: object) -> None:
        raise pa.ArrowMemoryError("planted")

    client = harness.client("w")
    with monkeypatch.context() as planted:
        planted.setattr(pq, "read_table", broken)
        assert harness.take(client) is None
    assert harness.world.errors.counts() == {"worker": 1}
    assert harness.ledger.unreadable(1) == []
    assert harness.take(client, shard=2) is not None


def test_given_a_store_that_fails_then_nothing_is_blamed_on_the_shard(
    harness: ClientsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_key: str) -> bytes:
        raise StoreError("the store is away")

    client = harness.client("w")
    with monkeypatch.context() as planted:
        planted.setattr(harness.world.store, "read", away)
        with pytest.raises(StoreError):
            harness.take(client)
    assert harness.ledger.unreadable(1) == []
    assert harness.take(client) is not None


def test_given_up_by_one_attempt_a_shard_is_recorded_and_free_for_another(harness: ClientsHarness) -> None:
    one, two = harness.client("one"), harness.client("two")
    work = begun(harness, one)
    one.give_up(work, UnexpectedError("planted"), generated=9)
    assert harness.take(one) is None
    assert [record.worker for record in harness.ledger.unreadable(1)] == ["one"]
    assert [record.generated for record in harness.ledger.ended(1)] == [9]
    assert harness.take(two) is not None


def test_given_a_closing_that_cant_be_read_then_the_heartbeat_and_other_jobs_go_on(harness: ClientsHarness) -> None:
    client = harness.client("w")
    work = harness.take(client)
    assert work is not None
    harness.world.store.create(CLOSING, b"{")
    client.send_heartbeat([work])
    assert client.find_revoked([work]) == RevokedShards()
    assert client.commit(work, computed(work), report(work)) is True
    assert harness.take(client, shard=2) is None
    assert harness.ledger.unreadable(2) == [], "it is not the shard's fault"


def test_a_report_without_engine_time_is_fine(harness: ClientsHarness) -> None:
    client = harness.client("w")
    work = harness.take(client, shard=2)
    assert work is not None
    assert client.commit(work, computed(work), ShardReport()) is True
    assert read_part(harness.ledger, 2).summary.engine_started_at is None


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


def test_a_job_that_is_removed_while_it_is_known_is_passed_over(harness: ClientsHarness) -> None:
    client = harness.client("w")
    work = harness.take(client)
    assert work is not None
    client.release(work, 0)
    for info in list(harness.world.store.list("")):
        harness.world.store.delete(info.key)
    assert harness.take(client) is None
    assert held(harness.beats) == set()


def test_what_a_worker_has_left_counts_the_rows_without_an_outcome(harness: ClientsHarness) -> None:
    client = harness.client("w")
    one, two = harness.take(client, 1), harness.take(client, 2)
    assert one is not None
    assert two is not None
    load = WorkerLoad(tokens_per_second=50.0, unfinished={(harness.job, 1): 1 / 3}, max_num_seqs=512)
    client.send_heartbeat([one, two], load)
    (state,) = harness.beats.workers()
    assert state.max_num_seqs == 512
    assert state.tokens_per_second == 50.0
    assert state.waiting_tokens == 12 + 12, "a third of three rows, and all of the one that nothing is said of"
