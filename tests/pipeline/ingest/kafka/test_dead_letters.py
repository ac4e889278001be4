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
def house(kafka_broker: KafkaBroker, unique_name: Callable[[], str], tmp_path: Path) -> Iterator[KafkaHarness]:
    house = KafkaHarness(kafka_broker.bootstrap, unique_name(), tmp_path / "root")
    house.make_topics(*(f"{house.name}.{name}" for name in ("requests", "results", "events", "deadletter")))
    yield house
    house.close()


@pytest.fixture
def nowhere(house: KafkaHarness) -> Iterator[KafkaHarness]:
    """The same root, and a cluster that isn't there."""
    nowhere = KafkaHarness("127.0.0.1:1", house.name, house.folder, connect_timeout=0.2)
    yield nowhere
    nowhere.close()


def owed(house: KafkaHarness) -> list[str]:
    return [info.key for info in house.store.list(OWED)]


def told(house: KafkaHarness, count: int) -> Counter[tuple[bytes | None, bytes, tuple[tuple[str, bytes], ...]]]:
    """The messages on the dead-letter topic, and how often each occurs; at least so many messages."""
    return Counter((one.key, one.value, tuple(one.headers)) for one in house.consume(house.deadletter, count))


def test_given_a_topic_that_was_silent_when_it_is_back_then_it_gets_the_messages_that_it_would_have_got(
    house: KafkaHarness, nowhere: KafkaHarness, tmp_path: Path
) -> None:
    poison = [
        ProducedRecord(b"nonsense", b"k1", [("trace", b"\x00\xff"), ("tier", b"bulk")]),
        ProducedRecord(None, b"k2"),
        ProducedRecord(
            request("x", text="y" * 2_000_000), b"k3", [("tier", b"interactive")]
        ),  # more than a message may have
    ]
    house.produce([*poison, ProducedRecord(request("a"))])
    silent = house.settings(deadletter_retry_timeout_seconds=0.1, group=f"{house.name}-silent")
    with house.running(nowhere.door(silent)):  # it reads from the real brokers, and sends to others
        until(lambda: house.committed(0, group=silent.group) == 4, "the partition goes on")
    assert len(owed(house)) == 3
    with pytest.raises(NotConfirmed):
        UnsentDeadLetters(nowhere.world, nowhere.sender, house.deadletter).send()
    assert len(owed(house)) == 3, "still silent"

    topics = [f"{house.name}.{name}" for name in ("results", "events", "deadletter")]
    later = Publisher(house.world, house.sender, PublisherSettings(*topics, unsent_interval_seconds=0.0))
    for _ in range(2):
        later.look()
    assert (later.failures, owed(house)) == (0, [])
    sent = told(house, 3)
    assert sorted((key or b"", count) for (key, _, _), count in sent.items()) == [(b"", 1), (b"k1", 1), (b"k2", 1)]
    assert house.lines() == ["a"]

    fresh = KafkaHarness(house.bootstrap, house.name, tmp_path / "fresh")
    with fresh.running(fresh.door()):  # for another root the same records are read while the topic answers
        until(lambda: fresh.committed(0) == 4, "read again")
    fresh.close()
    again = told(house, 6)
    assert again.total() == 6
    whole = [one for one in sent if "tokenmill-deadletter-original-in" not in dict(one[2])]
    assert [again[one] for one in whole] == [2, 2], "they are not the same"


def test_given_letters_that_are_owed_when_the_announcer_dies_anywhere_then_each_is_sent_and_none_is_owed(
    house: KafkaHarness, nowhere: KafkaHarness
) -> None:
    dead_letters = KafkaDeadLetters(nowhere.world, nowhere.sender, house.deadletter, retry_timeout_seconds=0.0)
    partition_id = PartitionId("c", house.requests, 0, "team")
    dead_letters.write(partition_id, [Refused(Record(n, 1_000, b"k", b"x%d" % n), "bad", "no good") for n in range(3)])
    removed = house.dead_letters()[-1]  # before anybody was told of it
    value = DeadLetters(house.world).original(removed)
    for info in list_dead_letter_objects(house.store, removed.id):
        house.store.delete(info.key)

    deaths = 0
    while True:
        world = replace(house.world, store=WatchedStore(house.store, dies_at(deaths + 1)))
        try:
            UnsentDeadLetters(world, house.sender, house.deadletter).send()
            break
        except Killed:
            deaths += 1
    assert deaths > 5
    assert owed(house) == []
    assert {told_of for _, told_of, _ in told(house, 2)} == {b"x0", b"x1", b"x2"} - {value}
