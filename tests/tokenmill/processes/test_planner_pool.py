"""Jobs of a root are planned in processes of their own: an input costs its own job only, whatever it is made of."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.adapters.system_clock import SystemClock
from pipeline.answers.http_answers import NewAnswer, store_responses
from pipeline.answers.index import AnswerIndex, AnswerStoreCounts
from pipeline.answers.segments import answer_space
from pipeline.dispatcher.dispatch_counts import DispatchMetrics
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import PlanningCancelled, PlanningFailed, PlanOutcome
from pipeline.jobs.submit import submit
from pipeline.ledger.ledger import JobLedger
from pipeline.models.catalog import Catalog
from pipeline.ports import PipelineError
from pipeline.routing.loads import ModelLoad
from pipeline.routing.rules import RuleRouter
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.job import Closing, JobSettings
from schemas.jobs.outcome import JobStatus, Manifest
from schemas.models import CatalogEntry
from schemas.requests.limits import PlanSettings
from schemas.settings.answers import AnswerOptions
from schemas.settings.settings import Settings
from schemas.virtual_models import Conditions, LabelCondition, Rule, VirtualModel
from tests.pipeline.made_jobs import MODELS, PIN, computed, order, report
from tests.waiting import HANG_SECONDS, wait_for
from tokenmill.processes.planner_pool import PlannerPool
from tokenmill.root import Root, open_root
from tokenmill.services.backends import Backends, in_process_backends
from tokenmill.services.service_parts import dispatcher_part

STUCK_SECONDS = 600.0
MEMORY = 512 << 20
SIXTEEN_BYTES = b"PAR1\xff\xff\xff\xff\x04\0\0\0PAR1"


class ManualClock(SystemClock):
    """Its monotonic time is set by the test; counts how often it is read."""

    def __init__(self) -> None:
        self.now_seconds, self.reads = 0.0, 0

    def monotonic(self) -> float:
        self.reads += 1
        return self.now_seconds


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    with open_root(str(tmp_path / "root"), Settings()) as root:
        yield root


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pool(root: Root, clock: ManualClock) -> Iterator[PlannerPool]:
    pool = PlannerPool(root.url, "test", "text", MEMORY, STUCK_SECONDS, clock)
    yield pool
    pool.close()
    assert not pool.pids


def submitted(root: Root, name: str, file: Path, *, cache: bool | None = None) -> JobLedger:
    ledger = root.ledger(name)
    settings = JobSettings(plan=PlanSettings(first_segment_rows=100))
    submit(order(input=pin_input(file), settings=settings, cache=cache), ledger, root.world, job_id=name)
    return ledger


def requests(path: Path, rows: int = 3) -> Path:
    body = {"model": "tiny", "max_tokens": 5}
    lines = (
        {"custom_id": f"r{row}", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": f"row {row}"}}
        for row in range(rows)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_a_planner_process_takes_stored_answers_and_reports_its_lookups(
    root: Root, clock: ManualClock, tmp_path: Path
) -> None:
    world, counts = root.world, AnswerStoreCounts()
    Catalog(world.store).publish(CatalogEntry(pin=PIN, max_model_len=512))
    file = requests(tmp_path / "in.jsonl")
    file.write_text(file.read_text().replace('"max_tokens"', '"temperature": 0, "max_tokens"'))
    pool = PlannerPool(root.url, "test", "text", MEMORY, STUCK_SECONDS, clock, answers=counts)
    first, second = submitted(root, "first", file, cache=True), submitted(root, "second", file, cache=True)
    pool.plan(first, in_time=True)
    (segment,) = first.segments()
    keys = pq.read_table(pa.BufferReader(first.read_shard(segment.shards[0])))["request_hash"].to_pylist()
    answer = NewAnswer(keys[1], {"model": "tiny", "choices": [{"text": "hi"}]}, "http-1", world.clock.now())
    store_responses(AnswerIndex(world.store, world.clock, AnswerOptions()), answer_space("default", None), [answer])
    pool.plan(second, in_time=True)
    pool.close()
    assert (segment.reused, next(second.segments()).reused) == (0, 1)
    assert counts.snapshot() == {"hit": 1, "miss": 5}


@pytest.mark.slow
def test_a_planner_process_gets_loads_and_labels_from_its_parent(
    root: Root, clock: ManualClock, tmp_path: Path
) -> None:
    asked = []

    class Labels:
        def classify(
            self, model: str, texts: Sequence[str], timeout_seconds: float, tenant: str
        ) -> list[tuple[str, float]] | None:
            asked.append((model, list(texts), timeout_seconds, tenant))
            return [("hard" if text.endswith("1") else "easy", 0.9) for text in texts]

    loads = {PIN.key: ModelLoad(0.0, 5.0)}
    hard = LabelCondition(model="judge", labels=("hard",))
    rules = (
        Rule(model="busy", when=Conditions(max_waiting_tokens=4)),
        Rule(model="large", when=Conditions(max_waiting_tokens=5, label=hard)),
        Rule(model="small"),
    )
    virtual = VirtualModel(name="tiny", rules=rules)
    pins = tuple(PIN.model_copy(update={"name": name}) for name in virtual.models)
    ledger = root.ledger("job-a")
    job = order(
        input=pin_input(requests(tmp_path / "in.jsonl")), models=pins, settings=JobSettings(virtual_models=(virtual,))
    )
    submit(job, ledger, root.world, job_id="job-a")
    pool = PlannerPool(root.url, "test", "text", MEMORY, STUCK_SECONDS, clock, RuleRouter(lambda: loads, Labels()))
    try:
        assert pool.plan(ledger, in_time=True) == PlanOutcome()
    finally:
        pool.close()
    (segment,) = ledger.segments()
    assert sorted((shard.model, shard.rows) for shard in segment.shards) == [("large", 1), ("small", 2)]
    assert asked == [("judge", ["row 0", "row 1", "row 2"], 1.0, job.tenant)]


def nested_bomb(path: Path, elements: int) -> Path:
    """One row of messages that share one value of 1 MiB, which the file holds once."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * elements, pa.int32()), pa.array(["A" * (1 << 20)]))
    roles = pa.array(["user"] * elements)
    messages = pa.ListArray.from_arrays(
        pa.array([0, elements], pa.int32()), pa.StructArray.from_arrays([roles, texts], names=["role", "content"])
    )
    pq.write_table(
        pa.table({"custom_id": ["a"], "messages": messages}), path, compression="zstd", store_schema=False,
        dictionary_pagesize_limit=64 << 20, write_statistics=False,
    )  # fmt: skip
    assert path.stat().st_size < 10_000
    return path


def wait_until(what: Callable[[], object]) -> None:
    until = time.monotonic() + HANG_SECONDS
    while not what():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.01)


@pytest.mark.slow
def test_given_a_file_that_takes_more_memory_than_a_plan_may_then_it_fails_alone_and_the_next_is_planned(
    root: Root, pool: PlannerPool, tmp_path: Path
) -> None:
    bomb = submitted(root, "bomb", nested_bomb(tmp_path / "bomb.parquet", 1_500))
    outcome = pool.plan(bomb, in_time=True)
    assert outcome.refused is not None
    assert "bomb.parquet: row group 1 of 1: can't be decoded" in outcome.refused
    good = submitted(root, "good", requests(tmp_path / "good.jsonl"))
    assert pool.plan(good, in_time=True).refused is None
    assert good.planned_parts() == {0, 1}


@pytest.mark.slow
def test_one_process_plans_many_jobs(root: Root, pool: PlannerPool, tmp_path: Path) -> None:
    pids = set()
    for number in range(5):
        pool.plan(submitted(root, f"job-{number}", requests(tmp_path / "in.jsonl")), in_time=True)
        pids |= pool.pids
    assert len(pids) == 1
    (tmp_path / "away.jsonl").write_text("{}\n")
    away = submitted(root, "away", tmp_path / "away.jsonl")
    (tmp_path / "away.jsonl").unlink()
    refused = pool.plan(away, in_time=True).refused
    assert refused is not None
    assert "away.jsonl: can't read the input" in refused
    assert pool.pids == pids


@contextmanager
def being_planned(root: Root, pool: PlannerPool, tmp_path: Path) -> Iterator[tuple[JobLedger, Future[PlanOutcome]]]:
    """A large job whose first segment is committed, and the outcome of its planning."""
    large = submitted(root, "large", requests(tmp_path / "large.jsonl", 20_000))
    with ThreadPoolExecutor(1) as thread:
        planning = thread.submit(pool.plan, large, in_time=True)
        wait_until(lambda: large.segment(0))
        yield large, planning


@pytest.mark.slow
def test_given_a_planner_that_is_killed_then_its_job_is_blamed_and_another_process_goes_on(
    root: Root, pool: PlannerPool, tmp_path: Path
) -> None:
    with being_planned(root, pool, tmp_path) as (large, planning):
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            PlanningFailed, match=r"ended by signal SIGKILL; planning may have needed more than 512 MiB"
        ):
            planning.result()
    assert pool.plan(large, in_time=True).refused is None
    assert large.planned_parts() is not None
    assert pid not in pool.pids


@pytest.mark.slow
def test_given_a_planner_that_another_process_stops_then_its_job_has_no_failure(
    root: Root, pool: PlannerPool, tmp_path: Path
) -> None:
    with being_planned(root, pool, tmp_path) as (_large, planning):
        (pid,) = pool.pids
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(PipelineError, match="a planner process was stopped"):
            planning.result()


@pytest.mark.slow
def test_given_a_plan_under_way_when_the_pool_is_closed_then_its_processes_end_and_nothing_is_blamed(
    root: Root, pool: PlannerPool, tmp_path: Path
) -> None:
    with being_planned(root, pool, tmp_path) as (_large, planning):
        pool.close()
        with pytest.raises(PipelineError, match="planning ends with this process"):
            planning.result()
    assert not pool.pids


@pytest.mark.slow
def test_given_a_job_that_was_closed_before_it_was_planned_then_the_pool_returns_its_outcome(
    root: Root, pool: PlannerPool, tmp_path: Path
) -> None:
    closed = submitted(root, "closed", requests(tmp_path / "closed.jsonl"))
    closed.create_closing(Closing(kind="cancel", at=root.world.clock.now()))
    assert pool.plan(closed, in_time=True).closed is JobStatus.CANCELLED


@pytest.mark.slow
def test_given_processes_that_cant_open_the_root_then_no_job_is_blamed(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted(root, "job", requests(tmp_path / "in.jsonl"))
    no_root = str(tmp_path / "in.jsonl")
    away = PlannerPool(no_root, "test", "text", MEMORY, STUCK_SECONDS, root.world.clock)
    with pytest.raises(PipelineError, match="a planner process ended with code 1 before it had a job"):
        away.plan(job, in_time=True)
    assert not away.pids
    monkeypatch.setattr("sys.executable", str(tmp_path / "missing"))
    with pytest.raises(PipelineError, match="no planner process can be started"):
        away.plan(job, in_time=True)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_given_a_plan_under_way_when_it_is_cancelled_then_its_process_ends_without_blame_and_others_are_planned(
    root: Root, pool: PlannerPool, tmp_path: Path
) -> None:
    with being_planned(root, pool, tmp_path) as (large, planning):
        (pid,) = pool.pids
        for _ in range(2):
            pool.cancel("large")
        with pytest.raises(PlanningCancelled, match="the job is closed"):
            planning.result()
    assert not pool.pids
    pool.cancel("large")
    assert pool.plan(large, in_time=True).refused is None
    assert large.planned_parts() is not None
    assert pid not in pool.pids


def planning_of(pool: PlannerPool, job: JobLedger, thread: ThreadPoolExecutor) -> Future[PlanOutcome]:
    """A plan in progress, whose first segment is committed."""
    planning = thread.submit(pool.plan, job, in_time=True)
    wait_for(lambda: planning.done() or job.segment(0), "no segment was planned")
    return planning


@pytest.mark.slow
@pytest.mark.exhaustive
def test_given_a_stopped_planner_when_it_reports_no_progress_for_too_long_then_it_is_killed_and_its_job_is_blamed(
    root: Root, pool: PlannerPool, clock: ManualClock, tmp_path: Path
) -> None:
    large = submitted(root, "large", requests(tmp_path / "large.jsonl", 20_000))
    with ThreadPoolExecutor(1) as thread:
        planning = planning_of(pool, large, thread)
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: "T (stopped)" in Path(f"/proc/{pid}/status").read_text(), "it is not stopped")
        seen = -1
        while seen != clock.reads:  # what it had reported before is read
            seen = clock.reads
            time.sleep(0.2)
        clock.now_seconds += STUCK_SECONDS
        pool.end_stuck()
        assert pool.pids == {pid}, "it was not silent for too long"
        clock.now_seconds += 1
        pool.end_stuck()
        with pytest.raises(PlanningFailed, match=r"no progress for 600 s \(setting planner_stuck_seconds\), and its"):
            planning.result(HANG_SECONDS)
    assert pool.plan(large, in_time=True).refused is None
    assert large.planned_parts() is not None


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "blank"])
def test_given_a_large_input_that_moves_on_then_its_planner_is_not_killed_however_long_it_takes(
    root: Root, pool: PlannerPool, clock: ManualClock, tmp_path: Path, kind: str
) -> None:
    """The clock goes on by nearly half the limit after each report; the plan takes many times the limit."""
    path = tmp_path / f"large.{'parquet' if kind == 'parquet' else 'jsonl'}"
    if kind == "jsonl":
        requests(path, 60_000)
    elif kind == "parquet":
        names = [str(row) for row in range(60_000)]
        pq.write_table(pa.table({"custom_id": names, "prompt": names}), path, row_group_size=60_000)
    else:  # one line beyond all limits: bytes are read, but no rows
        with path.open("wb") as stream:
            stream.truncate(1 << 31)
    large = submitted(root, "large", path)
    with ThreadPoolExecutor(1) as thread:
        planning = thread.submit(pool.plan, large, in_time=True)
        reports = 0
        while not planning.done():
            clock.reads = 0
            wait_for(lambda: clock.reads or planning.done(), "no progress is reported")
            clock.now_seconds += 0.45 * STUCK_SECONDS
            pool.end_stuck()
            reports += 1
        assert planning.result().refused is None
    assert reports > 4, "the plan was too short to show anything"


@pytest.mark.slow
def test_given_a_stopped_planner_when_its_job_is_cancelled_then_it_is_killed_without_blame(
    root: Root, pool: PlannerPool, tmp_path: Path
) -> None:
    large = submitted(root, "large", requests(tmp_path / "large.jsonl", 20_000))
    with ThreadPoolExecutor(1) as thread:
        planning = planning_of(pool, large, thread)
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        pool.cancel("large")
        with pytest.raises(PlanningCancelled):
            planning.result(HANG_SECONDS)
    assert not pool.pids


@pytest.mark.slow
def test_given_a_planner_that_is_stopped_before_it_has_its_job_when_that_is_cancelled_then_it_is_killed(
    root: Root, pool: PlannerPool, tmp_path: Path
) -> None:
    job = submitted(root, "job", requests(tmp_path / "in.jsonl"))
    with ThreadPoolExecutor(1) as thread:
        planning = thread.submit(pool.plan, job, in_time=True)
        (pid,) = wait_for(lambda: pool.pids, "no process is started")
        os.kill(pid, signal.SIGSTOP)
        pool.cancel("job")
        with pytest.raises(PlanningCancelled):
            planning.result(HANG_SECONDS)
    assert not pool.pids


class Installed:
    """The dispatcher as `serve` and `dispatcher` run it, and a worker, on threads."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._stop = threading.Event()
        backends = in_process_backends(root, Settings())
        dispatch = dispatcher_part(root, backends, Settings(), DispatchMetrics())
        self._threads = [
            threading.Thread(target=dispatch, args=(self._stop,)), threading.Thread(target=self._work, args=(backends,))
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def _work(self, backends: Backends) -> None:
        world, ledger = self._root.world, self._root.ledger
        client = ShardClient("w", world, ledger, backends.queue, backends.heartbeats, lambda: False, models=MODELS)
        while not self._stop.is_set():
            if (shard := client.take(0.01)) is not None:
                client.begin(shard)
                client.commit(shard, computed(shard), report(shard))

    def outcome(self, name: str) -> Manifest:
        ledger = self._root.ledger(name)
        wait_until(ledger.manifest)
        assert self._threads[0].is_alive()
        manifest = ledger.manifest()
        assert manifest is not None
        return manifest

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_given_a_damaged_file_of_16_bytes_when_it_is_served_then_its_job_fails_and_others_complete_also_after_a_restart(
    root: Root, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(SIXTEEN_BYTES)
    for life in ("first", "second"):
        submitted(root, f"damaged-{life}", damaged)
        submitted(root, f"good-{life}", requests(tmp_path / "good.jsonl"))
        installed = Installed(root)
        try:
            refused = installed.outcome(f"damaged-{life}")
            assert (refused.status, refused.errors[0].code) == (JobStatus.FAILED, "input_unreadable")
            assert refused.errors[0].message.startswith(f"{damaged} is not a Parquet file: can't be decoded")
            assert installed.outcome(f"good-{life}").status is JobStatus.COMPLETED
        finally:
            installed.close()
