"""Batches of a partition as consumers find them: after compaction, a shortened log, another consumer, a new topic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.kafka.connection import KafkaConnection
from pipeline.adapters.system_clock import SystemRandomness
from pipeline.ingest.intake import Intake
from pipeline.ingest.kafka.dead_letters import KafkaDeadLetters
from pipeline.ingest.kafka.micro_batches import PartitionId, batch_key, floor_batch, load_batch
from pipeline.ingest.kafka.records import Record
from pipeline.ingest.kafka.request_batches import RecordMismatch, RequestBatches
from pipeline.ingest.kafka.settings import KafkaIngestSettings
from pipeline.jobs.summaries import find_ledgers
from pipeline.models.catalog import Catalog
from pipeline.ports import Message, NotConfirmed, PipelineError, World
from schemas.models import CatalogEntry, ModelPin
from tests.pipeline.ingest.kafka.kafka_harness import MODEL, request
from tests.pipeline.simulation import SimulatedClock

PARTITION = PartitionId("c1", "requests", 0, "team")


class MemoryMessages:
    """Messages in memory; refuses them while `reason` is set."""

    max_bytes = 10_000

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.reason: NotConfirmed | None = None

    def send(self, messages: Sequence[Message]) -> None:
        if self.reason is not None:
            raise self.reason
        self.sent += messages


class Partition:
    """A partition's handler on a folder, with a clock of its own."""

    def __init__(self, folder: Path, *, served: bool = True) -> None:
        self.store = FolderStore(folder)
        self.clock = SimulatedClock()
        self.outbox = MemoryMessages()
        self.world = World(self.store, self.clock, SystemRandomness(), self.store.scratch)
        if served:
            self.serve()

    def serve(self) -> None:
        pin = ModelPin(name=MODEL, source="/models/tiny", digest="sha256:1", dtype="float32")
        Catalog(self.store).publish(CatalogEntry(pin=pin, max_model_len=512))

    def consumer(self) -> RequestBatches:
        """A new consumer without state."""
        settings = KafkaIngestSettings(
            KafkaConnection(("nowhere:1",)), resend_window_seconds=60.0, max_value_bytes=50_000
        )
        dead_letters = KafkaDeadLetters(self.world, self.outbox, "dead", settings.deadletter_retry_timeout_seconds)
        return RequestBatches(self.world, Intake(self.world), dead_letters, settings)

    def lines(self) -> list[bytes]:
        jobs = [ledger.job() for ledger in find_ledgers(self.store)]
        return sorted(line for job in jobs for line in Path(job.input.files[0].uri).read_bytes().splitlines())


@pytest.fixture
def partition(tmp_path: Path) -> Iterator[Partition]:
    partition = Partition(tmp_path / "root")
    yield partition
    partition.store.close()


def records(*offsets: int) -> list[Record]:
    return [Record(offset, 1_700_000_000_000, b"k", request(f"a{offset}")) for offset in offsets]


def test_given_a_batch_when_the_log_was_compacted_before_another_consumer_comes_then_it_is_found_where_it_began(
    partition: Partition,
) -> None:
    one, two = partition.consumer(), partition.consumer()
    one.begin(PARTITION, 0)
    assert one.store(PARTITION, 0, records(0, 1, 2, 3)) == 4

    assert two.begin(PARTITION, 0) == 0
    end = two.store(PARTITION, 0, records(2, 3, 4, 5))  # 0 and 1 are gone

    assert end == 4, "what is behind the stored batch is read again"
    assert len(partition.lines()) == 4


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_given_a_batch_when_the_log_begins_behind_its_first_record_then_the_next_consumer_reads_on_behind_its_last(
    partition: Partition, offset: int
) -> None:
    one, two = partition.consumer(), partition.consumer()
    one.begin(PARTITION, 0)
    one.store(PARTITION, 0, records(0, 1, 2, 3))

    assert two.begin(PARTITION, offset) == 4
    assert two.store(PARTITION, 4, records(4)) == 5
    assert len(partition.lines()) == 5


@pytest.mark.parametrize("offset", [0, 7, 99, 12_345, 10**13])
def test_given_batches_far_apart_when_the_one_before_an_offset_is_looked_for_then_it_is_found(
    partition: Partition, offset: int
) -> None:
    consumer = partition.consumer()
    consumer.begin(PARTITION, offset)
    consumer.store(PARTITION, offset, records(offset))
    consumer.store(PARTITION, offset + 10**9, records(offset + 10**9))

    for looked, expected in ((offset, offset), (offset + 10**9 - 1, offset), (offset + 10**15, offset + 10**9)):
        found = floor_batch(partition.store, PARTITION, looked)
        assert found is not None
        assert found.first == expected
    if offset:
        assert floor_batch(partition.store, PARTITION, offset - 1) is None


def test_given_a_longer_batch_of_another_consumer_when_records_are_stored_then_its_end_counts(
    partition: Partition,
) -> None:
    one, two = partition.consumer(), partition.consumer()
    one.begin(PARTITION, 0)
    two.begin(PARTITION, 0)
    one.store(PARTITION, 0, records(*range(10)))

    assert two.store(PARTITION, 0, records(*range(4))) == 10
    assert len(partition.lines()) == 10


def test_given_a_topic_made_anew_under_the_same_epoch_when_its_records_are_stored_then_they_are_not_passed_over(
    partition: Partition,
) -> None:
    one, two = partition.consumer(), partition.consumer()
    one.begin(PARTITION, 0)
    one.store(PARTITION, 0, records(0, 1))
    two.begin(PARTITION, 0)

    with pytest.raises(RecordMismatch, match="another epoch"):
        two.store(PARTITION, 0, [Record(0, 0, None, request("new")), *records(1)])


def test_given_no_model_is_served_yet_when_records_come_then_they_wait_and_are_no_dead_letters(tmp_path: Path) -> None:
    partition = Partition(tmp_path / "root", served=False)
    consumer = partition.consumer()
    consumer.begin(PARTITION, 0)

    with pytest.raises(PipelineError, match="wait"):
        consumer.store(PARTITION, 0, records(0, 1))
    partition.serve()

    assert consumer.store(PARTITION, 0, records(0, 1, 2)) == 2, "the batch that was stored counts"
    assert len(partition.lines()) == 2
    assert not partition.outbox.sent
    partition.store.close()


def test_given_a_request_that_comes_again_when_the_window_has_passed_then_it_is_another_request(
    partition: Partition,
) -> None:
    consumer = partition.consumer()
    consumer.begin(PARTITION, 0)
    consumer.store(PARTITION, 0, records(0))
    again = [Record(1, 0, b"k", request("a0"))]
    consumer.store(PARTITION, 1, again)
    partition.clock.sleep(61.0)
    consumer.store(PARTITION, 2, [Record(2, 0, b"k", request("a0"))])

    assert len(partition.lines()) == 2
    second = load_batch(partition.store, batch_key(PARTITION, 1))
    assert second is not None
    assert (second.resent, second.groups, second.previous) == (1, (), 0)


def test_given_many_batches_when_a_consumer_takes_over_then_it_knows_the_requests_of_all_within_the_window(
    partition: Partition,
) -> None:
    one, two = partition.consumer(), partition.consumer()
    one.begin(PARTITION, 0)
    for offset in range(6):
        one.store(PARTITION, offset, records(offset))
        partition.clock.sleep(timedelta(seconds=15).total_seconds())

    two.begin(PARTITION, 6)
    two.store(PARTITION, 6, [Record(6 + n, 0, b"k", request(f"a{n}")) for n in range(6)])

    batch = load_batch(partition.store, batch_key(PARTITION, 6))
    assert batch is not None
    assert batch.resent == 3, "those of the last minute"


def test_given_the_dead_letters_topic_is_silent_when_poison_comes_then_it_is_waited_for_and_not_for_ever(
    partition: Partition,
) -> None:
    consumer = partition.consumer()
    consumer.begin(PARTITION, 0)
    poison = [Record(0, 0, b"k", b"nonsense")]
    partition.outbox.reason = NotConfirmed("silent", final=False)

    with pytest.raises(NotConfirmed):
        consumer.store(PARTITION, 0, poison)
    assert load_batch(partition.store, batch_key(PARTITION, 0)) is None
    partition.clock.sleep(61.0)

    assert consumer.store(PARTITION, 0, poison) == 1


def test_given_poison_larger_than_a_message_when_it_is_a_dead_letter_then_the_message_says_where_it_lies(
    partition: Partition,
) -> None:
    consumer = partition.consumer()
    consumer.begin(PARTITION, 0)
    consumer.store(PARTITION, 0, [Record(0, 0, b"k", b"x" * 20_000)])

    (message,) = partition.outbox.sent
    headers = dict(message.headers)
    assert message.value == b""
    assert (headers["tokenmill-deadletter-original-in"] or b"").decode().startswith(str(partition.store.root))
