"""Kills between what is stored and what is committed, both ways, in real processes; and what comes of it then.

Committed offsets are compared with what is durable in between: they may be behind it, never ahead.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.pipeline.ingest.kafka.kafka_harness import KafkaHarness, ProducedRecord, child, request, until
from tests.servers.kafka import KafkaBroker
from tests.waiting import HANG_SECONDS

JOBS = {"before": 0, "batch": 0, "job": 1, "stored": 2, "committed": 2}
"""Moment of the crash -> jobs that exist then."""


@pytest.mark.slow
def test_given_consumers_that_are_killed_at_different_moments_when_others_come_then_each_record_is_taken_once(
    kafka_broker: KafkaBroker, unique_name: Callable[[], str], tmp_path: Path
) -> None:
    houses = {moment: KafkaHarness(kafka_broker.bootstrap, unique_name(), tmp_path / moment) for moment in JOBS}
    bulk = [("tier", b"bulk")]
    for house in houses.values():
        house.make_topics(house.requests, house.deadletter)
        house.produce([ProducedRecord(request(f"a{n}"), headers=bulk if n % 3 else []) for n in range(12)])
    children = [child(house, moment) for moment, house in houses.items()]
    assert [one.wait(HANG_SECONDS) for one in children] == [-signal.SIGKILL] * len(JOBS)

    for moment, house in houses.items():
        durable = max((batch.last + 1 for batch in house.batches()), default=0)
        assert durable == (0 if moment == "before" else 12)
        assert (house.committed(0) or 0) == (12 if moment == "committed" else 0), f"killed: {moment}"
        assert len(house.jobs()) == JOBS[moment]
        house.produce([ProducedRecord(request("late"))])
    with ExitStack() as doors:
        for house in houses.values():  # left to itself, each would have cut its batches otherwise
            doors.enter_context(house.running(house.door(house.settings(batch_records=5))))
        for house in houses.values():
            until(lambda house=house: house.committed(0) == 13, "the next consumer is through")  # type: ignore[misc]

    for house in houses.values():
        assert house.lines() == sorted([*(f"a{n}" for n in range(12)), "late"])
        ends = [(batch.first, batch.last) for batch in house.batches()]
        assert [first for first, _ in ends] == [0, *(last + 1 for _, last in ends[:-1])]
        house.close()
