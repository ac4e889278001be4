"""Harness of the Kafka tests: a root on a folder, topics on a real broker, and consumers on threads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, OffsetAndMetadata, TopicPartition

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.kafka.connection import KafkaConnection
from pipeline.adapters.kafka.producer import KafkaSender, ProducerSettings
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ingest.dead_letters import DeadLetter, DeadLetters
from pipeline.ingest.intake import Intake, IntakePort
from pipeline.ingest.kafka.consumer import KafkaIngest
from pipeline.ingest.kafka.micro_batches import KafkaBatch, load_batch
from pipeline.ingest.kafka.partition import Handler
from pipeline.ingest.kafka.settings import KafkaIngestSettings
from pipeline.ingest.kafka.source import build_kafka_ingest, kafka_handlers
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.summaries import find_ledgers
from pipeline.ledger.ledger import JobLedger
from pipeline.models.catalog import Catalog
from pipeline.ports import ObjectStore, World
from schemas.jobs.inputs import InputRef
from schemas.jobs.job import Job
from schemas.models import CatalogEntry, ModelPin
from tests.waiting import HANG_SECONDS

MODEL = "tiny"
TIMEOUT_SECONDS = HANG_SECONDS
REPOSITORY = Path(__file__).parents[4]
Header = tuple[str, bytes]


def request(name: str, *, text: str = "hello", model: str = MODEL) -> bytes:
    """An input line."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return orjson.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


@dataclass(frozen=True, slots=True)
class ProducedRecord:
    """A message to produce."""

    value: bytes | None
    key: bytes | None = b"k"
    headers: Sequence[Header] = ()
    partition: int | None = 0


@dataclass
class KafkaHarness:
    """The root and topics of one test.

    Attributes:
        name: prefix of the topics; unique for each test.
    """

    bootstrap: str
    name: str
    folder: Path
    wrap: Callable[[ObjectStore], ObjectStore] = lambda store: store
    connect_timeout: float = 10.0
    store: FolderStore = field(init=False)
    world: World = field(init=False)
    sender: KafkaSender = field(init=False)

    def __post_init__(self) -> None:
        self.store = FolderStore(self.folder)
        self.world = World(self.wrap(self.store), SystemClock(), SystemRandomness(), self.store.scratch)
        pin = ModelPin(name=MODEL, source="/models/tiny", digest="sha256:1", dtype="float32")
        Catalog(self.store).publish(CatalogEntry(pin=pin, max_model_len=512))
        self.sender = KafkaSender(
            ProducerSettings(self.connection, idempotence=False, max_block_seconds=5.0, delivery_timeout_seconds=10.0)
        )

    @property
    def connection(self) -> KafkaConnection:
        return KafkaConnection((self.bootstrap,), connect_timeout=self.connect_timeout, request_timeout=5.0)

    @property
    def requests(self) -> str:
        return f"{self.name}.requests"

    @property
    def deadletter(self) -> str:
        return f"{self.name}.deadletter"

    def make_topics(self, *names: str, partitions: int = 1) -> None:
        admin = KafkaAdminClient(bootstrap_servers=self.bootstrap)
        try:
            admin.create_topics({name: {"num_partitions": partitions, "replication_factor": 1} for name in names})
        finally:
            admin.close()

    def settings(self, **changes: Any) -> KafkaIngestSettings:
        plain = KafkaIngestSettings(
            connection=self.connection,
            requests={self.requests: "team"},
            jobs={},
            deadletter_topic=self.deadletter,
            group_id=f"{self.name}-intake",
            batch_seconds=0.3,
            poll_seconds=0.05,
            session_timeout_seconds=2.0,  # what the broker needs; see tests.servers.kafka
            heartbeat_interval_seconds=0.2,
            first_retry_seconds=0.1,
            max_retry_seconds=0.5,
            call_timeout_seconds=10.0,
        )
        return replace(plain, **changes)

    def handlers(self, settings: KafkaIngestSettings, intake: IntakePort) -> dict[str, Handler]:
        """The handler of each topic."""
        return kafka_handlers(settings, self.world, intake, self.sender, pin_local)

    def ingest(self, settings: KafkaIngestSettings | None = None, intake: IntakePort | None = None) -> KafkaIngest:
        """A new consumer of the harness's topics."""
        intake = intake or Intake(self.world)
        return build_kafka_ingest(settings or self.settings(), self.world, intake, self.sender, pin_local)

    @contextmanager
    def running(self, ingest: KafkaIngest) -> Iterator[KafkaIngest]:
        """Run the consumer on a thread; its error is raised here."""
        stop, raised = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                ingest.run(stop)
            except BaseException as error:  # noqa: BLE001 - raised in the test below
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield ingest
        finally:
            stop.set()
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive()
        if raised:
            raise raised[0]

    @contextmanager
    def stepping(self, ingest: KafkaIngest) -> Iterator[Callable[[Callable[[], bool], str], None]]:
        """Run the consumer on this thread: the yielded function steps it until a condition is true."""
        try:
            yield lambda met, what: until(lambda: bool(ingest.step()) or met(), what)
        finally:
            ingest.close()

    def produce(self, said: Iterable[ProducedRecord], topic: str | None = None) -> None:
        producer = KafkaProducer(bootstrap_servers=self.bootstrap, enable_idempotence=False, batch_size=0,
                                 max_request_size=64 << 20)  # fmt: skip
        try:
            futures = [
                producer.send(topic or self.requests, one.value, one.key, list(one.headers), one.partition)
                for one in said
            ]
            for future in futures:
                future.get(timeout=HANG_SECONDS)
        finally:
            producer.close()

    def consume(self, topic: str, count: int, seconds: float = HANG_SECONDS) -> list[Any]:
        """At least so many messages of a topic, from its beginning, and those that arrive within a moment after."""
        consumer = KafkaConsumer(bootstrap_servers=self.bootstrap, auto_offset_reset="earliest")
        found: list[Any] = []
        try:
            partitions = consumer.partitions_for_topic(topic)
            consumer.assign([TopicPartition(topic, number) for number in sorted(partitions)])
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                polled = consumer.poll(timeout_ms=300)
                for records in polled.values():
                    found += records
                if len(found) >= count and not polled:
                    break
        finally:
            consumer.close()
        return found

    def committed(self, partition: int = 0, *, group: str | None = None, topic: str | None = None) -> int | None:
        consumer = KafkaConsumer(bootstrap_servers=self.bootstrap, group_id=group or f"{self.name}-intake",
                                 enable_auto_commit=False)  # fmt: skip
        try:
            offset: int | None = consumer.committed(TopicPartition(topic or self.requests, partition))
        finally:
            consumer.close()
        return offset

    def commit(self, offset: int, partition: int = 0) -> None:
        """Set the group's offset while it has no members, as an operator."""
        consumer = KafkaConsumer(bootstrap_servers=self.bootstrap, group_id=f"{self.name}-intake",
                                 enable_auto_commit=False)  # fmt: skip
        try:
            topic_partition = TopicPartition(self.requests, partition)
            consumer.assign([topic_partition])
            consumer.commit({topic_partition: OffsetAndMetadata(offset, "", -1)})
        finally:
            consumer.close()

    def ledgers(self) -> list[JobLedger]:
        return list(find_ledgers(self.store))

    def jobs(self) -> list[Job]:
        return [ledger.job() for ledger in self.ledgers()]

    def lines(self) -> list[str]:
        """The custom_ids of all jobs' input lines, sorted: a duplicate was ingested twice."""
        return sorted(
            orjson.loads(line)["custom_id"]
            for job in self.jobs()
            for line in Path(job.input.files[0].uri).read_bytes().splitlines()
        )

    def batches(self) -> list[KafkaBatch]:
        """All batches, by partition and offset."""
        found = (load_batch(self.store, info.key) for info in self.store.list("intake/kafka/")
                 if info.key.endswith(".json"))  # fmt: skip
        return [batch for batch in found if batch is not None]

    def dead_letters(self) -> list[DeadLetter]:
        return [found.dead_letter for found in DeadLetters(self.world).dead_letters()]

    def close(self) -> None:
        self.sender.close()
        self.store.close()


def pin_local(uri: str) -> InputRef:
    """Pin the input of a job by reference: in tests, a local file."""
    return pin_input(Path(uri))


def until(met: Callable[[], bool], what: str, seconds: float = TIMEOUT_SECONDS) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, f"after {seconds} s still not: {what}"
        time.sleep(0.05)


def child(harness: KafkaHarness, moment: str, **more: object) -> subprocess.Popen[bytes]:
    """A consumer in a process of its own; see `kafka_child`."""
    given = {
        "bootstrap": harness.bootstrap,
        "name": harness.name,
        "folder": str(harness.folder),
        "moment": moment,
        **more,
    }
    command = [sys.executable, "-m", "tests.pipeline.ingest.kafka.kafka_child", json.dumps(given)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
