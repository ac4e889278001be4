"""A root in which one job's objects are damaged: workers and dispatcher go on, the other job ends, and the damaged one
ends too, or says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.dispatcher.dispatch_counts import DispatchMetrics
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.dispatcher.job_state import MAX_RESUME_ATTEMPTS
from pipeline.jobs.serialization import serialize_job
from pipeline.jobs.summaries import summarize_job
from pipeline.ledger.ledger import JOB, REJECTS, JobLedger, part_key, segment_key
from pipeline.ledger.records import UnreadableRecord
from pipeline.ports import ShardTask, StoreError, World
from pipeline.results.export import export
from pipeline.results.verification import check_files
from pipeline.worker_client import shard_client
from pipeline.worker_client.ports import CheckpointWork
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.job import Closing
from schemas.jobs.outcome import JobStatus, Manifest
from tests.pipeline.made_jobs import MODELS, QUEUE, all_rows, computed, plan_by_hand, report
from tests.pipeline.simulated_harness import LIFETIME
from tests.pipeline.simulation import ChaoticQueue, MemoryStore, simulated_world

ANSWERED = 5
"""Of a job's six rows that are computed (`computed` fails one of them); a seventh is refused."""

TICKS = 400
"""Simulated seconds that a root has: longer than a shard is tried, and a job is left alone."""


@dataclass
class Root:
    """Two jobs of three shards each, a dispatcher, and a worker that may begin anew."""

    world: World
    queue: ChaoticQueue = field(default_factory=ChaoticQueue)
    metrics: DispatchMetrics = field(default_factory=DispatchMetrics)
    names: tuple[str, ...] = ("victim", "innocent")

    def __post_init__(self) -> None:
        self.beats = MemoryHeartbeats(self.world.clock, LIFETIME)
        for name in self.names:
            plan_by_hand(self.ledger(name), self.world, [[0, 1], [2, 3], [4, 5]], rejected=[6])
        self.begin()

    def begin(self) -> None:
        """Start the dispatcher and the worker (again)."""
        settings = DispatchSettings(isolate=True, backlog=10)
        self.dispatcher = Dispatcher(self.world, self.queue, self.beats, settings=settings, metrics=self.metrics)
        self.worker = ShardClient(
            "w", self.world, self.ledger, self.queue, self.beats, lambda: False, models=MODELS
        )  # fmt: skip

    @property
    def store(self) -> MemoryStore:
        return cast(MemoryStore, self.world.store)

    def ledger(self, name: str) -> JobLedger:
        return JobLedger(self.world.store, f"jobs/{name}/")

    def turn(self, *, work: bool = True) -> None:
        """Let one second pass: the dispatcher ticks, and the worker computes its shards."""
        for name in self.names:  # as a controller does with what is open
            if f"jobs/{name}/manifest.json" not in self.store.objects and not self.dispatcher.is_paused(name):
                self.dispatcher.add(self.ledger(name))
        self.dispatcher.tick(planning=())
        self.worker.send_heartbeat([])
        while work and (taken := self.worker.take(0)) is not None:
            self.worker.begin(taken)
            self.worker.commit(taken, computed(taken), report(taken))
        self.world.clock.sleep(1.0)

    def outcomes(self, *names: str) -> list[Manifest]:
        """The outcomes of these jobs, once they have ended."""
        for _ in range(TICKS):
            self.turn()
            if all(f"jobs/{name}/manifest.json" in self.store.objects for name in names):
                return [manifest for name in names if (manifest := self.ledger(name).manifest()) is not None]
        raise AssertionError(f"not ended: {names}")

    def cut(self, key: str) -> None:
        """Half of the victim's object is lost."""
        self.store.objects[f"jobs/victim/{key}"] = self.store.objects[f"jobs/victim/{key}"][:20]

    def shard(self, number: int) -> str:
        segment = self.ledger("innocent").segment(0) and self.ledger("victim").segment(0)
        assert segment is not None
        return segment.shards[number - 1].key


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tracebacks in colours take longer than the tests."""
    with capture_logs():
        yield


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(simulated_world(tmp_path))


def remove_shard(root: Root) -> None:
    root.store.delete(f"jobs/victim/{root.shard(2)}")


def cut_shard(root: Root) -> None:
    root.cut(root.shard(2))


@pytest.mark.parametrize("damage", [remove_shard, cut_shard])
@pytest.mark.parametrize("anew", [False, True])
def test_given_a_shard_that_is_lost_then_its_rows_fail_and_all_others_are_answered(
    root: Root, damage: Callable[[Root], None], anew: bool
) -> None:
    root.turn(work=False)
    damage(root)
    if anew:
        root.begin()
    victim, innocent = root.outcomes("victim", "innocent")
    assert innocent.counts.succeeded == ANSWERED
    assert (victim.status, victim.counts.total, victim.counts.succeeded) == (JobStatus.COMPLETED, 7, ANSWERED - 2)
    rows = {row["row"]: row for row in sorted(all_rows(root.ledger("victim")), key=lambda row: row["row"])}
    assert sorted(rows) == list(range(7)), "each line has one row"
    for row in (2, 3):
        assert (rows[row]["status"], rows[row]["error_code"]) == ("failed", "engine_error")
        assert "retry the job" in rows[row]["error_message"]
    assert [row["custom_id"] for row in rows.values()] == ["id-0", "id-1", None, None, "id-4", "id-5", None]


def test_given_a_lost_shard_with_finished_rows_then_these_are_stored(root: Root) -> None:
    root.turn(work=False)
    while (work := root.worker.take(0)) is not None and (work.job.id, work.shard) != ("victim", 2):
        root.worker.release(work, 0)
    assert work is not None
    root.worker.begin(work)
    done = computed(work)
    root.worker.give_up(work, ValueError("planted"))
    first = FinishedRows(done.rows[:1], done.usages[:1])
    root.worker.checkpoint(work, CheckpointWork(first, (), 7, 7, final=True))
    remove_shard(root)
    (victim,) = root.outcomes("victim")
    assert (victim.counts.succeeded, victim.counts.failed) == (ANSWERED - 1, 3)


def test_given_damaged_shards_that_fill_the_queue_then_another_job_does_not_wait_for_them(root: Root) -> None:
    for number in (1, 2, 3):
        root.store.delete(f"jobs/victim/{root.shard(number)}")
    root.dispatcher = Dispatcher(
        root.world, root.queue, root.beats, settings=DispatchSettings(isolate=True, backlog=2), metrics=root.metrics
    )
    root.names = ("victim",)  # the other is submitted when the queue is full
    root.turn()
    root.names = ("victim", "innocent")
    for _ in range(10):  # far less than a shard that seems lost is left alone for
        root.turn()
    assert root.ledger("innocent").manifest() is not None


def test_given_one_sick_worker_of_two_then_no_row_fails_for_it(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """The healthy one is busy while the sick one fails with a shard more often than a shard is tried."""
    sick = ShardClient("sick", root.world, root.ledger, root.queue, root.beats, lambda: False, models=MODELS)

    def broken(*_: object) -> None:
        raise ValueError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(shard_client, "read_table", broken)
        for _ in range(TICKS):
            sick.send_heartbeat([])
            root.turn(work=False)
            assert sick.take(0) is None
    records = root.ledger("victim").unreadable(1)
    assert len(records) > MAX_RESUME_ATTEMPTS
    assert {record.worker for record in records} == {"sick"}
    for manifest in root.outcomes("victim", "innocent"):
        assert (manifest.status, manifest.counts.succeeded) == (JobStatus.COMPLETED, ANSWERED)


def test_given_a_shard_with_which_three_workers_of_many_fail_then_it_is_given_up(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.turn(work=False)
    for number in range(MAX_RESUME_ATTEMPTS):
        record = UnreadableRecord(worker=f"w{number}", at=root.world.clock.now(), reason="planted")
        root.ledger("victim").record_unreadable(2, f"{number}", record)
    monkeypatch.setattr(root.worker, "take", lambda *_: None)
    for _ in range(TICKS):
        root.turn()
    assert root.ledger("victim").has_part(2)
    assert not root.ledger("victim").has_part(1)


def test_given_two_lost_shards_then_the_job_fails_and_keeps_what_is_committed(root: Root) -> None:
    root.turn(work=False)
    for number in (1, 2):
        root.store.delete(f"jobs/victim/{root.shard(number)}")
    victim, innocent = root.outcomes("victim", "innocent")
    assert innocent.counts.succeeded == ANSWERED
    assert victim.status is JobStatus.FAILED
    assert victim.errors[0].code == "shard_unreadable"
    assert (victim.counts.total, [file.rows for file in victim.files]) == (3, [1, 2])
    assert victim.counts.total == len(all_rows(root.ledger("victim")))
    assert not list(root.store.list("jobs/victim/work/0"))


def test_given_a_job_that_failed_while_a_shard_was_computed_then_no_part_is_added_behind_its_outcome(
    root: Root,
) -> None:
    root.turn(work=False)
    works = {}
    while (work := root.worker.take(0)) is not None:
        works[work.job.id, work.shard] = work
    under_way = works.pop(("victim", 3))
    root.worker.begin(under_way)
    for work in works.values():
        root.worker.release(work, 0)
    for number in (1, 2):
        root.store.delete(f"jobs/victim/{root.shard(number)}")
    (victim,) = root.outcomes("victim")
    assert victim.status is JobStatus.FAILED
    assert root.worker.find_revoked([under_way]).to_release == {("victim", 3)}
    assert root.worker.commit(under_way, computed(under_way), report(under_way)) is False
    assert len(all_rows(root.ledger("victim"))) == victim.counts.total
    assert not list(root.store.list("jobs/victim/work/0"))
    root.queue.put(QUEUE, ShardTask("victim", 3))
    assert root.worker.take(0) is None


def test_given_a_part_that_is_committed_just_when_its_job_fails_then_its_rows_are_no_results(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker looked for the outcome, and found none; then the outcome was written, and then the part."""
    root.turn(work=False)
    works = {}
    while (work := root.worker.take(0)) is not None:
        works[work.job.id, work.shard] = work
    late = works.pop(("victim", 3))
    root.worker.begin(late)
    for work in works.values():
        root.worker.release(work, 0)
    for number in (1, 2):
        root.store.delete(f"jobs/victim/{root.shard(number)}")
    (victim,) = root.outcomes("victim")
    monkeypatch.setattr(JobLedger, "has_ended", lambda _: False)
    assert root.worker.commit(late, computed(late), report(late))
    ledger = root.ledger("victim")
    assert ledger.has_part(3)
    assert [file.path for file in victim.files] == [part_key(number) for number in ledger.result_parts(victim)]
    exported = export(ledger, tmp_path / "out.jsonl")
    assert exported.succeeded + exported.others == victim.counts.total
    check_files(ledger, victim, hashes=True)


def test_given_a_torn_record_of_an_attempt_then_the_job_is_computed(root: Root) -> None:
    root.turn(work=False)
    while (work := root.worker.take(0)) is not None:
        root.worker.begin(work)
    root.cut("work/00001/attempt-0001.json")
    root.begin()
    for manifest in root.outcomes("victim", "innocent"):
        assert (manifest.status, manifest.counts.succeeded) == (JobStatus.COMPLETED, ANSWERED)


@pytest.mark.parametrize("anew", [False, True])
def test_given_a_torn_closing_then_the_job_needs_attention_until_it_is_repaired(root: Root, anew: bool) -> None:
    root.turn(work=False)
    ledger = root.ledger("victim")
    ledger.create_closing(Closing(kind="cancel", at=root.world.clock.now()))
    whole = root.store.objects["jobs/victim/closing.json"]
    root.cut("closing.json")
    if anew:
        root.begin()
    (innocent,) = root.outcomes("innocent")
    assert innocent.counts.succeeded == ANSWERED
    for _ in range(30):
        root.turn()
    assert root.metrics.snapshot is not None
    assert root.metrics.snapshot.attention == 1
    summary = summarize_job(ledger, exact=False)
    assert "closing.json: is not JSON" in (summary.attention or "")
    root.store.objects["jobs/victim/closing.json"] = whole
    (victim,) = root.outcomes("victim")
    assert (victim.status, victim.counts.total) == (JobStatus.CANCELLED, 7)
    assert ledger.unreadable(1) == []


def test_given_a_plan_that_cant_be_read_then_the_job_ends_as_failed(root: Root) -> None:
    root.turn(work=False)
    root.cut(segment_key(0))
    root.begin()
    victim, innocent = root.outcomes("victim", "innocent")
    assert innocent.counts.succeeded == ANSWERED
    assert (victim.status, victim.errors[0].code) == (JobStatus.FAILED, "plan_unreadable")
    assert "plan/00000.json" in victim.errors[0].message


def test_given_a_plan_of_a_later_version_then_the_job_is_left_to_that_one(root: Root) -> None:
    key = f"jobs/victim/{segment_key(0)}"
    root.store.objects[key] = root.store.objects[key].replace(b'"version": 1', b'"version": 2')
    (innocent,) = root.outcomes("innocent")
    assert innocent.counts.succeeded == ANSWERED
    for _ in range(60):
        root.turn()
    assert root.ledger("victim").manifest() is None
    assert root.ledger("victim").unreadable(1) == []


@pytest.mark.parametrize("anew", [False, True])
def test_given_an_order_that_cant_be_read_then_the_job_goes_on_once_it_is_repaired(root: Root, anew: bool) -> None:
    root.turn(work=False)
    whole = root.store.objects["jobs/victim/job.json"]
    root.cut(JOB)
    if anew:
        root.begin()
    (innocent,) = root.outcomes("innocent")
    assert innocent.counts.succeeded == ANSWERED
    for _ in range(60):
        root.turn()
    assert root.ledger("victim").manifest() is None
    assert root.metrics.snapshot is not None
    if anew:
        assert root.metrics.snapshot.attention == 1
    root.store.objects["jobs/victim/job.json"] = whole
    (victim,) = root.outcomes("victim")
    assert (victim.status, victim.counts.total) == (JobStatus.COMPLETED, 7)


def test_given_a_part_of_another_job_then_only_its_own_job_waits_and_says_so(root: Root) -> None:
    root.names = ("innocent",)
    root.outcomes("innocent")
    key = part_key(1)
    root.store.objects[f"jobs/victim/{key}"] = root.store.objects[f"jobs/innocent/{key}"]
    plan_by_hand(root.ledger("late"), root.world, [[0, 1], [2, 3], [4, 5]], rejected=[6])
    root.names = ("victim", "late")
    (late,) = root.outcomes("late")
    assert late.counts.succeeded == ANSWERED
    for _ in range(60):
        root.turn()
    attention = serialize_job(root.ledger("victim")).tokenmill.attention
    assert attention is not None
    assert "belongs to job innocent, not to victim" in attention
    assert root.metrics.snapshot is not None
    assert root.metrics.snapshot.attention == 1
    root.store.delete(f"jobs/victim/{key}")  # as a person does who repairs it
    (victim,) = root.outcomes("victim")
    assert (victim.status, victim.counts.succeeded) == (JobStatus.COMPLETED, ANSWERED)


def test_given_a_part_that_is_cut_then_its_job_needs_attention(root: Root) -> None:
    root.turn(work=False)
    root.turn()
    assert root.ledger("victim").has_part(REJECTS)
    root.cut(part_key(REJECTS))
    root.begin()
    (innocent,) = root.outcomes("innocent")
    assert innocent.counts.succeeded == ANSWERED
    root.turn()
    assert root.dispatcher.is_paused("victim")


class UnexpectedError(Exception):
    """A programming error, of a class that no code catches by name."""


def test_given_an_error_of_one_job_that_was_never_foreseen_then_the_others_go_on(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = JobLedger.parts

    def broken(ledger: JobLedger):  # type: ignore[no-untyped-def]
        if ledger.name == "victim":
            raise UnexpectedError("planted")
        return real(ledger)

    with monkeypatch.context() as planted:
        planted.setattr(JobLedger, "parts", broken)
        (innocent,) = root.outcomes("innocent")
    assert innocent.counts.succeeded == ANSWERED
    assert root.world.errors.counts()["dispatcher"] >= 1
    (victim,) = root.outcomes("victim")
    assert victim.counts.succeeded == ANSWERED


def test_given_one_object_that_the_store_refuses_then_its_job_alone_waits(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = root.store.list

    def refused(prefix: str, after: str = ""):  # type: ignore[no-untyped-def]
        if prefix.startswith("jobs/victim/results"):
            raise StoreError("access denied")
        return real(prefix, after)

    with monkeypatch.context() as planted:
        planted.setattr(root.store, "list", refused)
        (innocent,) = root.outcomes("innocent")
        assert root.dispatcher.is_paused("victim")
    assert innocent.counts.succeeded == ANSWERED
    (victim,) = root.outcomes("victim")
    assert victim.counts.succeeded == ANSWERED


def test_given_a_job_none_of_whose_objects_can_be_read_then_it_is_paused_and_goes_on_later(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(real: Callable[..., object]) -> Callable[..., object]:
        def call(key: str, *more: object, **named: object) -> object:
            if key.startswith("jobs/victim/"):
                raise StoreError("access denied")
            return real(key, *more, **named)

        return call

    root.turn(work=False)
    with monkeypatch.context() as planted:
        for name in ("info", "read", "open", "list"):
            planted.setattr(root.store, name, refusing(getattr(root.store, name)))
        for _ in range(60):
            root.dispatcher.tick(planning=())
            assert root.dispatcher.is_paused("victim") or root.dispatcher.progress("victim") is not None
            root.world.clock.sleep(1.0)
        assert root.dispatcher.is_paused("victim")
        assert not root.dispatcher.is_paused("innocent")
    victim, innocent = root.outcomes("victim", "innocent")
    assert (victim.counts.succeeded, innocent.counts.succeeded) == (ANSWERED, ANSWERED)


def test_given_a_store_that_fails_as_a_whole_then_no_job_is_blamed(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise StoreError("the store is away")

    root.turn(work=False)
    with monkeypatch.context() as planted:
        planted.setattr(root.store, "list", away)
        with pytest.raises(StoreError):
            root.dispatcher.tick(planning=())
    assert not root.dispatcher.is_paused("victim")
    assert not root.dispatcher.is_paused("innocent")
