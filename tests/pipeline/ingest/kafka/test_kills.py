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


@pytest.mark.exhaustive
def test_given_consumers_that_are_killed_at_different_moments_when_others_come_then_each_record_is_taken_once(
    kafka_broker: KafkaBroker, unique_name: Callable[[], str], tmp_path: Path
) -> None:
    harnesses = {moment: KafkaHarness(kafka_broker.bootstrap, unique_name(), tmp_path / moment) for moment in JOBS}
    bulk = [("tier", b"bulk")]
    for harness in harnesses.values():
        harness.make_topics(harness.requests, harness.deadletter)
        harness.produce([ProducedRecord(request(f"a{n}"), headers=bulk if n % 3 else []) for n in range(12)])
    children = [child(harness, moment) for moment, harness in harnesses.items()]
    assert [one.wait(HANG_SECONDS) for one in children] == [-signal.SIGKILL] * len(JOBS)

    for moment, harness in harnesses.items():
        durable = max((batch.last + 1 for batch in harness.batches()), default=0)
        assert durable == (0 if moment == "before" else 12)
        assert (harness.committed(0) or 0) == (12 if moment == "committed" else 0), f"killed: {moment}"
        assert len(harness.jobs()) == JOBS[moment]
        harness.produce([ProducedRecord(request("late"))])
    with ExitStack() as ingests:
        for harness in harnesses.values():  # left to itself, each would have cut its batches otherwise
            ingests.enter_context(harness.running(harness.ingest(harness.settings(batch_records=5))))
        for harness in harnesses.values():
            until(lambda harness=harness: harness.committed(0) == 13, "the next consumer is through")  # type: ignore[misc]

    for harness in harnesses.values():
        assert harness.lines() == sorted([*(f"a{n}" for n in range(12)), "late"])
        ends = [(batch.first, batch.last) for batch in harness.batches()]
        assert [first for first, _ in ends] == [0, *(last + 1 for _, last in ends[:-1])]
        harness.close()
