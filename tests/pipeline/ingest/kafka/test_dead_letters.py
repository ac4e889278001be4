"""Dead letters of records when their topic is silent for too long: ingest continues, and the messages are sent
later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.egress.publisher import Publisher, PublisherSettings
from pipeline.ingest.dead_letters import DeadLetters, list_dead_letter_objects
from pipeline.ingest.kafka.dead_letters import OWED, KafkaDeadLetters, UnsentDeadLetters
from pipeline.ingest.kafka.micro_batches import PartitionId
from pipeline.ingest.kafka.records import Record, Refused
from pipeline.ports import NotConfirmed
from tests.pipeline.dying_store import Killed, WatchedStore, dies_at
from tests.pipeline.ingest.kafka.kafka_harness import KafkaHarness, ProducedRecord, request, until
from tests.servers.kafka import KafkaBroker


@pytest.fixture
def harness(kafka_broker: KafkaBroker, unique_name: Callable[[], str], tmp_path: Path) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(kafka_broker.bootstrap, unique_name(), tmp_path / "root")
    harness.make_topics(*(f"{harness.name}.{name}" for name in ("requests", "results", "events", "deadletter")))
    yield harness
    harness.close()


@pytest.fixture
def nowhere(harness: KafkaHarness) -> Iterator[KafkaHarness]:
    """The same root, and a cluster that isn't there."""
    nowhere = KafkaHarness("127.0.0.1:1", harness.name, harness.folder, connect_timeout=0.2)
    yield nowhere
    nowhere.close()


def unsent(harness: KafkaHarness) -> list[str]:
    return [info.key for info in harness.store.list(OWED)]


def consume_dead_letters(
    harness: KafkaHarness, count: int
) -> Counter[tuple[bytes | None, bytes, tuple[tuple[str, bytes], ...]]]:
    """Read at least `count` messages of the dead-letter topic; returns how often each occurs."""
    return Counter((one.key, one.value, tuple(one.headers)) for one in harness.consume(harness.deadletter, count))


@pytest.mark.slow
def test_given_a_topic_that_was_silent_when_it_is_back_then_it_gets_the_messages_that_it_would_have_got(
    harness: KafkaHarness, nowhere: KafkaHarness, tmp_path: Path
) -> None:
    poison = [
        ProducedRecord(b"nonsense", b"k1", [("trace", b"\x00\xff"), ("tier", b"bulk")]),
        ProducedRecord(None, b"k2"),
        ProducedRecord(
            request("x", text="y" * 2_000_000), b"k3", [("tier", b"interactive")]
        ),  # more than a message may have
    ]
    harness.produce([*poison, ProducedRecord(request("a"))])
    silent = harness.settings(deadletter_retry_timeout_seconds=0.1, group_id=f"{harness.name}-silent")
    with harness.running(nowhere.ingest(silent)):  # it reads from the real brokers, and sends to others
        until(lambda: harness.committed(0, group=silent.group_id) == 4, "the partition goes on")
    assert len(unsent(harness)) == 3
    with pytest.raises(NotConfirmed):
        UnsentDeadLetters(nowhere.world, nowhere.sender, harness.deadletter).send()
    assert len(unsent(harness)) == 3, "still silent"

    topics = [f"{harness.name}.{name}" for name in ("results", "events", "deadletter")]
    later = Publisher(harness.world, harness.sender, PublisherSettings(*topics, unsent_interval_seconds=0.0))
    for _ in range(2):
        later.poll()
    assert (later.failures, unsent(harness)) == (0, [])
    sent = consume_dead_letters(harness, 3)
    assert sorted((key or b"", count) for (key, _, _), count in sent.items()) == [(b"", 1), (b"k1", 1), (b"k2", 1)]
    assert harness.lines() == ["a"]

    fresh = KafkaHarness(harness.bootstrap, harness.name, tmp_path / "fresh")
    with fresh.running(fresh.ingest()):  # for another root the same records are read while the topic answers
        until(lambda: fresh.committed(0) == 4, "read again")
    fresh.close()
    again = consume_dead_letters(harness, 6)
    assert again.total() == 6
    whole = [one for one in sent if "tokenmill-deadletter-original-in" not in dict(one[2])]
    assert [again[one] for one in whole] == [2, 2], "they are not the same"


@pytest.mark.slow
def test_given_unsent_dead_letters_when_the_publisher_dies_anywhere_then_each_is_sent_and_none_is_left(
    harness: KafkaHarness, nowhere: KafkaHarness
) -> None:
    dead_letters = KafkaDeadLetters(nowhere.world, nowhere.sender, harness.deadletter, retry_timeout_seconds=0.0)
    partition_id = PartitionId("c", harness.requests, 0, "team")
    dead_letters.write(partition_id, [Refused(Record(n, 1_000, b"k", b"x%d" % n), "bad", "no good") for n in range(3)])
    removed = harness.dead_letters()[-1]  # before its message was sent
    value = DeadLetters(harness.world).original(removed)
    for info in list_dead_letter_objects(harness.store, removed.id):
        harness.store.delete(info.key)

    deaths = 0
    while True:
        world = replace(harness.world, store=WatchedStore(harness.store, dies_at(deaths + 1)))
        try:
            UnsentDeadLetters(world, harness.sender, harness.deadletter).send()
            break
        except Killed:
            deaths += 1
    assert deaths > 5
    assert unsent(harness) == []
    assert {value_sent for _, value_sent, _ in consume_dead_letters(harness, 2)} == {b"x0", b"x1", b"x2"} - {value}
