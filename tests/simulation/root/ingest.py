"""The simulated environment of the ingest sources: folders of files, events about them, and a Kafka partition.

The ingest sources are the real ones. Events come once, twice or thrice, to one intake or to several, early, late or
never; an event is deleted once it is settled, and is delivered again after a crash before that. The partition gives its
records to any consumer: the group's guarantee (one consumer at a time) can't be relied on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from pipeline.adapters.kafka.connection import KafkaConnection
from pipeline.ingest.files.source import Entry, FileIngestSource, FileVersion, PinnedFile
from pipeline.ingest.intake import Intake
from pipeline.ingest.kafka.dead_letters import KafkaDeadLetters
from pipeline.ingest.kafka.micro_batches import PartitionId
from pipeline.ingest.kafka.records import Record
from pipeline.ingest.kafka.request_batches import RequestBatches
from pipeline.ingest.kafka.settings import KafkaIngestSettings
from pipeline.ports import PipelineError, World
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from tests.simulation.machine import START, Process
from tests.simulation.root.ports import Broker, RootMessages
from tests.simulation.root.scenario import KAFKA_TENANT, Drop, RecordLine
from tests.simulation.scenario import Line

DROPS = "/drops/"
"""The URI prefix of the dropped files."""

TOPIC = "requests"


def content(lines: Sequence[Line]) -> bytes:
    """A file of these lines."""
    return "".join(line.text + "\n" for line in lines).encode()


def uri_of(drop: Drop) -> str:
    """The file, as jobs name it."""
    return f"{DROPS}{drop.tenant}/{drop.name}"


class Inbox:
    """`Inbox` of one tenant: files that come to be at their time, whole."""

    kind = "bucket"

    def __init__(self, tenant: str, drops: Sequence[Drop], process: Process) -> None:
        self.tenant = tenant
        self._drops = {drop.name: drop for drop in drops if drop.tenant == tenant}
        self._process = process

    def entries(self) -> Iterator[Entry]:
        self._process.point("drops.list")
        there = [drop for drop in self._drops.values() if drop.at <= self._process.machine.now]
        return iter([self._entry(drop) for drop in there])

    def find(self, name: str, version: str | None = None) -> FileVersion | None:
        self._process.point("drops.find", name)
        drop = self._drops.get(name)
        if drop is None or drop.at > self._process.machine.now:
            return None
        metadata = {"tier": drop.tier}
        if drop.model is not None:
            metadata["model"] = drop.model
        if drop.deadline is not None:
            metadata["deadline"] = f"{drop.deadline:.0f}s"
        return FileVersion(self._entry(drop), START + timedelta(seconds=drop.at), "v1", "e1", metadata)

    def read(self, name: str, max_bytes: int) -> bytes | None:
        return None

    def pin(self, drop: FileVersion, kind: InputFormat) -> PinnedFile:
        self._process.point("drops.pin", drop.entry.name)
        found = self._drops[drop.entry.name]
        uri = uri_of(found)
        file = InputFile(uri=uri, size=drop.entry.size, version="v1", etag="e1")
        return PinnedFile(InputRef(uri=uri, format=kind, files=(file,)), (uri, "v1"))

    def uri(self, name: str) -> str:
        return f"{DROPS}{self.tenant}/{name}"

    def _entry(self, drop: Drop) -> Entry:
        return Entry(drop.name, len(content(drop.lines)), "s1")


class Events:
    """`Polls` of one intake.

    Args:
        settled: events that were received and deleted, as (drop, number); shared by all lives.
    """

    def __init__(
        self, intake: int, drops: Sequence[Drop], sources: Mapping[str, FileIngestSource], process: Process,
        settled: set[tuple[str, int]],
    ) -> None:  # fmt: skip
        self._mine = [
            (at, drop, number) for drop in drops for number, (at, whose) in enumerate(drop.told) if whose == intake
        ]
        self._sources = sources
        self._process = process
        self._settled = settled

    def poll(self) -> int | None:
        process = self._process
        due = [
            one for one in self._mine if one[0] <= process.machine.now and (one[1].name, one[2]) not in self._settled
        ]
        if not due:
            process.sleep(1.0)
            return 0
        _, drop, number = process.machine.chance.choice(due)
        if self._sources[drop.tenant].take(drop.name, "v1").settled:
            process.point("ingest.settle", drop.name)
            self._settled.add((drop.name, number))
        else:
            process.sleep(1.0)
        return 1


class Consumer:
    """Reads the partition from the committed offset on, stores them in batches, and commits durable offsets."""

    def __init__(
        self, records: Sequence[RecordLine], world: World, intake: Intake, messages: RootMessages, broker: Broker,
        process: Process,
    ) -> None:  # fmt: skip
        settings = KafkaIngestSettings(KafkaConnection(("broker:9092",)))
        dead_letters = KafkaDeadLetters(
            world, messages, settings.deadletter_topic, settings.deadletter_retry_timeout_seconds
        )
        self._batches = RequestBatches(world, intake, dead_letters, settings)
        self._partition = PartitionId("cluster", TOPIC, 0, KAFKA_TENANT)
        self._records = [(one.at, as_record(offset, one)) for offset, one in enumerate(records)]
        self._broker = broker
        self._process = process
        self._world = world
        self._max_records = 1 + (process.life + len(process.name)) % 3

    def run(self, stop: threading.Event) -> None:
        """Consume until `stop` is set."""
        position: int | None = None
        while not stop.is_set():
            try:
                if position is None:
                    position = self._batches.begin(self._partition, self._broker.committed)
                position = self._step(position)
            except PipelineError:
                position = None
                self._world.clock.sleep(1.0)

    def _step(self, position: int) -> int:
        machine = self._process.machine
        there = [record for at, record in self._records if at <= machine.now and record.offset >= position]
        if not there:
            self._world.clock.sleep(1.0)
            return position
        end = self._batches.store(self._partition, position, there[: self._max_records])
        self._process.point("kafka.commit", f"{end}")
        self._broker.committed = end
        self._process.point("kafka.committed")
        return end


def as_record(offset: int, one: RecordLine) -> Record:
    """The record as the topic has it."""
    headers = () if one.tier is None else (("tier", one.tier.encode()),)
    value = one.line.text.encode()
    return Record(offset, int((START.timestamp() + one.at) * 1000), f"key-{offset}".encode(), value, headers)
