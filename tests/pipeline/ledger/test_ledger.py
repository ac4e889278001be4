"""The ledger can be read after any number of writes: after any interruption a reader finds a consistent state."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.dispatcher.dispatcher import Dispatcher
from pipeline.jobs.planning import fail_job
from pipeline.jobs.serialization import serialize_job
from pipeline.jobs.submit import submit
from pipeline.jobs.summaries import list_jobs, summarize_job
from pipeline.ledger.ledger import (
    CLOSING,
    JOB,
    MANIFEST,
    PROGRESS,
    JobLedger,
    JobNotFound,
    LedgerError,
    part_key,
    part_number,
)
from pipeline.ledger.records import AttemptRecord, EndRecord
from pipeline.ports import ObjectInfo, World
from pipeline.results.shard_history import read_history
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.job import Closing
from schemas.jobs.outcome import JobStatus
from tests.pipeline.made_jobs import MODELS, all_rows, computed, order, plan_by_hand, report
from tests.pipeline.simulated_harness import PipelineHarness, finish
from tests.pipeline.simulation import START, MemoryStore, simulated_world

ORDER_OF_STATES = [
    None, JobStatus.VALIDATING, JobStatus.IN_PROGRESS, JobStatus.FINALIZING, JobStatus.COMPLETED,
]  # fmt: skip


def run_to_the_end(world: World, ledger: JobLedger) -> None:
    """Three shards, one refused row, one attempt given up."""
    plan_by_hand(ledger, world, [[0, 1], [2], [3, 4]], rejected=[5])
    queue, beats = MemoryQueue(), MemoryHeartbeats(world.clock, 10.0)
    dispatcher = Dispatcher(world, queue, beats)
    dispatcher.add(ledger)
    client = ShardClient("w", world, lambda _: ledger, queue, beats, dispatcher.finished, models=MODELS)
    dispatcher.tick()
    given_up = client.take(0)
    assert given_up is not None
    client.begin(given_up)
    client.release(given_up, 22)
    for _ in range(20):
        world.clock.sleep(40.0)
        dispatcher.tick()
        while (work := client.take(0)) is not None:
            client.begin(work)
            assert client.commit(work, computed(work), report(work))
    assert dispatcher.finished()


@pytest.fixture
def finished(tmp_path: Path) -> MemoryStore:
    world = simulated_world(tmp_path)
    run_to_the_end(world, JobLedger(world.store))
    assert isinstance(world.store, MemoryStore)
    return world.store


@pytest.mark.parametrize("prefix", ["", "jobs/a/"])
def test_every_reader_copes_with_every_intermediate_state(tmp_path: Path, prefix: str) -> None:
    world = simulated_world(tmp_path)
    run_to_the_end(world, JobLedger(world.store, prefix))
    assert isinstance(world.store, MemoryStore)
    assert any(body is None for _, body in world.store.changes), "what is not needed any more goes"
    store, seen = MemoryStore(), list[JobStatus | None]()
    for key, body in [*world.store.changes, ("", None)]:
        ledger = JobLedger(store, prefix)
        if prefix + JOB not in store.objects:
            assert ledger.find_job() is None
            assert list(list_jobs(store, active=True)) == []
            with pytest.raises(JobNotFound):
                ledger.status()
            seen.append(None)
            change(store, key, body)
            continue
        status = ledger.status()
        seen.append(status)
        summary = summarize_job(ledger)
        assert summary.counts is not None
        assert summary.status is status
        assert [listed.status for listed in list_jobs(store)] == [status]
        active = [] if prefix + MANIFEST in store.objects else [status]
        assert [listed.status for listed in list_jobs(store, active=True)] == active
        assert len(ledger.runs()) <= 1
        for shard in (1, 2, 3):
            ledger.attempts(shard)
            ledger.ended(shard)
            read_history(ledger, shard)
        if status is JobStatus.IN_PROGRESS:
            assert summary.counts.total == 6
            assert summary.counts.pending == 6 - len(all_rows(ledger))
        change(store, key, body)
    ranks = [ORDER_OF_STATES.index(status) for status in seen]
    assert ranks == sorted(ranks), "a job never goes back"
    assert set(ranks) == set(range(len(ORDER_OF_STATES)))


def change(store: MemoryStore, key: str, body: bytes | None) -> None:
    if body is None:
        store.objects.pop(key, None)
    else:
        store.objects[key] = body


def test_any_single_object_may_be_missing(finished: MemoryStore) -> None:
    """Writes can't cause this state, but manual deletion can. It is reported or tolerated, never a traceback."""
    for missing in finished.log:
        store = MemoryStore({key: body for key, body in finished.objects.items() if key != missing})
        for summary in list_jobs(store):
            assert summary.status is not None or summary.problem is not None


@pytest.mark.parametrize("key", [JOB, MANIFEST, "plan/00000.json", CLOSING])
def test_a_later_format_is_refused_by_name(finished: MemoryStore, key: str) -> None:
    finished.objects[key] = b'{"version": 2, "something": "new"}'
    with pytest.raises(LedgerError, match=rf"{key}: has format version 2, but this tokenmill reads up to 1"):
        read_everything(JobLedger(finished))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is not JSON"),
        (b'{"version": 1, "id"', "is not JSON"),
        (b"[]", "the whole"),
        (b'{"version": 1}', "Field required"),
        (b"\xff\xfe", "is not JSON"),
    ],
)
def test_a_damaged_record_is_reported(finished: MemoryStore, body: bytes, message: str) -> None:
    finished.objects[JOB] = body
    with pytest.raises(LedgerError, match=rf"{JOB}: .*{message}"):
        JobLedger(finished).job()


def read_everything(ledger: JobLedger) -> None:
    ledger.job()
    ledger.manifest()
    ledger.closing()
    list(ledger.segments())


def test_a_damaged_cache_is_no_cache(finished: MemoryStore) -> None:
    finished.objects[PROGRESS] = b"{"
    assert JobLedger(finished).progress() is None


def test_closing_shows_in_the_status_until_the_job_has_ended(finished: MemoryStore) -> None:
    del finished.objects[MANIFEST]
    ledger = JobLedger(finished)
    ledger.create(CLOSING, Closing(kind="cancel", at=START).to_json())
    assert ledger.status() is JobStatus.CANCELLING
    finished.objects[CLOSING] = Closing(kind="expire", at=START).to_json()
    assert ledger.status() is JobStatus.FINALIZING


def test_a_shard_whose_bytes_changed_is_refused(finished: MemoryStore) -> None:
    ledger = JobLedger(finished)
    segment = ledger.segment(0)
    assert segment is not None
    finished.objects[segment.shards[0].key] += b"x"
    with pytest.raises(LedgerError, match="not those that were planned"):
        ledger.read_shard(segment.shards[0])


def begin(ledger: JobLedger, name: str) -> AttemptRecord:
    return ledger.begin_attempt(
        1, lambda number: AttemptRecord(attempt=number, attempt_id=name, worker="w", started_at=START)
    )


def test_shards_with_more_than_one_attempts_record_are_troubled(harness: PipelineHarness) -> None:
    plan_by_hand(harness.ledger, harness.world, [[0], [1]])
    assert harness.ledger.troubled() == set()
    begin(harness.ledger, "x")
    assert harness.ledger.troubled() == set()
    begin(harness.ledger, "y")
    assert harness.ledger.troubled() == {1}


def test_attempts_are_numbered_and_retained_until_the_job_has_ended(harness: PipelineHarness) -> None:
    job, ledger = plan_by_hand(harness.ledger, harness.world, [[0]]), harness.ledger
    for name in "xyz":
        record = begin(ledger, name)
        ledger.record_end(1, EndRecord(attempt_id=name, generated=22))
    assert record.attempt == 3
    assert [(record.attempt, record.attempt_id) for record in ledger.attempts(1)] == [(1, "x"), (2, "y"), (3, "z")]
    assert [record.generated for record in ledger.ended(1)] == [22] * 3

    harness.dispatcher.add(ledger)
    finish(harness, harness.client("w"))
    assert ledger.attempts(1) == ledger.ended(1) == []
    assert len(ledger.runs()) == 1
    assert ledger.job() == job


def test_two_jobs_in_one_root_do_not_meet(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    one, two = JobLedger(world.store, "jobs/a/"), JobLedger(world.store, "jobs/ab/")
    run_to_the_end(world, one)
    assert two.find_job() is None
    plan_by_hand(two, world, [[0]])
    assert one.status() is JobStatus.COMPLETED
    assert two.status() is JobStatus.IN_PROGRESS


def test_part_names_are_read_back() -> None:
    assert [part_number(part_key(number)) for number in (0, 7, 99_999, 123_456)] == [0, 7, 99_999, 123_456]
    for name in ("part-1.parquet", "part-00001.parquet.tmp", "xpart-00001.parquet", "part-0000x.parquet"):
        assert part_number(f"results/{name}") is None


class EndingStore(MemoryStore):
    """A store in which the manifest is created after so many calls."""

    def __init__(self, objects: dict[str, bytes], calls: int) -> None:
        super().__init__(objects)
        self.calls_left = calls
        self.hidden = self.objects.pop(MANIFEST)

    def count(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            self.objects[MANIFEST] = self.hidden

    def read(self, key: str) -> bytes:
        self.count()
        return super().read(key)

    def info(self, key: str) -> ObjectInfo | None:
        self.count()
        return super().info(key)


def test_a_job_that_fails_while_it_is_read_says_why_or_that_it_is_open(tmp_path: Path) -> None:
    world = simulated_world(tmp_path)
    ledger = JobLedger(world.store)
    job = submit(order(), ledger, world).job
    fail_job(ledger, job, world, "planning_failed", "it can't be planned")
    assert isinstance(world.store, MemoryStore)
    seen = set[str]()
    for calls in range(1, 40):
        batch = serialize_job(JobLedger(EndingStore(world.store.objects, calls)))
        seen.add(batch.status)
        assert (batch.status == "failed") == (batch.errors is not None), calls
        assert (batch.status == "failed") == (batch.failed_at is not None), calls
    assert seen == {"validating", "failed"}
