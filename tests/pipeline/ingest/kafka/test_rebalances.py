"""Members that come, go and are killed while records flow: nothing lost or doubled, no offset ahead of storage."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kafka import KafkaConsumer

from pipeline.ingest.intake import Intake, JobDraft
from pipeline.ingest.kafka.consumer import KafkaIngest
from pipeline.ingest.kafka.partition import PartitionTask
from pipeline.jobs.submit import SubmittedJob
from pipeline.ports import World
from tests.pipeline.ingest.kafka.kafka_harness import (
    TIMEOUT_SECONDS,
    KafkaHarness,
    ProducedRecord,
    child,
    request,
    until,
)
from tests.servers.kafka import KafkaBroker

PARTITIONS = 4
ALL = set(range(PARTITIONS))


@pytest.fixture
def harness(kafka_broker: KafkaBroker, unique_name: Callable[[], str], tmp_path: Path) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(kafka_broker.bootstrap, unique_name(), tmp_path / "root")
    harness.make_topics(harness.requests, partitions=PARTITIONS)
    harness.make_topics(harness.deadletter)
    yield harness
    harness.close()


class Stream:
    """Records that are produced on all partitions until the test has seen enough."""

    def __init__(self, harness: KafkaHarness, every: float) -> None:
        self._harness = harness
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent = [0] * PARTITIONS

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def names(self) -> list[str]:
        return sorted(f"p{number}-{count}" for number, sent in enumerate(self.sent) for count in range(sent))

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            said = []
            for number in range(PARTITIONS):
                said += [
                    ProducedRecord(request(f"p{number}-{self.sent[number] + n}"), b"k", (), number) for n in range(5)
                ]
                self.sent[number] += 5
            self._harness.produce(said)


def check_offsets(harness: KafkaHarness) -> None:
    """Offsets first, then storage: what is committed must be durable by then, jobs and all."""
    committed = [harness.committed(number) or 0 for number in range(PARTITIONS)]
    jobs = len(harness.jobs())
    batches = harness.batches()
    for number, offset in enumerate(committed):
        mine = [batch for batch in batches if batch.partition == number]
        durable = max((batch.last + 1 for batch in mine), default=0)
        assert offset <= durable, f"partition {number}: committed {offset}, durable {durable}"
        assert offset in {0, *(batch.last + 1 for batch in mine)}, "committed in the middle of a batch"
    behind = sum(batch.last + 1 <= committed[batch.partition] for batch in batches)
    assert jobs >= behind, "an offset was committed before its batch's job stood"


def held(ingest: KafkaIngest) -> set[int]:
    """The partitions that are assigned to a consumer."""
    return {one.partition for one in [*ingest._partitions, *ingest._unstarted]}


def rebalance(harness: KafkaHarness, times: int, every: float, seed: int) -> Stream:
    """One steady member; others join, leave in order or are killed, in turn.

    Each turn waits until the group has formed, with and without the other. A member that leaves while it forms is more
    than the tests' broker can take (see `tests.servers.kafka`): afterwards no member of the group has a partition.
    """
    chance = random.Random(seed)
    steady = harness.ingest()
    with Stream(harness, every) as stream, harness.running(steady):
        until(lambda: held(steady) == ALL and steady.counts.records > 0, "the first member reads")
        for turn in range(times):
            cut = chance.randint(3, 20)
            if turn % 3 == 2:
                killed = child(harness, "never", batch_records=cut)
                until(lambda: 0 < len(held(steady)) < PARTITIONS, "another has joined")
                time.sleep(0.5 + chance.random())
                killed.kill()
                killed.wait()
            else:
                other = harness.ingest(harness.settings(batch_records=cut))
                with harness.running(other):
                    until(lambda other=other: _share(steady, other), "another has joined")  # type: ignore[misc]
                    time.sleep(chance.random() * 0.7)
            until(lambda: held(steady) == ALL, "it has gone")
            if turn % 5 == 0:
                check_offsets(harness)
    assert steady.counts.rebalances > 2 * times
    with harness.running(harness.ingest()):
        until(lambda: [harness.committed(n) for n in range(PARTITIONS)] == stream.sent, "all is committed")
    return stream


def _share(one: KafkaIngest, other: KafkaIngest) -> bool:
    """Whether each has some of the partitions, and the two have all."""
    return bool(held(one) and held(other)) and held(one) | held(other) == ALL and not held(one) & held(other)


def check_taken(harness: KafkaHarness, stream: Stream) -> None:
    assert harness.lines() == stream.names()
    check_offsets(harness)
    for number in range(PARTITIONS):
        ends = [(batch.first, batch.last) for batch in harness.batches() if batch.partition == number]
        assert [first for first, _ in ends] == [0, *(last + 1 for _, last in ends[:-1])]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_given_members_that_come_and_go_when_records_flow_then_each_is_taken_once(harness: KafkaHarness) -> None:
    check_taken(harness, rebalance(harness, times=3, every=0.3, seed=1))


class BlockedIntake(Intake):
    """Accepts no job before `is_open` is set."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.is_open = threading.Event()

    def accept(self, draft: JobDraft) -> SubmittedJob:
        assert self.is_open.wait(TIMEOUT_SECONDS)
        return super().accept(draft)


@pytest.mark.slow
def test_given_a_batch_stored_a_moment_ago_when_its_partition_is_taken_away_then_its_offset_is_committed_first(
    harness: KafkaHarness,
) -> None:
    settings = harness.settings()
    intake, stop = BlockedIntake(harness.world), threading.Event()
    ingest = harness.ingest(settings, intake)

    def follow() -> None:
        """Another member, which only wants its share."""
        options = settings.consumer_options() | {"client_id": "other"}
        with closing(KafkaConsumer(harness.requests, **options)) as other:
            while not stop.is_set():
                other.poll(timeout_ms=100)

    def working() -> list[PartitionTask]:
        return [part.work for part in ingest._partitions.values() if part.work and part.work.kind == "store"]

    thread = threading.Thread(target=follow)
    harness.produce(
        [ProducedRecord(request(f"a{number}-{n}"), partition=number) for n in range(5) for number in range(PARTITIONS)]
    )
    with harness.stepping(ingest) as step_until:
        step_until(lambda: len(working()) == PARTITIONS, "all partitions are being stored")
        intake.is_open.set()
        thread.start()
        until(lambda: all(work.future.done() for work in working()), "all are stored, and the ingest hasn't polled")
        assert not any(harness.committed(number) for number in range(PARTITIONS))
        time.sleep(settings.session_timeout_seconds)  # by now the client is to join again
        ingest.step()
        until(lambda: [harness.committed(number) for number in range(PARTITIONS)] == [5] * PARTITIONS, "committed", 2.0)
        stop.set()
    thread.join()


@pytest.mark.exhaustive
def test_given_fifty_rebalances_when_records_flow_then_each_is_taken_once(harness: KafkaHarness) -> None:
    check_taken(harness, rebalance(harness, times=25, every=0.5, seed=2))  # each member that comes also goes


@pytest.mark.slow
def test_given_the_broker_dies_and_comes_back_when_records_flow_then_none_is_lost(
    durable_kafka_broker: KafkaBroker, unique_name: Callable[[], str], tmp_path: Path
) -> None:
    harness = KafkaHarness(durable_kafka_broker.bootstrap, unique_name(), tmp_path / "root")
    harness.make_topics(harness.requests, partitions=PARTITIONS)
    harness.make_topics(harness.deadletter)
    with harness.running(harness.ingest()):
        for life in range(2):
            harness.produce([ProducedRecord(request(f"a{life}-{n}"), partition=n % PARTITIONS) for n in range(40)])
            durable_kafka_broker.kill()
            time.sleep(0.5)
            durable_kafka_broker.start()
        harness.produce([ProducedRecord(request(f"b{n}"), partition=n % PARTITIONS) for n in range(40)])
        until(lambda: [harness.committed(n) for n in range(PARTITIONS)] == [30] * PARTITIONS, "all is committed")

    assert harness.lines() == sorted(
        [f"a{life}-{n}" for life in range(2) for n in range(40)] + [f"b{n}" for n in range(40)]
    )
    harness.close()
