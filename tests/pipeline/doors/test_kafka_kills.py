"""Kills between what is stored and what is committed, both ways, in real processes; and what the next consumer makes of
it.

Committed offsets are compared with what is durable in between: they may be behind it, never ahead.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pipeline.doors.kafka_house import KafkaHouse, Said, child, request, until
from tests.servers.kafka import KafkaBroker


@pytest.fixture
def house(kafka_broker: KafkaBroker, unique_name: Callable[[], str], tmp_path: Path) -> Iterator[KafkaHouse]:
    house = KafkaHouse(kafka_broker.bootstrap, unique_name(), tmp_path / "root")
    house.make_topics(house.requests, house.deadletter)
    yield house
    house.close()


@pytest.mark.parametrize("moment", ["before", "batch", "job", "stored"])
def test_given_a_consumer_that_is_killed_at_some_moment_when_another_comes_then_each_record_is_taken_once(
    house: KafkaHouse, moment: str
) -> None:
    other = [("tier", b"bulk")]
    house.produce([Said(request(f"a{n}"), headers=other if n % 3 else []) for n in range(12)])
    assert child(house, moment).wait(60) == -signal.SIGKILL

    durable = max((batch.last + 1 for batch in house.batches()), default=0)
    assert (house.committed(0) or 0) == 0, "it died before it committed"
    assert durable == (0 if moment == "before" else 12)
    house.produce([Said(request("late"))])
    with house.running(house.door(house.settings(batch_records=5))):  # it would have cut otherwise
        until(lambda: house.committed(0) == 13, "the next consumer is through")

    assert house.lines() == sorted([*(f"a{n}" for n in range(12)), "late"])
    ends = [(batch.first, batch.last) for batch in house.batches()]
    assert [first for first, _ in ends] == [0, *(last + 1 for _, last in ends[:-1])]
