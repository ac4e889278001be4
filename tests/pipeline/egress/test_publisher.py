"""Messages about jobs on topics of a real broker: from committed parts, at least once and identical each time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.redis.connection import RedisSettings
from pipeline.adapters.redis.lease import RedisLease
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.dispatcher import Dispatcher
from pipeline.egress.publisher import Publisher, PublisherSettings, result_id
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import submit
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import Message, Messages, NotConfirmed, World
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.events import read_event
from schemas.jobs.job import Closing
from schemas.jobs.outcome import JobStatus
from tests.pipeline.ingest.kafka.kafka_harness import KafkaHarness, ProducedRecord, request, until
from tests.pipeline.made_jobs import MODELS, computed, order, report
from tests.servers.kafka import KafkaBroker
from tests.servers.redis import RedisServer


@pytest.fixture
def harness(kafka_broker: KafkaBroker, unique_name: Callable[[], str], tmp_path: Path) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(kafka_broker.bootstrap, unique_name(), tmp_path / "root")
    harness.make_topics(
        harness.requests, harness.deadletter, *(f"{harness.name}.{one}" for one in ("results", "events", "mine"))
    )
    yield harness
    harness.close()


class DyingMessages:
    """Sends some messages for real, and then no more: as a process that is killed between a send and its marker."""

    def __init__(self, messages: Messages, sends: int) -> None:
        self._messages = messages
        self._left = sends

    @property
    def max_bytes(self) -> int:
        return self._messages.max_bytes

    def send(self, messages: Sequence[Message]) -> None:
        self._messages.send(messages)
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt


class CountingMessages:
    """Sends for real, and counts the results."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self.results: Counter[bytes] = Counter()

    @property
    def max_bytes(self) -> int:
        return self._messages.max_bytes

    def send(self, messages: Sequence[Message]) -> None:
        self._messages.send(messages)
        headers = [dict(message.headers) for message in messages]
        self.results.update(found["result_id"] or b"" for found in headers if "result_id" in found)


def settings(harness: KafkaHarness, **changes: Any) -> PublisherSettings:
    plain = PublisherSettings(
        results_topic=f"{harness.name}.results", events_topic=f"{harness.name}.events",
        reply_topics=frozenset({f"{harness.name}.mine"}), rows_at_once=3,
    )  # fmt: skip
    return replace(plain, **changes)


def take_in(harness: KafkaHarness, said: Sequence[ProducedRecord]) -> list[JobLedger]:
    """Bring records in through the ingest; their jobs."""
    harness.produce(said)
    ingest = harness.ingest(harness.settings(reply_topics=frozenset({f"{harness.name}.mine"})))
    with harness.running(ingest):
        until(lambda: harness.committed(0) == len(said), "taken in")
    return harness.ledgers()


def compute(world: World, ledger: JobLedger, response: str | None = None) -> None:
    """Plan the job, and answer all its rows with made results; the manifest follows."""
    plan_job(ledger, ledger.job(), world)
    queue, beats = MemoryQueue(), MemoryHeartbeats(world.clock, 60.0)
    dispatcher = Dispatcher(world, queue, beats)
    dispatcher.add(ledger)
    client = ShardClient("w", world, lambda _: ledger, queue, beats, dispatcher.finished, models=MODELS)
    for _ in range(100):
        dispatcher.tick()
        work = client.take(0.0)
        if work is not None:
            made = computed(work)
            if response is not None:
                made = FinishedRows([replace(row, response=response) for row in made.rows], made.usages)
            client.commit(work, made, report(work))
        if ledger.manifest() is not None:
            return
    raise AssertionError("the job did not end")


def said(harness: KafkaHarness) -> list[ProducedRecord]:
    """Ten requests, one of them invalid; some reply elsewhere."""
    reply = [("reply_to", f"{harness.name}.mine".encode())]
    good = [ProducedRecord(request(f"a{n}"), b"key-%d" % n, reply if n < 4 else []) for n in range(8)]
    return [*good, ProducedRecord(request("keyless"), None), ProducedRecord(b'{"custom_id": "broken"}', b"key-9")]


def consume(harness: KafkaHarness, topic: str, count: int) -> list[tuple[bytes | None, bytes, dict[str, bytes]]]:
    return [
        (found.key, found.value, dict(found.headers)) for found in harness.consume(f"{harness.name}.{topic}", count)
    ]


@pytest.mark.slow
def test_given_a_kafka_job_when_it_is_done_then_each_result_is_sent_with_its_records_key_and_replies(
    harness: KafkaHarness,
) -> None:
    (ledger,) = take_in(harness, said(harness))
    compute(harness.world, ledger)
    publisher = Publisher(harness.world, harness.sender, settings(harness))

    assert publisher.poll() == 1
    assert publisher.poll() == 0, "all is announced"

    results = consume(harness, "results", 10)
    assert len(results) == 10
    values = {
        value["custom_id"]: (key, value, headers) for key, raw, headers in results for value in [orjson.loads(raw)]
    }
    assert values.keys() == {*(f"a{n}" for n in range(8)), "keyless", "broken"}
    assert [values[f"a{n}"][0] for n in range(8)] == [b"key-%d" % n for n in range(8)]
    assert values["keyless"][0] == b"keyless"
    assert values["broken"][1]["error"]["code"] == "invalid_request"
    _, value, headers = values["a3"]
    assert headers["result_id"].decode() == value["id"] == result_id(ledger.name, value["row"])
    assert headers["source"].decode() == f"{harness.requests}/0/3"
    replies = consume(harness, "mine", 4)
    assert sorted(orjson.loads(raw)["custom_id"] for _, raw, _ in replies) == [f"a{n}" for n in range(4)]
    events = [read_event(raw) for _, raw, _ in consume(harness, "events", 4)]
    assert [event.id.split("/")[1] for event in events] == ["accepted", "part-00000", "part-00001", "ended"]
    assert events[-1].model_dump()["status"] == JobStatus.COMPLETED
    assert not list(harness.store.list("intake/origins/")), "the origin has served"


@pytest.mark.slow
@pytest.mark.parametrize("sends", [0, 1, 2, 3, 4, 6, 8])
def test_given_a_publisher_that_dies_between_a_send_and_its_marker_when_another_goes_on_then_repeats_are_identical(
    harness: KafkaHarness, sends: int
) -> None:
    (ledger,) = take_in(harness, said(harness))
    compute(harness.world, ledger)
    with pytest.raises(KeyboardInterrupt):
        Publisher(harness.world, DyingMessages(harness.sender, sends), settings(harness)).poll()

    assert Publisher(harness.world, harness.sender, settings(harness)).poll() == 1

    for topic, name, different in (("results", "result_id", 10), ("mine", "result_id", 4), ("events", "event_id", 4)):
        found = consume(harness, topic, different)
        ids = Counter(headers[name] for _, _, headers in found)
        assert len(ids) == different, "something was never sent"
        assert len({(key, value, headers[name]) for key, value, headers in found}) == different, "a repeat is different"


@pytest.mark.slow
def test_given_a_job_that_runs_when_parts_are_committed_then_they_are_announced_before_its_end(
    harness: KafkaHarness,
) -> None:
    (ledger,) = take_in(harness, said(harness))
    plan_job(ledger, ledger.job(), harness.world)
    publisher = Publisher(harness.world, harness.sender, settings(harness))

    assert publisher.poll() == 0
    early = consume(harness, "results", 1)
    compute(harness.world, ledger)
    publisher.poll()

    assert [orjson.loads(raw)["custom_id"] for _, raw, _ in early] == ["broken"]
    assert len(consume(harness, "results", 10)) == 10


class SetClock(SystemClock):
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at


class CountingPublisher(Publisher):
    """Counts its polls of jobs."""

    job_polls = 0

    def announce(self, ledger: JobLedger) -> bool:
        self.job_polls += 1
        return super().announce(ledger)


@pytest.mark.slow
def test_given_an_idle_job_when_something_happens_then_it_is_announced_a_tenth_of_that_time_later_at_most(
    harness: KafkaHarness,
) -> None:
    (ledger,) = take_in(harness, said(harness))
    clock = SetClock()
    publisher = CountingPublisher(replace(harness.world, clock=clock), harness.sender, settings(harness))
    for second in range(600):
        clock.at = float(second)
        assert publisher.poll() == 0
    assert 30 < publisher.job_polls < 80
    compute(harness.world, ledger)
    clock.at = 660.0

    assert publisher.poll() == 1


@pytest.mark.slow
def test_given_a_result_larger_than_a_message_when_sent_then_the_message_has_the_results_location(
    harness: KafkaHarness,
) -> None:
    (ledger,) = take_in(harness, [ProducedRecord(request("a"), b"k")])
    compute(harness.world, ledger, orjson.dumps({"text": "x" * 1_200_000}).decode())

    Publisher(harness.world, harness.sender, settings(harness)).poll()

    ((key, raw, headers),) = consume(harness, "results", 1)
    value = orjson.loads(raw)
    assert (key, value["custom_id"], value["response"]) == (b"k", "a", None)
    assert value["result_in"]["uri"].endswith(".parquet")
    assert headers["result_id"].decode() == result_id(ledger.name, 0)


@pytest.mark.slow
def test_given_brokers_that_do_not_answer_when_results_are_sent_then_it_fails_and_nothing_is_marked(
    harness: KafkaHarness,
) -> None:
    (ledger,) = take_in(harness, [ProducedRecord(request("a"), b"k")])
    compute(harness.world, ledger)
    away = KafkaHarness("127.0.0.1:1", harness.name, harness.folder, connect_timeout=0.5)
    publisher = Publisher(harness.world, away.sender, settings(harness))

    assert publisher.poll() == 0
    assert publisher.failures == 1
    assert not list(harness.store.list("announced/"))
    with pytest.raises(NotConfirmed, match="not confirmed"):
        publisher.announce(ledger)
    assert Publisher(harness.world, harness.sender, settings(harness)).poll() == 1


def test_given_a_job_of_another_ingest_source_with_all_jobs_then_it_and_its_cancellation_are_announced(
    harness: KafkaHarness,
) -> None:
    ledger = JobLedger(harness.store, "jobs/job-one/")
    job = submit(order(), ledger, harness.world, job_id="job-one").job
    ledger.create_closing(Closing(kind="cancel", at=job.created_at))
    own, every = (
        Publisher(harness.world, harness.sender, settings(harness, all_jobs=all_jobs)) for all_jobs in (False, True)
    )

    own.poll()
    assert not list(harness.store.list("announced/"))
    every.poll()

    events = [read_event(raw) for _, raw, _ in consume(harness, "events", 2)]
    assert [event.id for event in events] == ["job-one/accepted", "job-one/cancelling"]
    assert events[1].at == job.created_at, "it says when it happened, not when it was sent"


@pytest.mark.slow
def test_given_two_publishers_that_contend_for_a_lease_when_one_ends_then_the_other_goes_on_and_nothing_is_sent_twice(
    harness: KafkaHarness, redis_server: RedisServer, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(request(f"a{n}") + b"\n" for n in range(5)))
    clock, random = SystemClock(), SystemRandomness()
    redis = RedisSettings(redis_server.url, prefix=harness.name)
    leases = [RedisLease(redis, "publisher", 6.0, clock, random) for _ in range(2)]
    counted, stops = [CountingMessages(harness.sender) for _ in leases], [threading.Event() for _ in leases]
    every = settings(harness, all_jobs=True, poll_interval_seconds=0.02)
    publishers = [
        Publisher(harness.world, messages, every, lease) for messages, lease in zip(counted, leases, strict=True)
    ]

    def publish_job(name: str) -> int:
        """End a new job and wait until it is published; returns its number of results."""
        ledger = JobLedger(harness.store, f"jobs/{name}/")
        submit(order(input=pin_input(source)), ledger, harness.world, job_id=name)
        compute(harness.world, ledger)
        until(lambda: harness.store.info(f"announced/jobs/{name}") is not None, f"{name} is announced")
        manifest = ledger.manifest()
        assert manifest is not None
        return manifest.counts.total

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(publisher.run, stop) for publisher, stop in zip(publishers, stops, strict=True)]
        try:
            first = publish_job("job-one")
            (active,) = [at for at, messages in enumerate(counted) if messages.results]
            stops[active].set()
            running[active].result()
            second = publish_job("job-two")
        finally:
            for stop in stops:
                stop.set()
    sent = counted[active].results, counted[1 - active].results
    assert [found.total() for found in sent] == [len(found) for found in sent] == [first, second]
    for lease in leases:
        lease.close()
