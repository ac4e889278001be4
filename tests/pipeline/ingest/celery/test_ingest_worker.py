"""Celery ingest on a real Redis, from the side of a caller that knows only the tasks' names."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, current_app
from celery.result import AsyncResult

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.controller import JobController, JobControllerSettings
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.ingest.celery.generate_task import GenerateCalls
from pipeline.ingest.celery.ingest_worker import CeleryIngestSettings, CeleryIngestWorker, make_app
from pipeline.ingest.celery.tasks import CeleryTasks, TaskSettings
from pipeline.ingest.intake import Intake, IntakeSettings
from pipeline.inputs.pinning import pin_input
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import LaneQueue
from pipeline.ledger.ledger import JobLedger
from pipeline.models.catalog import Catalog
from pipeline.models.virtual_models import ModelResolver
from pipeline.ports import World
from pipeline.runtime.availability import BadAddress
from pipeline.worker_client.shard_client import ShardClient
from schemas.models import CatalogEntry
from schemas.workers.lane import EndEvent
from tests.pipeline.made_jobs import MODELS, PIN, computed, report
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS

WAIT = HANG_SECONDS


def requests(count: int) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"id-{row}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "max_tokens": 5, "prompt": f"row {row}"},
        }
        for row in range(count)
    ]


class CeleryHarness:
    """A root, Celery ingest workers on threads, and a caller."""

    def __init__(self, folder: Path, store: FolderStore, url: str, queue: str) -> None:
        self.world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        self.url, self.queue, self.folder = url, queue, folder
        self.stop, self.threads = threading.Event(), list[threading.Thread]()
        self.caller = Celery("caller", broker=url, backend=url, set_as_current=False)
        self.caller.conf.update(task_serializer="json", accept_content=["json"], redis_socket_timeout=5)

    def publish(self) -> None:
        Catalog(self.world.store).publish(CatalogEntry(pin=PIN, max_model_len=2_048))

    def ingest(
        self,
        queues: dict[str, str] | None = None,
        intake: IntakeSettings | None = None,
        generating: GenerateCalls | None = None,
        **settings: Any,
    ) -> None:
        tasks = CeleryTasks(
            self.world,
            Intake(self.world, intake),
            lambda uri: pin_input(Path(uri)),
            TaskSettings({"default": [f"file://{self.folder}/"]}),
        )
        # Redis may stall on a busy disk for longer than the worker's time-outs: the tasks that the worker then leaves
        # behind are delivered again well before the test's own time-out.
        of_test = {
            "first_retry_seconds": 0.1,
            "max_retry_seconds": 0.3,
            "reconnect_seconds": 0.1,
            "timeout_seconds": 2.0,
            "visibility_timeout_seconds": 5.0,
        }
        of_test |= settings
        chosen = CeleryIngestSettings(self.url, queues=queues or {self.queue: "default"}, **of_test)
        self.start(CeleryIngestWorker(tasks, chosen, self.world, generating).run)

    def start(self, part: Callable[[threading.Event], None]) -> None:
        self.threads.append(threading.Thread(target=part, args=(self.stop,)))
        self.threads[-1].start()

    def call(self, name: str, *args: Any, task_id: str | None = None, queue: str = "", **options: Any) -> AsyncResult:
        return self.caller.send_task(f"tokenmill.{name}", args, options, queue=queue or self.queue, task_id=task_id)

    def run_task(self, name: str, *args: Any, **options: Any) -> Any:
        return self.call(name, *args, **options).get(timeout=HANG_SECONDS)

    def jobs(self) -> list[str]:
        return [prefix.split("/")[1] for prefix in self.world.store.folders("jobs/")]

    def close(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(HANG_SECONDS)
        assert not any(thread.is_alive() for thread in self.threads)
        self.caller.close()


@pytest.fixture(scope="module")
def ending() -> Iterator[ExitStack]:
    """A worker may take two seconds to end: all end at once, when the last test has run."""
    with ExitStack() as ending:
        yield ending


@pytest.fixture(scope="module", autouse=True)
def _results_that_go_in_silence() -> Iterator[None]:
    """Celery's unsubscribe when they are collected, with retries for 20 seconds where their server is gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(AsyncResult, "__del__")
        yield


@pytest.fixture
def harness(
    tmp_path: Path, redis_server: RedisServer, unique_name: Callable[[], str], ending: ExitStack
) -> Iterator[CeleryHarness]:
    store = ending.enter_context(FolderStore(tmp_path / "root"))
    harness = CeleryHarness(tmp_path, store, redis_server.url, unique_name())
    ending.callback(harness.close)
    harness.publish()
    yield harness
    harness.stop.set()


def eventually(there: Callable[[], Any], seconds: float = WAIT) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_file_and_inline_requests_go_the_whole_way_to_an_outcome(harness: CeleryHarness) -> None:
    harness.ingest()
    source = harness.folder / "rows.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in requests(200)))
    world, queue = harness.world, MemoryQueue()
    beats = MemoryHeartbeats(world.clock, 10.0)
    controller = JobController(
        world, Dispatcher(world, queue, beats, settings=DispatchSettings()), settings=JobControllerSettings(0.01, 0.05)
    )
    harness.start(controller.run)

    def work(stop: threading.Event) -> None:
        def ledger(name: str) -> JobLedger:
            return JobLedger(world.store, f"jobs/{name}/")

        client = ShardClient("w", world, ledger, queue, beats, lambda: False, models=MODELS)
        while not stop.is_set():
            shard = client.take(0.01)
            if shard is not None:
                client.begin(shard)
                client.commit(shard, computed(shard), report(shard))

    harness.start(work)
    by_uri = harness.run_task("submit", f"file://{source}", model="tiny", metadata={"from": "file"})
    inline = harness.run_task("submit", requests(10), tier="bulk")
    for job_id, total in (by_uri, 200), (inline, 10):
        eventually(lambda job_id=job_id: harness.run_task("status", job_id)["status"] == "completed")
        batch = harness.run_task("status", job_id)
        failed = total // 5  # as this worker answers
        assert batch["request_counts"] == {"total": total, "completed": total - failed, "failed": failed}
        assert batch["usage"]["output_tokens"] > 0
        assert batch["completed_at"] >= batch["created_at"]
        assert len(list(Path(batch["tokenmill"]["results"]).glob("part-*.parquet"))) >= 2
    assert harness.run_task("status", by_uri)["metadata"] == {"from": "file"}
    assert harness.run_task("status", inline)["tokenmill"]["tier"] == "bulk"


def test_the_same_task_delivered_thrice_and_at_two_workers_at_once_is_one_job(harness: CeleryHarness) -> None:
    for _ in range(3):
        harness.call("submit", requests(3), task_id="the-task")
    harness.ingest()
    harness.ingest()
    first = harness.call("submit", requests(3), task_id="the-task").get(timeout=HANG_SECONDS)
    client = redis.Redis.from_url(harness.url)
    eventually(lambda: client.llen(harness.queue) == 0 and client.hlen(f"{harness.queue}.unacked") == 0)
    assert harness.jobs() == [first]
    assert harness.run_task("submit", requests(3)) != first


@pytest.mark.slow
def test_a_task_whose_worker_died_is_delivered_again_and_other_programs_tasks_stay(
    harness: CeleryHarness,
) -> None:
    client = redis.Redis.from_url(harness.url)
    sent = harness.call("submit", requests(1))
    taken = json.loads(client.lpop(harness.queue))
    tag = taken["properties"]["delivery_tag"]
    dead = json.dumps([taken, "", harness.queue])
    client.hset(f"{harness.queue}.unacked", tag, dead)  # as a worker leaves it that is killed
    client.zadd(f"{harness.queue}.unacked_index", {tag: time.time() - 60})
    foreign = f"{tag}-foreign"
    client.hset("unacked", foreign, dead)
    client.zadd("unacked_index", {foreign: time.time() - 60})
    harness.ingest(visibility_timeout_seconds=1.0)
    assert sent.get(timeout=HANG_SECONDS) == harness.jobs()[0]
    time.sleep(0.3)
    assert client.hexists("unacked", foreign)
    client.hdel("unacked", foreign)
    client.zrem("unacked_index", foreign)


@pytest.mark.parametrize(
    ("name", "args", "options", "kind", "message"),
    [
        ("submit", [[]], {}, "TaskRefused", "invalid_request: the list of requests is empty; give at least one"),
        ("submit", [], {}, "TaskRefused", "invalid_request: tokenmill.submit takes one uri_or_requests, not 0"),
        ("submit", [[1]], {}, "TaskRefused", "invalid_request: requests[0] is of type int; give an object"),
        ("submit", [requests(1)], {"model": "x"}, "TaskRefused", "model_not_found: model 'x' is not served here"),
        ("submit", [requests(1)], {"colour": 1}, "TaskRefused", "invalid_options: colour: "),
        ("submit", ["/etc/x.jsonl"], {}, "TaskRefused", "forbidden_uri: "),
        ("submit", [[{"a": "x" * 5_000_000}]], {}, "TaskRefused", "too_large: "),
        ("status", ["job-none"], {}, "TaskRefused", "job_not_found: there is no job 'job-none'"),
        ("cancel", [7], {}, "TaskRefused", "job_not_found: there is no job '7'"),
        ("status", ["job-1"], {"verbose": True}, "TaskRefused", "invalid_request: tokenmill.status takes id only"),
        ("generate", [{}], {}, "TaskRefused", "unavailable: no Redis is named here for the lane"),
    ],
)
def test_the_caller_gets_the_error_in_a_line_of_json(
    shared_harness: CeleryHarness, name: str, args: list[Any], options: dict[str, Any], kind: str, message: str
) -> None:
    sent = shared_harness.call(name, *args, **options)
    error = sent.get(timeout=WAIT, propagate=False)
    stored = json.loads(redis.Redis.from_url(shared_harness.url).get(f"celery-task-meta-{sent.id}"))
    assert stored["status"] == "FAILURE"
    assert stored["result"]["exc_type"] == kind
    (line,) = stored["result"]["exc_message"]
    assert line.startswith(message)
    assert "\n" not in line
    assert line in str(error)


@pytest.fixture(scope="module")
def shared_harness(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[CeleryHarness]:
    """For requests that change nothing."""
    folder = tmp_path_factory.mktemp("celery")
    with FolderStore(folder / "root") as store:
        harness = CeleryHarness(folder, store, redis_server.url, folder.name)
        harness.publish()
        harness.ingest()
        yield harness
        harness.close()


def test_the_queue_determines_the_tenant_and_nothing_in_a_message_does(harness: CeleryHarness) -> None:
    other = f"{harness.queue}-other"
    harness.ingest({harness.queue: "default", other: "acme"})
    ours, theirs = harness.run_task("submit", requests(1)), harness.run_task("submit", requests(1), queue=other)
    tenants = {job: JobLedger(harness.world.store, f"jobs/{job}/").job().tenant for job in harness.jobs()}
    assert tenants == {ours: "default", theirs: "acme"}
    with pytest.raises(Exception, match="job_not_found"):
        harness.run_task("cancel", ours, queue=other)
    client = redis.Redis.from_url(harness.url)
    sent = harness.caller.send_task("tokenmill.submit", [requests(2)], queue=f"{harness.queue}-unread")
    forged = json.loads(client.lpop(f"{harness.queue}-unread"))
    forged["properties"]["delivery_info"] = {"exchange": "", "routing_key": harness.queue, "priority": 0}
    client.lpush(other, json.dumps(forged))
    assert JobLedger(harness.world.store, f"jobs/{sent.get(timeout=HANG_SECONDS)}/").job().tenant == "acme"


@pytest.mark.slow
def test_without_room_the_task_is_retried_and_finally_the_caller_gets_the_error(harness: CeleryHarness) -> None:
    full = IntakeSettings(max_tenant_tokens=1, refresh_interval_seconds=0.05)
    harness.ingest(intake=full, max_attempts=4)
    first = harness.run_task("submit", requests(5))
    waiting = harness.call("submit", requests(6))
    eventually(lambda: waiting.state == "FAILURE")
    with pytest.raises(Exception, match="no_room: too much is queued already; submit again when some of it is done"):
        waiting.get(timeout=HANG_SECONDS)
    assert harness.jobs() == [first]
    retrying = f"{harness.queue}-retrying"
    harness.ingest({retrying: "default"}, intake=full, max_attempts=1_000)
    waiting = harness.call("submit", requests(6), queue=retrying)
    eventually(lambda: waiting.state == "RETRY")
    harness.world.store.delete(f"active/{first}")
    assert waiting.get(timeout=HANG_SECONDS) != first


@pytest.mark.slow
def test_a_waiting_task_can_be_revoked(harness: CeleryHarness) -> None:
    harness.ingest(intake=IntakeSettings(max_tenant_tokens=1, refresh_interval_seconds=0.05), max_attempts=1_000)
    first = harness.run_task("submit", requests(5))
    waiting = harness.call("submit", requests(6))
    eventually(lambda: waiting.state == "RETRY")
    waiting.revoke()
    eventually(lambda: waiting.state == "REVOKED")
    harness.world.store.delete(f"active/{first}")
    time.sleep(1.0)
    assert harness.jobs() == [first]


@pytest.mark.slow
def test_a_waiting_task_outlives_a_broker_that_takes_nothing_for_a_while(harness: CeleryHarness) -> None:
    full = IntakeSettings(max_tenant_tokens=1, refresh_interval_seconds=0.05)
    harness.ingest(intake=full, max_attempts=1_000, visibility_timeout_seconds=1.0)
    first = harness.run_task("submit", requests(5))
    waiting = harness.call("submit", requests(6))
    eventually(lambda: waiting.state == "RETRY")
    client = redis.Redis.from_url(harness.url)
    client.config_set("maxmemory", "1")
    try:
        time.sleep(1.5)
    finally:
        client.config_set("maxmemory", "0")
    harness.world.store.delete(f"active/{first}")
    assert waiting.get(timeout=HANG_SECONDS) != first


def test_a_message_that_is_taken_from_a_full_redis_is_held_until_it_is_acknowledged(harness: CeleryHarness) -> None:
    tasks = CeleryTasks(harness.world, Intake(harness.world), lambda uri: pin_input(Path(uri)), TaskSettings({}))
    app = make_app(tasks, harness.queue, "default", CeleryIngestSettings(harness.url), harness.world.random)
    client, taken = redis.Redis.from_url(harness.url), list[Any]()
    harness.call("status", "job-1", task_id="the-task")
    with app.connection_for_read() as connection, connection.channel() as channel:
        consumer = app.amqp.TaskConsumer(channel, queues=[app.amqp.queues[harness.queue]], on_message=taken.append)
        with consumer:
            client.config_set("maxmemory", "1")
            try:
                connection.drain_events(timeout=HANG_SECONDS)
            finally:
                client.config_set("maxmemory", "0")
            (held,) = client.hvals(f"{harness.queue}.unacked")
            assert json.loads(held)[0]["headers"]["id"] == "the-task"
            assert client.zcard(f"{harness.queue}.unacked_index") == 1
            taken[0].ack()
    assert client.exists(harness.queue, f"{harness.queue}.unacked", f"{harness.queue}.unacked_index") == 0
    app.close()


def test_a_single_answer_is_stored_for_its_caller_and_nothing_can_be_linked_to_it(harness: CeleryHarness) -> None:
    lane = MemoryLane(harness.world.clock)
    harness.ingest(
        generating=GenerateCalls(lane, ModelResolver(harness.world.store, harness.world.clock), harness.world.clock)
    )
    body = {"model": "tiny", "prompt": "x"}
    sent = harness.call("generate", body, "bulk", timeout=20)
    (one,) = lane.worker("w").take([LaneQueue(PIN.key)], 1, WAIT)
    assert (one.tier.value, one.body) == ("bulk", body)
    lane.worker("w").emit([EndEvent(one.id, 1, 0, {"id": "cmpl-1"})])
    assert sent.get(timeout=HANG_SECONDS) == {"id": "cmpl-1"}
    classified = harness.call("generate", {"model": "tiny", "input": "x"}, url="/v1/classify")
    (one,) = lane.worker("w").take([LaneQueue(PIN.key)], 1, WAIT)
    lane.worker("w").emit([EndEvent(one.id, 1, 0, {"id": "classify-1"})])
    assert (one.url, classified.get(timeout=HANG_SECONDS)) == ("/v1/classify", {"id": "classify-1"})
    linked = harness.caller.signature("tokenmill.generate", args=[body]).set(queue=harness.queue)
    linked.link(harness.caller.signature("theirs.next").set(queue="theirs"))
    with pytest.raises(Exception, match="nothing can be linked to"):
        linked.apply_async().get(timeout=HANG_SECONDS)


def test_a_job_is_cancelled_by_its_id(harness: CeleryHarness) -> None:
    harness.ingest()
    job_id = harness.run_task("submit", requests(5))
    assert harness.run_task("cancel", job_id)["status"] == "cancelling"
    closing = JobLedger(harness.world.store, f"jobs/{job_id}/").closing()
    assert closing is not None
    assert closing.kind == "cancel"


@pytest.mark.slow
def test_ingest_survives_a_restart_of_its_broker(harness: CeleryHarness, redis_server: RedisServer) -> None:
    harness.ingest()
    first = harness.run_task("submit", requests(1))
    for end in (redis_server.kill, redis_server.start_empty):
        end()
        if end == redis_server.kill:
            time.sleep(0.5)
            redis_server.start()
        later = harness.run_task("submit", requests(2))
        assert harness.run_task("status", first)["id"] == first
        assert later in harness.jobs()


@pytest.mark.slow
def test_a_broker_that_hangs_is_given_up_and_found_again(harness: CeleryHarness, redis_server: RedisServer) -> None:
    harness.ingest(timeout_seconds=0.5)
    harness.run_task("submit", requests(1))
    redis_server.pause()
    time.sleep(1.5)
    redis_server.resume()
    assert len({*harness.jobs(), harness.run_task("submit", requests(2))}) == 2


@pytest.mark.slow
def test_a_result_backend_that_stalls_is_no_failure_of_the_task(harness: CeleryHarness, tmp_path: Path) -> None:
    """By default Celery reports a socket time-out to the caller, and executes the task all the same."""
    (tmp_path / "results").mkdir()
    with RedisServer(tmp_path / "results") as results:
        results.start()
        harness.caller.conf.update(
            result_backend=results.url, result_backend_transport_options={"retry_policy": {"max_retries": 1}}
        )
        try:
            assert answered_over_stalls(harness, results) in harness.jobs()
        finally:
            harness.close()


def answered_over_stalls(harness: CeleryHarness, results: RedisServer) -> str:
    """The result that a waiting caller gets while the result backend stalls."""
    full = IntakeSettings(max_tenant_tokens=1, refresh_interval_seconds=0.05)
    harness.ingest(intake=full, max_attempts=1_000, timeout_seconds=0.4, max_retry_seconds=0.1, result_url=results.url)
    first = harness.run_task("submit", requests(5))
    waiting = harness.call("submit", requests(6))
    eventually(lambda: waiting.state == "RETRY")
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: AsyncResult(waiting.id, app=harness.caller).get(timeout=HANG_SECONDS))
        for _ in range(4):  # too long to store the retry, too short to prevent that the failure is stored
            results.pause()
            time.sleep(0.6)
            results.resume()
            time.sleep(0.1)
        harness.world.store.delete(f"active/{first}")
        job: str = result.result(HANG_SECONDS)
    return job


@pytest.mark.slow
def test_ingest_can_be_stopped_while_its_broker_is_away(harness: CeleryHarness, redis_server: RedisServer) -> None:
    redis_server.kill()
    harness.ingest()
    time.sleep(0.5)
    harness.stop.set()
    harness.threads[0].join(HANG_SECONDS)
    assert not harness.threads[0].is_alive()


@pytest.mark.slow
def test_a_pickle_is_never_read_and_the_processs_own_celery_is_let_be(harness: CeleryHarness) -> None:
    before = current_app._get_current_object()
    its_broker = before.conf.broker_url
    harness.ingest()
    sent = harness.caller.send_task("tokenmill.submit", [requests(1)], queue=harness.queue, serializer="pickle")
    assert harness.run_task("submit", requests(1)) in harness.jobs()
    assert len(harness.jobs()) == 1
    assert sent.state == "PENDING"
    assert current_app._get_current_object() is before
    assert before.conf.broker_url == its_broker


@pytest.mark.slow
def test_an_address_that_cant_be_used_is_refused_at_once(harness: CeleryHarness) -> None:
    for url, why in ("nosuch://x:pw@host/", "no such transport"), ("memory://", "keeps no results"):
        harness.url = url
        with pytest.raises(BadAddress, match=why) as refused:
            harness.ingest()
        assert "pw" not in str(refused.value)
