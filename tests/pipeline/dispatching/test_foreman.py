"""A root with many jobs: each is found, planned and ended, whoever dies and whatever is broken beside it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from pipeline.adapters.folder import FolderStore
from pipeline.adapters.memory_heartbeats import MemoryHeartbeats
from pipeline.adapters.memory_queue import MemoryQueue
from pipeline.adapters.system import SystemClock, SystemRandomness
from pipeline.dispatching.dispatcher import Dispatcher, DispatchSettings
from pipeline.dispatching.foreman import Foreman, ForemanSettings
from pipeline.ledger import JobLedger
from pipeline.pinning import pin_input
from pipeline.ports import Lease, WorkerState, World
from pipeline.shard_client import ShardClient
from pipeline.submit import submit
from schemas.job import Closing, JobSettings, OnInvalid
from schemas.limits import PlanSettings
from schemas.outcome import JobStatus, Manifest
from tests.pipeline.made_jobs import MODELS, computed, order, report

SETTINGS = ForemanSettings(tick_every=0.002, look_every=0.01, retry_after=0.05, renew_every=0.02)


class Table:
    """A lease that two contend for, and that is free when its holder gives it back."""

    def __init__(self) -> None:
        self.holder: str | None = None
        self._lock = threading.Lock()

    def lease(self, name: str) -> Lease:
        table = self

        class OneSide:
            def renew(self) -> bool:
                with table._lock:
                    table.holder = table.holder or name
                    return table.holder == name

            def release(self) -> None:
                with table._lock:
                    table.holder = None if table.holder == name else table.holder

        return OneSide()


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

    def foreman(self, lease: Lease | None = None) -> Foreman:
        settings = DispatchSettings(isolate=True, patience=0.5, sweep_every=0.2)
        dispatcher = Dispatcher(self.world, self.queue, self.beats, settings=settings)
        return Foreman(self.world, dispatcher, settings=SETTINGS, lease=lease)

    def start_foreman(self, lease: Lease | None = None, stop: threading.Event | None = None) -> None:
        self._start(lambda: self.foreman(lease).run(stop or self.stop))

    def start_worker(self, name: str) -> None:
        def work() -> None:
            client = ShardClient(name, self.world, self.ledger, self.queue, self.beats, lambda: False, models=MODELS)
            while not self.stop.is_set():
                shard = client.take(0.01)
                if shard is not None:
                    client.begin(shard)
                    client.commit(shard, computed(shard), report(shard))

        self._start(work)

    def outcome(self, name: str, seconds: float = 30.0) -> Manifest:
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
            thread.join(30)


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
    table = Table()
    for name in "ab":
        root.start_foreman(table.lease(name))
    root.submit("job-2", lines(9))
    root.submit("job-3", [*lines(3), "not json"])
    for name, total, failed in (("job-1", 50, 10), ("job-2", 9, 1), ("job-3", 4, 1)):
        manifest = root.outcome(name)
        assert (manifest.status, manifest.counts.total) == (JobStatus.COMPLETED, total)
        assert manifest.counts.failed == failed
        assert manifest.usage.repeated == 0
    until = time.monotonic() + 30
    while list(root.world.store.list("active/")) and time.monotonic() < until:
        time.sleep(0.01)
    assert list(root.world.store.list("active/")) == []


def test_a_job_that_cant_be_planned_ends_as_failed_and_holds_up_nobody(root: Root) -> None:
    root.submit("gone", lines(5))
    (root.folder / "gone.jsonl").unlink()
    root.submit("refused", [*lines(2), "not json"], OnInvalid.JOB)
    root.submit("good", lines(5))
    root.start_worker("w")
    root.start_foreman()
    assert root.outcome("good").status is JobStatus.COMPLETED
    assert root.outcome("refused").status is JobStatus.FAILED
    gone = root.outcome("gone")
    assert gone.status is JobStatus.FAILED
    assert gone.errors[0].code == "input_unreadable"
    assert "gone.jsonl" in gone.errors[0].message


def test_a_damaged_job_is_left_alone_and_the_others_go_on(root: Root) -> None:
    root.submit("damaged", lines(30))
    root.submit("unreadable", lines(3))
    (root.folder / "root/jobs/unreadable/job.json").write_text("{")
    root.start_foreman()
    deadline = time.monotonic() + 30
    while root.ledger("damaged").wanted_parts() is None and time.monotonic() < deadline:
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
    root.start_foreman()
    assert root.outcome("job-1").status is JobStatus.COMPLETED


def test_when_who_leads_ends_another_takes_over(root: Root) -> None:
    table, first = Table(), threading.Event()
    root.start_foreman(table.lease("a"), first)
    deadline = time.monotonic() + 30
    while table.holder is None and time.monotonic() < deadline:
        time.sleep(0.01)
    root.start_foreman(table.lease("b"))
    first.set()
    root.submit("job-1", lines(9))
    root.start_worker("w")
    assert root.outcome("job-1").status is JobStatus.COMPLETED
    assert table.holder == "b"


def test_two_that_both_believe_they_lead_do_no_harm(root: Root) -> None:
    root.submit("job-1", lines(60))
    for name in ("one", "two"):
        root.start_worker(name)
        root.start_foreman()
    manifest = root.outcome("job-1")
    assert (manifest.counts.total, manifest.counts.failed) == (60, 12)


@pytest.mark.parametrize(("speed", "refused"), [(10.0, True), (10_000.0, False), (None, False)])
def test_a_job_that_would_be_late_is_refused_if_it_asked_for_that(
    root: Root, speed: float | None, refused: bool
) -> None:
    # 100 rows of some 20 tokens within 30 seconds.
    root.beats.beat(WorkerState("measured", frozenset(MODELS), tokens_per_second=speed))
    root.submit("asks", lines(100), deadline=timedelta(seconds=30), refuse_late=True)
    root.submit("doesnt", lines(100), deadline=timedelta(seconds=30))
    root.start_foreman()
    root.start_worker("w")
    assert root.outcome("doesnt").status is JobStatus.COMPLETED
    outcome = root.outcome("asks")
    assert outcome.status is (JobStatus.FAILED if refused else JobStatus.COMPLETED)
    if refused:
        assert outcome.errors[0].code == "deadline_unreachable"
        assert "its deadline is 20" in outcome.errors[0].message
        assert list(root.world.store.list("jobs/asks/results/")) == []
        assert list(root.world.store.list("jobs/asks/plan")) == []


def test_a_job_that_is_removed_while_it_is_open_holds_up_nobody(root: Root) -> None:
    root.submit("removed", lines(30))
    root.start_foreman()
    until = time.monotonic() + 30
    while root.ledger("removed").wanted_parts() is None and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)  # its first shards are on the queue
    for info in list(root.world.store.list("jobs/removed/")):
        root.world.store.delete(info.key)
    root.submit("good", lines(30))
    root.start_worker("w")
    assert root.outcome("good").status is JobStatus.COMPLETED


def test_a_job_whose_shard_is_lost_is_left_alone_and_the_others_go_on(root: Root) -> None:
    """Its closer asks for the shard at each look; what it raises must not end the look at all other jobs."""
    root.submit("lost", lines(3))
    stop = threading.Event()
    root.start_foreman(stop=stop)
    until = time.monotonic() + 30
    while root.ledger("lost").wanted_parts() is None and time.monotonic() < until:
        time.sleep(0.01)
    stop.set()
    for info in list(root.world.store.list("jobs/lost/plans/")):
        if "/shards/" in info.key:
            root.world.store.delete(info.key)
    root.ledger("lost").create_closing(Closing(kind="cancel", at=root.world.clock.now()))
    root.submit("good", lines(5))
    root.start_foreman()
    root.start_worker("w")
    assert root.outcome("good").status is JobStatus.COMPLETED
    assert root.ledger("lost").manifest() is None
