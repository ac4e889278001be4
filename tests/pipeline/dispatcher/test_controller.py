"""The controller of a root with many jobs finds, plans and ends each, also when processes die or jobs are broken."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.controller import InProcessPlanner, JobController, JobControllerSettings, JobPlanner
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.inputs.open import open_pinned
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import PlanningCancelled, PlanningFailed, PlanOutcome, plan_job
from pipeline.jobs.retry import choose_rows
from pipeline.jobs.submit import submit
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import ComponentStopped, Lease, StoreError, WorkerState, World
from pipeline.results.verification import check_files
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.job import Closing, JobSettings, OnInvalid
from schemas.jobs.outcome import JobStatus, Manifest
from schemas.requests.limits import Limits, PlanSettings
from tests.pipeline.made_jobs import MODELS, computed, order, report
from tests.waiting import HANG_SECONDS, wait_for

SETTINGS = JobControllerSettings(
    tick_interval_seconds=0.002, refresh_interval_seconds=0.01, retry_delay_seconds=0.05, renew_interval_seconds=0.02
)


class SharedLease:
    """A lease that two controllers contend for; it is free when its holder releases it."""

    def __init__(self) -> None:
        self.holder: str | None = None
        self._lock = threading.Lock()

    def side(self, name: str) -> Lease:
        lease = self

        class OneSide:
            def renew(self) -> bool:
                with lease._lock:
                    lease.holder = lease.holder or name
                    return lease.holder == name

            def release(self) -> None:
                with lease._lock:
                    lease.holder = None if lease.holder == name else lease.holder

        return OneSide()


class FailingPlanner(InProcessPlanner):
    """Planning some jobs raises an unexpected error."""

    def __init__(self, world: World, errors: Mapping[str, Exception]) -> None:
        super().__init__(world, open_pinned)
        self.errors = errors
        self.tried: list[str] = []

    def plan(self, ledger: JobLedger, *, in_time: bool) -> PlanOutcome:
        self.tried.append(ledger.name)
        if ledger.name in self.errors:
            raise self.errors[ledger.name]
        return super().plan(ledger, in_time=in_time)


class BlockedPlanner(InProcessPlanner):
    """Planning a tenant's jobs takes until it is released."""

    def __init__(self, world: World, tenant: str) -> None:
        super().__init__(world, open_pinned)
        self.released = threading.Event()
        self.planned: list[str] = []
        self._tenant = tenant

    def plan(self, ledger: JobLedger, *, in_time: bool) -> PlanOutcome:
        if ledger.job().tenant == self._tenant:
            self.released.wait(HANG_SECONDS)
        self.planned.append(ledger.name)
        return super().plan(ledger, in_time=in_time)


class EndlessPlanner(InProcessPlanner):
    """Planning takes until it is cancelled; before, `begin` is called."""

    def __init__(self, world: World, begin: Callable[[JobLedger], object] = lambda _: None) -> None:
        super().__init__(world, open_pinned)
        self.is_begun, self.tried = threading.Event(), 0
        self._begin = begin
        self._cancelled = threading.Event()

    def plan(self, ledger: JobLedger, *, in_time: bool) -> PlanOutcome:
        self.tried += 1
        if self._cancelled.is_set():
            return super().plan(ledger, in_time=in_time)
        self.is_begun.set()
        assert self._cancelled.wait(HANG_SECONDS)
        self._begin(ledger)
        raise PlanningCancelled("cancelled")

    def cancel(self, job: str) -> None:
        self._cancelled.set()


class Root:
    """A folder with many jobs, and all that works on them in threads."""

    def __init__(self, folder: Path, store: FolderStore) -> None:
        self.folder = folder
        self.world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        self.queue, self.beats = MemoryQueue(), MemoryHeartbeats(self.world.clock, 10.0)
        self.stop = threading.Event()
        self.threads: list[threading.Thread] = []

    def ledger(self, name: str) -> JobLedger:
        return JobLedger(self.world.store, f"jobs/{name}/")

    def submit(self, name: str, lines: list[str], on_invalid: OnInvalid = OnInvalid.ROW, **changes: object) -> None:
        source = self.folder / f"{name}.jsonl"
        source.write_text("".join(line + "\n" for line in lines))
        settings = JobSettings(plan=PlanSettings(max_shard_rows=7, segment_rows=20), on_invalid=on_invalid)
        submit(order(input=pin_input(source), settings=settings, **changes), self.ledger(name), self.world, job_id=name)

    def controller(self, lease: Lease | None = None, planner: JobPlanner | None = None) -> JobController:
        settings = DispatchSettings(isolate=True, retry_timeout_seconds=0.5, sweep_interval_seconds=0.2)
        dispatcher = Dispatcher(self.world, self.queue, self.beats, settings=settings)
        return JobController(self.world, dispatcher, settings=SETTINGS, lease=lease, planner=planner)

    def start_controller(
        self,
        lease: Lease | None = None,
        stop: threading.Event | None = None,
        planner: JobPlanner | None = None,
    ) -> None:
        self._start(lambda: self.controller(lease, planner).run(stop or self.stop))

    def start_worker(self, name: str) -> None:
        def work() -> None:
            client = ShardClient(name, self.world, self.ledger, self.queue, self.beats, lambda: False, models=MODELS)
            while not self.stop.is_set():
                shard = client.take(0.01)
                if shard is not None:
                    client.begin(shard)
                    client.commit(shard, computed(shard), report(shard))

        self._start(work)

    def outcome(self, name: str, seconds: float = HANG_SECONDS) -> Manifest:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            manifest = self.ledger(name).manifest()
            if manifest is not None:
                return manifest
            time.sleep(0.01)
        raise AssertionError(f"{name} has not ended: {self.ledger(name).status()}")

    def _start(self, target) -> None:  # type: ignore[no-untyped-def]
        self.threads.append(threading.Thread(target=target))
        self.threads[-1].start()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    with FolderStore(tmp_path / "root") as store:
        root = Root(tmp_path, store)
        yield root
        root.stop.set()
        for thread in root.threads:
            thread.join(HANG_SECONDS)


def lines(count: int, name: str = "") -> list[str]:
    body = {"model": "tiny", "max_tokens": 5}
    return [
        json.dumps(
            {
                "custom_id": f"{name}{row}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {**body, "prompt": f"{name} row {row}"},
            }
        )
        for row in range(count)
    ]


def test_jobs_that_come_at_any_time_are_planned_and_ended(root: Root) -> None:
    root.submit("job-1", lines(50))
    for name in ("one", "two"):
        root.start_worker(name)
    lease = SharedLease()
    for name in "ab":
        root.start_controller(lease.side(name))
    root.submit("job-2", lines(9))
    root.submit("job-3", [*lines(3), "not json"])
    for name, total, failed in (("job-1", 50, 10), ("job-2", 9, 1), ("job-3", 4, 1)):
        manifest = root.outcome(name)
        assert (manifest.status, manifest.counts.total) == (JobStatus.COMPLETED, total)
        assert manifest.counts.failed == failed
        assert manifest.usage.repeated == 0
    until = time.monotonic() + HANG_SECONDS
    while list(root.world.store.list("active/")) and time.monotonic() < until:
        time.sleep(0.01)
    assert list(root.world.store.list("active/")) == []


def test_a_job_that_cant_be_planned_ends_as_failed_and_blocks_no_other_job(root: Root) -> None:
    root.submit("gone", lines(5))
    (root.folder / "gone.jsonl").unlink()
    root.submit("refused", [*lines(2), "not json"], OnInvalid.JOB)
    root.submit("good", lines(5))
    root.start_worker("w")
    root.start_controller()
    assert root.outcome("good").status is JobStatus.COMPLETED
    assert root.outcome("refused").status is JobStatus.FAILED
    gone = root.outcome("gone")
    assert gone.status is JobStatus.FAILED
    assert gone.errors[0].code == "input_unreadable"
    assert "gone.jsonl" in gone.errors[0].message


def test_a_damaged_job_is_paused_and_the_others_go_on(root: Root) -> None:
    root.submit("damaged", lines(30))
    root.submit("unreadable", lines(3))
    (root.folder / "root/jobs/unreadable/job.json").write_text("{")
    root.start_controller()
    deadline = time.monotonic() + HANG_SECONDS
    while root.ledger("damaged").planned_parts() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    root.world.store.create("jobs/damaged/results/part-00099.parquet", b"foreign")
    root.submit("good", lines(5))
    time.sleep(0.3)
    root.start_worker("w")
    assert root.outcome("good").status is JobStatus.COMPLETED
    assert root.ledger("damaged").manifest() is None


def test_a_marker_that_was_lost_is_made_again(root: Root) -> None:
    root.submit("job-1", lines(3))
    root.world.store.delete("active/job-1")
    root.start_worker("w")
    root.start_controller()
    assert root.outcome("job-1").status is JobStatus.COMPLETED


def test_when_the_leader_ends_another_takes_over(root: Root) -> None:
    lease, first = SharedLease(), threading.Event()
    root.start_controller(lease.side("a"), first)
    deadline = time.monotonic() + HANG_SECONDS
    while lease.holder is None and time.monotonic() < deadline:
        time.sleep(0.01)
    root.start_controller(lease.side("b"))
    first.set()
    root.submit("job-1", lines(9))
    root.start_worker("w")
    assert root.outcome("job-1").status is JobStatus.COMPLETED
    assert lease.holder == "b"


def test_two_leaders_at_once_do_no_harm(root: Root) -> None:
    root.submit("job-1", lines(60))
    for name in ("one", "two"):
        root.start_worker(name)
        root.start_controller()
    manifest = root.outcome("job-1")
    assert (manifest.counts.total, manifest.counts.failed) == (60, 12)


@pytest.mark.parametrize(("speed", "refused"), [(0.1, True), (10_000.0, False), (None, False)])
@pytest.mark.slow
def test_a_job_that_would_be_late_is_refused_if_refuse_late_is_set(
    root: Root, speed: float | None, refused: bool
) -> None:
    # 100 rows of some 20 tokens within 50 minutes.
    root.beats.send_heartbeat(WorkerState("measured", frozenset(MODELS), tokens_per_second=speed))
    root.submit("refuses", lines(100), deadline=timedelta(seconds=3_000), refuse_late=True)
    root.submit("accepts", lines(100), deadline=timedelta(seconds=3_000))
    root.start_controller()
    root.start_worker("w")
    assert root.outcome("accepts").status is JobStatus.COMPLETED
    outcome = root.outcome("refuses")
    assert outcome.status is (JobStatus.FAILED if refused else JobStatus.COMPLETED)
    if refused:
        assert outcome.errors[0].code == "deadline_unreachable"
        assert "its deadline is 20" in outcome.errors[0].message
        assert list(root.world.store.list("jobs/refuses/results/")) == []
        assert list(root.world.store.list("jobs/refuses/plan")) == []


def test_a_job_that_is_removed_while_it_is_open_blocks_no_other_job(root: Root) -> None:
    root.submit("removed", lines(30))
    root.start_controller()
    until = time.monotonic() + HANG_SECONDS
    while root.ledger("removed").planned_parts() is None and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)  # its first shards are on the queue
    for info in list(root.world.store.list("jobs/removed/")):
        root.world.store.delete(info.key)
    root.submit("good", lines(30))
    root.start_worker("w")
    assert root.outcome("good").status is JobStatus.COMPLETED


def test_a_cancelled_job_whose_shard_is_lost_ends_with_a_row_for_each_line(root: Root) -> None:
    """Its closer reads the shard at each poll; that error must not end the poll of all other jobs."""
    root.submit("lost", lines(3))
    stop = threading.Event()
    root.start_controller(stop=stop)
    until = time.monotonic() + HANG_SECONDS
    while root.ledger("lost").planned_parts() is None and time.monotonic() < until:
        time.sleep(0.01)
    stop.set()
    for info in list(root.world.store.list("jobs/lost/plans/")):
        if "/shards/" in info.key:
            root.world.store.delete(info.key)
    root.ledger("lost").create_closing(Closing(kind="cancel", at=root.world.clock.now()))
    root.submit("good", lines(5))
    root.start_controller()
    root.start_worker("w")
    assert root.outcome("good").status is JobStatus.COMPLETED
    lost = root.outcome("lost")
    assert (lost.status, lost.counts.total, lost.counts.cancelled) == (JobStatus.CANCELLED, 3, 3)


UNEXPECTED = {"bad": RecursionError("nested"), "worse": MemoryError(), "worst": OSError("Couldn't deserialize")}


def test_an_exception_in_planning_ends_its_job_after_three_attempts(root: Root) -> None:
    planner = FailingPlanner(root.world, UNEXPECTED)
    for name in (*UNEXPECTED, "good"):
        root.submit(name, lines(5))
    root.start_worker("w")
    root.start_controller(planner=planner)
    for name, error in UNEXPECTED.items():
        outcome = root.outcome(name)
        assert outcome.status is JobStatus.FAILED
        assert [each.code for each in outcome.errors] == ["planning_failed"]
        assert f"failed 3 times, the last time with: {type(error).__name__}" in outcome.errors[0].message
        assert planner.tried.count(name) == 3
    assert root.outcome("good").status is JobStatus.COMPLETED
    root.submit("later", lines(5))
    assert root.outcome("later").status is JobStatus.COMPLETED


def test_given_slow_plans_of_one_tenant_when_another_submits_a_job_then_it_is_planned_meanwhile(root: Root) -> None:
    planner, names = BlockedPlanner(root.world, "slow"), [f"slow-{number}" for number in range(6)]
    for name in names:
        root.submit(name, lines(3), tenant="slow")
    root.submit("good", lines(3), tenant="good")
    root.start_worker("w")
    root.start_controller(planner=planner)
    try:
        assert root.outcome("good", HANG_SECONDS).status is JobStatus.COMPLETED
        assert planner.planned == ["good"]
    finally:
        planner.released.set()
    for name in names:
        assert root.outcome(name, HANG_SECONDS).status is JobStatus.COMPLETED
    assert planner.planned == ["good", *names], "a tenant's jobs are planned in order of their age"


def test_failures_of_planning_are_counted_across_restarts(root: Root) -> None:
    planner = FailingPlanner(root.world, UNEXPECTED)
    root.submit("bad", lines(5))
    for tries in (1, 2):
        first = root.controller(planner=planner)
        until = time.monotonic() + HANG_SECONDS
        while planner.tried.count("bad") < tries or len(failures(root, "bad")) < tries:
            assert time.monotonic() < until
            first.tick()
        first.close()
    assert root.ledger("bad").manifest() is None
    root.start_controller(planner=planner)
    assert root.outcome("bad").errors[0].code == "planning_failed"
    assert planner.tried == ["bad"] * 3


def failures(root: Root, name: str) -> list[str]:
    return [info.key for info in root.world.store.list(f"jobs/{name}/work/planning/")]


@pytest.mark.parametrize(("kind", "status"), [("cancel", JobStatus.CANCELLED), ("expire", JobStatus.EXPIRED)])
def test_a_closed_job_of_which_nothing_is_planned_ends_before_it_is_planned(
    root: Root, kind: Literal["cancel", "expire"], status: JobStatus
) -> None:
    root.submit("closed", lines(5))
    (root.folder / "closed.jsonl").unlink()
    root.ledger("closed").create_closing(Closing(kind=kind, at=root.world.clock.now()))
    root.start_controller()
    outcome = root.outcome("closed")
    assert (outcome.status, outcome.counts.total, outcome.ended_by) == (status, 0, kind)
    again = choose_rows(root.ledger("closed"))
    assert again.rows is None, "a retry answers all of its input"


@pytest.mark.slow
def test_given_a_plan_under_way_when_its_job_is_cancelled_then_planning_ends_and_the_job_is_not_blamed(
    root: Root,
) -> None:
    planner = EndlessPlanner(root.world)
    root.submit("endless", lines(5))
    root.start_controller(planner=planner)
    assert planner.is_begun.wait(HANG_SECONDS)
    root.ledger("endless").create_closing(Closing(kind="cancel", at=root.world.clock.now()))
    outcome = root.outcome("endless", HANG_SECONDS)
    assert (outcome.status, outcome.counts.total, outcome.errors) == (JobStatus.CANCELLED, 0, ())
    assert (failures(root, "endless"), planner.tried) == ([], 1)


@pytest.mark.slow
def test_given_a_segment_that_is_committed_just_when_planning_is_cancelled_then_each_row_gets_a_result(
    root: Root,
) -> None:
    planner = EndlessPlanner(root.world, lambda ledger: plan_job(ledger, ledger.job(), root.world, max_segments=1))
    root.submit("begun", lines(50))
    root.start_controller(planner=planner)
    assert planner.is_begun.wait(HANG_SECONDS)
    root.ledger("begun").create_closing(Closing(kind="cancel", at=root.world.clock.now()))
    outcome = root.outcome("begun", HANG_SECONDS)
    assert (outcome.status, outcome.counts.total, planner.tried) == (JobStatus.CANCELLED, 50, 2)


def test_a_job_whose_planning_fails_each_time_can_be_cancelled_between_two_tries(root: Root) -> None:
    settings = JobControllerSettings(
        tick_interval_seconds=0.002, refresh_interval_seconds=0.01, retry_delay_seconds=100_000.0
    )
    planner = FailingPlanner(root.world, {"bad": ValueError("unforeseen")})
    root.submit("bad", lines(5))
    dispatcher = Dispatcher(
        root.world, root.queue, root.beats, settings=DispatchSettings(isolate=True, closing_interval_seconds=0.01)
    )
    controller = JobController(root.world, dispatcher, settings=settings, planner=planner)
    root._start(lambda: controller.run(root.stop))
    until = time.monotonic() + HANG_SECONDS
    while not failures(root, "bad"):
        assert time.monotonic() < until
        time.sleep(0.01)
    root.ledger("bad").create_closing(Closing(kind="cancel", at=root.world.clock.now()))
    assert root.outcome("bad").status is JobStatus.CANCELLED
    assert planner.tried == ["bad"]


def test_given_a_file_that_is_broken_behind_its_first_segment_when_planned_then_the_job_fails_with_the_location(
    root: Root,
) -> None:
    path = root.folder / "broken.parquet"
    table = pa.table({"custom_id": [str(row) for row in range(100)], "prompt": [str(row) * 9 for row in range(100)]})
    pq.write_table(table, path, row_group_size=50, compression="snappy", use_dictionary=False)
    at = pq.read_metadata(path).row_group(1).column(1).data_page_offset
    data = bytearray(path.read_bytes())
    data[at : at + 100] = b"\xff" * 100
    path.write_bytes(data)
    settings = JobSettings(plan=PlanSettings(first_segment_rows=20, segment_rows=20))
    submit(order(input=pin_input(path), settings=settings), root.ledger("broken"), root.world, job_id="broken")
    root.start_controller()
    outcome = root.outcome("broken")
    assert (outcome.status, outcome.errors[0].code) == (JobStatus.FAILED, "input_unreadable")
    assert "broken.parquet: row group 2 of 2: can't be decoded" in outcome.errors[0].message


def test_given_more_rows_than_a_job_may_have_when_planned_then_the_job_fails_and_keeps_what_was_committed(
    root: Root,
) -> None:
    path = root.folder / "long.jsonl"
    path.write_text("".join(line + "\n" for line in lines(100)))
    settings = JobSettings(plan=PlanSettings(first_segment_rows=20, segment_rows=20), limits=Limits(max_rows=70))
    submit(order(input=pin_input(path), settings=settings), root.ledger("long"), root.world, job_id="long")
    root.start_controller()
    outcome = root.outcome("long")
    assert (outcome.status, outcome.errors[0].code) == (JobStatus.FAILED, "too_many_rows")
    assert outcome.errors[0].message.endswith(
        "long.jsonl: line 71: the input has more than 70 rows; split it into several jobs (limits.max_rows)"
    )
    ledger = root.ledger("long")
    assert ledger.segment(0) is not None
    assert [file.path for file in outcome.files] == [info.key for _, info in ledger.parts()]
    assert check_files(ledger, outcome, hashes=True) > 0


def test_a_job_whose_polling_raises_is_paused_and_the_others_go_on(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    root.submit("bad", lines(5))
    read = root.world.store.read

    def raising(key: str) -> bytes:
        if key == "jobs/bad/job.json":
            raise RuntimeError("unforeseen")
        return read(key)

    monkeypatch.setattr(root.world.store, "read", raising)
    root.start_worker("w")
    root.start_controller()
    root.submit("good", lines(5))
    assert root.outcome("good").status is JobStatus.COMPLETED


class ManualClock(SystemClock):
    """Its monotonic time is set by the test."""

    def __init__(self) -> None:
        self.now_seconds = 0.0

    def monotonic(self) -> float:
        return self.now_seconds


class SteppedController:
    """A controller that the test ticks, with seconds between two ticks."""

    def __init__(self, root: Root, planner: FailingPlanner) -> None:
        self._clock = ManualClock()
        world = replace(root.world, clock=self._clock)
        dispatcher = Dispatcher(world, root.queue, root.beats, settings=DispatchSettings(isolate=True))
        self._controller = JobController(world, dispatcher, planner=planner)
        self.planner = planner

    def tick(self, seconds: float) -> None:
        """One tick, and what it has begun to plan is tried."""
        tried = len(self.planner.tried)
        self._clock.now_seconds += seconds
        self._controller.tick()
        planning = [known.planning for known in self._controller._tracked.values() if known.planning is not None]
        wait_for(lambda: all(one.done() for one in planning), "planning does not end")
        assert len(self.planner.tried) <= tried + 1

    def tick_until(self, condition: Callable[[], object]) -> None:
        for _ in range(100):
            if condition():
                return
            self.tick(5.0)
        raise AssertionError("it does not happen")

    def close(self) -> None:
        self._controller.close()


@pytest.fixture
def stepped(root: Root) -> Iterator[SteppedController]:
    stepped = SteppedController(root, FailingPlanner(root.world, {"bad": ValueError("unforeseen")}))
    root.submit("bad", lines(5))
    yield stepped
    stepped.close()


def attention(root: Root) -> str:
    progress = root.ledger("bad").progress()
    return (progress.attention if progress is not None else None) or ""


def test_given_a_failed_job_that_cant_be_ended_then_it_needs_attention_and_is_not_planned_again(
    root: Root, stepped: SteppedController
) -> None:
    root.world.store.create("jobs/bad/results/part-00000.parquet", b"damaged")
    stepped.tick_until(lambda: "part-00000.parquet" in attention(root))
    for _ in range(400):
        stepped.tick(5.0)
    assert stepped.planner.tried == ["bad"] * 3
    assert len(failures(root, "bad")) == 3
    assert root.ledger("bad").manifest() is None
    root.world.store.delete("jobs/bad/results/part-00000.parquet")
    stepped.tick_until(root.ledger("bad").manifest)
    assert root.outcome("bad").errors[0].code == "planning_failed"
    assert stepped.planner.tried == ["bad"] * 3


def test_given_a_failure_that_cant_be_recorded_then_its_job_is_not_planned_again_until_it_is(
    root: Root, stepped: SteppedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, refused = root.world.store.create, []

    def full(key: str, content: bytes | Path) -> bool:
        if "/work/planning/" in key:
            refused.append(key)
            raise StoreError("the folder is full")
        return create(key, content)

    with monkeypatch.context() as patch:
        patch.setattr(root.world.store, "create", full)
        for _ in range(400):
            stepped.tick(5.0)
    assert stepped.planner.tried == ["bad"]
    assert 2 <= len(refused) <= 20, "2,000 s: tried again after longer and longer pauses, up to 300 s"
    assert "the folder is full" in attention(root)
    stepped.tick_until(root.ledger("bad").manifest)
    assert root.outcome("bad").errors[0].code == "planning_failed"
    assert stepped.planner.tried == ["bad"] * 3


def test_given_a_job_that_cant_be_planned_now_then_it_is_retried_after_longer_and_longer_pauses(
    root: Root, stepped: SteppedController
) -> None:
    stepped.planner.errors = {"bad": StoreError("away")}
    for _ in range(400):
        stepped.tick(5.0)
    assert 8 <= len(stepped.planner.tried) <= 13, "2,000 s: after 15, 30, 60, … 300 s"
    stepped.planner.errors = {}
    stepped.tick_until(lambda: root.ledger("bad").planned_parts() is not None)


def test_given_a_plan_that_makes_no_progress_then_it_is_ended_and_counts_as_a_failure(root: Root) -> None:
    class StuckPlanner(InProcessPlanner):
        ended = threading.Semaphore(0)

        def plan(self, ledger: JobLedger, *, in_time: bool) -> PlanOutcome:
            assert self.ended.acquire(timeout=HANG_SECONDS)
            raise PlanningFailed("no progress")

        def end_stuck(self) -> None:
            self.ended.release()

    root.submit("stuck", lines(5))
    root.start_controller(planner=StuckPlanner(root.world, open_pinned))
    outcome = root.outcome("stuck", HANG_SECONDS)
    assert outcome.errors[0].code == "planning_failed"
    assert len(failures(root, "stuck")) == 3


@pytest.mark.parametrize("where", ["planner", "heartbeats"])
def test_given_a_part_that_cant_go_on_then_the_controller_stops(
    root: Root, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, calls = threading.Event(), []

    def stopped(*_: object, **__: object) -> NoReturn:
        calls.append(where)
        if len(calls) > 1:  # it was tried again
            stop.set()
        raise ComponentStopped("a wrong address")

    planner = InProcessPlanner(root.world, open_pinned)
    if where == "planner":
        monkeypatch.setattr(planner, "plan", stopped)
    else:
        monkeypatch.setattr(root.beats, "workers", stopped)
    root.submit("job", lines(5))
    controller = root.controller(planner=planner)
    with pytest.raises(ComponentStopped):
        controller.run(stop)
