"""Kafka ingest on a real broker: produced records become jobs exactly once, whatever they contain and however often
they are resent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka import TopicPartition

from pipeline.ingest.intake import Intake, JobDraft
from pipeline.ingest.kafka.micro_batches import PartitionId, batch_key
from pipeline.ingest.kafka.records import Record
from pipeline.jobs.submit import SubmittedJob
from pipeline.ports import ObjectStore
from schemas.jobs.job import Tier
from tests.pipeline.ingest.kafka.kafka_harness import KafkaHarness, ProducedRecord, request, until
from tests.servers.kafka import KafkaBroker


@pytest.fixture
def harness(kafka_broker: KafkaBroker, unique_name: Callable[[], str], tmp_path: Path) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(kafka_broker.bootstrap, unique_name(), tmp_path / "root")
    harness.make_topics(harness.requests, partitions=2)
    harness.make_topics(harness.deadletter)
    yield harness
    harness.close()


class GatedIntake:
    """The real intake, behind a gate that a test opens and closes: how much room there is."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.open = threading.Event()

    def accept(self, draft: JobDraft) -> SubmittedJob:
        return self._intake.accept(draft)

    def room_for(self, tenant: str) -> bool:
        return self.open.is_set()


class SlowStore:
    """A store whose creations of batches take long."""

    def __init__(self, store: ObjectStore, seconds: float) -> None:
        self._store = store
        self._seconds = seconds

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def create(self, key: str, data: bytes | Path) -> bool:
        if key.startswith("intake/kafka/") and key.endswith(".json"):
            time.sleep(self._seconds)
        return self._store.create(key, data)


@pytest.mark.slow
def test_given_records_of_several_kinds_when_they_come_then_each_kind_is_a_job_and_offsets_follow(
    harness: KafkaHarness,
) -> None:
    bulk = [("tier", b"bulk"), ("job", b"nightly")]
    harness.produce([ProducedRecord(request(f"a{n}"), partition=n % 2) for n in range(20)])
    harness.produce([ProducedRecord(request(f"b{n}"), headers=bulk) for n in range(5)])

    with harness.running(harness.ingest()):
        until(lambda: harness.committed(0) == 15 and harness.committed(1) == 10, "offsets committed")

    assert harness.lines() == sorted([f"a{n}" for n in range(20)] + [f"b{n}" for n in range(5)])
    jobs = harness.jobs()
    assert {job.tenant for job in jobs} == {"team"}
    nightly = [job for job in jobs if job.tier is Tier.BULK]
    assert {job.metadata["job"] for job in nightly} == {"nightly"}
    assert [(batch.partition, batch.last) for batch in harness.batches()][-1] == (1, 9)


@pytest.mark.slow
def test_given_all_was_taken_when_another_group_reads_it_again_then_no_job_is_new(harness: KafkaHarness) -> None:
    harness.produce([ProducedRecord(request(f"a{n}")) for n in range(30)])
    with harness.running(harness.ingest()):
        until(lambda: harness.committed(0) == 30, "first reading")
    before = [job.id for job in harness.jobs()]

    other = harness.settings(group_id=f"{harness.name}-other", batch_records=7)
    with harness.running(harness.ingest(other)):
        until(lambda: harness.committed(0, group=other.group_id) == 30, "second reading")

    assert [job.id for job in harness.jobs()] == before
    assert len(harness.lines()) == 30


@pytest.mark.slow
def test_given_two_consumers_that_both_think_the_partition_theirs_when_they_read_at_once_then_each_row_is_once(
    harness: KafkaHarness,
) -> None:
    one = harness.settings(group_id=f"{harness.name}-one", batch_records=10)
    two = harness.settings(group_id=f"{harness.name}-two", batch_records=13)
    with harness.running(harness.ingest(one)), harness.running(harness.ingest(two)):
        for start in range(0, 60, 20):
            harness.produce([ProducedRecord(request(f"a{n}")) for n in range(start, start + 20)])
        for settings in (one, two):
            until(lambda group=settings.group_id: harness.committed(0, group=group) == 60, "both are through")

    assert harness.lines() == sorted(f"a{n}" for n in range(60))
    ends = [(batch.first, batch.last) for batch in harness.batches()]
    assert [first for first, _ in ends] == [0, *(last + 1 for _, last in ends[:-1])], "batches overlap or leave gaps"


@pytest.mark.slow
def test_given_poison_when_it_comes_between_good_records_then_it_is_a_dead_letter_and_the_others_are_taken(
    harness: KafkaHarness,
) -> None:
    poison = {
        "not-utf8": ProducedRecord(b'{"custom_id": "\xff"}', b"k1", [("trace", b"\x00\xff")]),
        "not-json": ProducedRecord(b'{"custom_id": ', b"k2"),
        "no-object": ProducedRecord(b"[1, 2]", b"k3"),
        "tombstone": ProducedRecord(None, b"k4"),
        "bad-tier": ProducedRecord(request("x"), b"k5", [("tier", b"interactive")]),
        "bad-reply": ProducedRecord(request("y"), b"k6", [("reply_to", b"elsewhere")]),
        "too-large": ProducedRecord(request("z", text="x" * 300_000), b"k7"),
        "unknown-model": ProducedRecord(request("m"), b"k8", [("model", b"gpt-x")]),
    }
    harness.produce([ProducedRecord(request("a")), *poison.values(), ProducedRecord(request("b"))])

    with harness.running(harness.ingest(harness.settings(max_value_bytes=200_000))):
        until(lambda: harness.committed(0) == len(poison) + 2, "all offsets committed")

    assert harness.lines() == ["a", "b"]
    dead_letters = {one.record_key(): one for one in harness.dead_letters()}
    assert dead_letters.keys() == {said.key for said in poison.values()}
    assert dead_letters[b"k1"].record_headers() == [("trace", b"\x00\xff")]
    assert dead_letters[b"k8"].reason_code == "model_not_found"
    messages = {message.key: message for message in harness.consume(harness.deadletter, len(poison))}
    assert messages[b"k1"].value == poison["not-utf8"].value
    assert messages[b"k7"].value == poison["too-large"].value
    headers = dict(messages[b"k5"].headers)
    assert headers["tier"] == b"interactive"
    assert headers["tokenmill-deadletter-code"] == b"bad_header"
    assert headers["tokenmill-deadletter-offset"] == b"5"


@pytest.mark.slow
def test_given_the_dead_letters_topic_does_not_answer_when_poison_comes_then_the_object_counts_and_reading_goes_on(
    harness: KafkaHarness,
) -> None:
    harness.produce([ProducedRecord(b"nonsense", b"k1"), ProducedRecord(request("a"))])
    harness.sender.close()
    unreachable = KafkaHarness("127.0.0.1:1", harness.name, harness.folder, connect_timeout=0.5)
    harness.sender = unreachable.sender
    settings = harness.settings(deadletter_retry_timeout_seconds=0.2)

    with harness.running(harness.ingest(settings)):
        until(lambda: harness.committed(0) == 2, "the partition goes on")

    assert [one.record_key() for one in harness.dead_letters()] == [b"k1"]
    assert harness.lines() == ["a"]


@pytest.mark.slow
def test_given_a_producer_that_sends_again_when_it_does_in_a_batch_later_and_to_another_consumer_then_it_is_one_request(
    harness: KafkaHarness,
) -> None:
    harness.produce([ProducedRecord(request("a")), ProducedRecord(request("b")), ProducedRecord(request("a"))])
    with harness.running(harness.ingest()):
        until(lambda: harness.committed(0) == 3, "the first batch")
        harness.produce([ProducedRecord(request("b")), ProducedRecord(request("c"))])
        until(lambda: harness.committed(0) == 5, "a later batch")
    with harness.running(harness.ingest()):  # it knows what the other one stored
        harness.produce(
            [
                ProducedRecord(request("c")),
                ProducedRecord(request("c", text="another body")),
                ProducedRecord(request("d")),
            ]
        )
        until(lambda: harness.committed(0) == 8, "another consumer")

    assert harness.lines() == ["a", "b", "c", "c", "d"]
    assert sum(batch.resent for batch in harness.batches()) == 3


@pytest.mark.slow
def test_given_no_room_for_the_tenant_when_records_come_then_the_partition_waits_without_leaving_the_group(
    harness: KafkaHarness,
) -> None:
    gate = GatedIntake(Intake(harness.world))
    ingest = harness.ingest(intake=gate)
    with harness.running(ingest):
        until(lambda: ingest.counts.rebalances == 1 and ingest.counts.pauses >= 2, "paused")
        harness.produce([ProducedRecord(request(f"a{n}"), partition=n % 2) for n in range(10)])
        time.sleep(harness.settings().session_timeout_seconds + 0.3)  # longer than the session's timeout
        assert harness.jobs() == []
        gate.open.set()
        until(lambda: harness.committed(0) == 5 and harness.committed(1) == 5, "resumed")

    assert len(harness.lines()) == 10
    assert ingest.counts.rebalances == 1


@pytest.mark.slow
def test_given_storage_slower_than_the_poll_interval_when_records_come_then_the_member_stays_and_all_are_taken(
    kafka_broker: KafkaBroker, unique_name: Callable[[], str], tmp_path: Path
) -> None:
    harness = KafkaHarness(
        kafka_broker.bootstrap, unique_name(), tmp_path / "root", lambda store: SlowStore(store, 1.6)
    )  # type: ignore[return-value,arg-type]
    harness.make_topics(harness.requests, harness.deadletter)
    harness.produce([ProducedRecord(request(f"a{n}")) for n in range(20)])
    ingest = harness.ingest(
        harness.settings(batch_records=10, session_timeout_seconds=1.0, max_poll_interval_seconds=1.1)
    )

    with harness.running(ingest):
        until(lambda: harness.committed(0) == 20, "all stored")

    assert ingest.counts.rebalances == 1, "it was taken for dead while it stored"
    assert len(harness.lines()) == 20
    harness.close()


@pytest.mark.slow
def test_given_a_log_that_was_cut_when_the_client_goes_back_then_ingest_begins_again_and_doubles_nothing(
    harness: KafkaHarness,
) -> None:
    harness.produce([ProducedRecord(request(f"a{n}")) for n in range(9)])
    ingest = harness.ingest(harness.settings(batch_records=4))
    with harness.stepping(ingest) as step_until:
        step_until(lambda: ingest.counts.batches == 3, "all stored")
        ingest._consumer.seek(TopicPartition(harness.requests, 0), 4)  # as its reset does, out of range
        harness.produce([ProducedRecord(request("late"))])
        step_until(lambda: "late" in harness.lines(), "read again")

    assert harness.lines() == sorted([*(f"a{n}" for n in range(9)), "late"])
    assert harness.committed(0) == 10


@pytest.mark.slow
def test_given_a_topic_made_anew_under_the_old_epoch_when_it_is_read_then_its_records_are_not_taken_for_the_old_ones(
    harness: KafkaHarness,
) -> None:
    harness.produce([ProducedRecord(request("new"))])
    settings = harness.settings(epoch="e1")
    ingest = harness.ingest(settings)
    handler = harness.handlers(settings, Intake(harness.world))[harness.requests]
    partition_id = PartitionId("e1", harness.requests, 0, "team")
    handler.begin(partition_id, 0)
    handler.store(partition_id, 0, [Record(0, 0, b"k", request("old"))])
    assert harness.store.info(batch_key(partition_id, 0)) is not None

    with harness.running(ingest):
        until(lambda: ingest.counts.failures > 1, "refused, again and again")

    assert harness.lines() == ["old"]
    assert harness.committed(0) in (None, 1)
