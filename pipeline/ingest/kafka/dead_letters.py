"""Dead letters of Kafka records: an object in the store, and a message on a topic for the producers.

The object is written first and is authoritative. The message is confirmed before the record's offset is committed. If
the topic can't take it (it is missing, forbidden, or silent for longer than the settings allow) reading goes on, and
`owed/deadletters/ID.json` records that the message is owed, until the publisher has sent it, perhaps days later. The
message is the same whenever it is sent, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import structlog

from pipeline.ingest.dead_letters import (
    MAX_MESSAGE_CHARS,
    MAX_ORIGINAL_BYTES,
    CannotReplay,
    DeadLetter,
    DeadLetterNotFound,
    DeadLetters,
    DeadLetterSource,
    Send,
)
from pipeline.ingest.kafka.micro_batches import PartitionId, moment
from pipeline.ingest.kafka.records import Record, Refused
from pipeline.ledger.ledger import parse_stored
from pipeline.ports import Headers, Message, Messages, NotConfirmed, ObjectNotFound, ObjectStore, World
from schemas.stored import Count, StoredModel

INGEST_SOURCE: Final = "kafka"
HEADER: Final = "tokenmill-deadletter-"
OWED: Final = "owed/deadletters/"
_BATCH_SIZE: Final = 200
_MAX_REFUSALS: Final = 3

logger = structlog.get_logger(__name__)


class UnsentDeadLetter(StoredModel):
    """`owed/deadletters/ID.json`: the message of this dead letter has not been sent to the topic.

    Attributes:
        topic, partition, offset, timestamp: of the refused record.
    """

    version: Literal[1] = 1
    topic: str
    partition: Count
    offset: Count
    timestamp: int


class KafkaDeadLetters:
    """Writes dead letters, and sends their messages. Threads may share one.

    Args:
        topic: of the messages.  retry_timeout_seconds: for sending a message, over all attempts.
    """

    def __init__(self, world: World, messages: Messages, topic: str, retry_timeout_seconds: float) -> None:
        self._world = world
        self._dead_letters = DeadLetters(world)
        self._messages = messages
        self._builder = _MessageBuilder(world.store, topic, messages.max_bytes)
        self._retry_timeout_seconds = retry_timeout_seconds
        self._failing_since: dict[str, float] = {}

    def write(self, partition_id: PartitionId, refused: Sequence[Refused]) -> None:
        """Write dead letters of the records. Returns when the objects are durable, and the messages are sent or
        recorded as owed.

        Raises:
            NotConfirmed: the topic doesn't answer for now.  StoreError: an object can't be written.
        """
        for start in range(0, len(refused), _BATCH_SIZE):
            chunk = {self._record(partition_id, one): one for one in refused[start : start + _BATCH_SIZE]}
            self._send(partition_id, chunk)
            for dead_letter, one in chunk.items():
                logger.warning(
                    "kafka_dead_letter",
                    partition=str(partition_id),
                    offset=one.record.offset,
                    code=one.code,
                    reason=one.message,
                    dead_letter=dead_letter,
                )

    def _record(self, partition_id: PartitionId, one: Refused) -> str:
        record = one.record
        source = DeadLetterSource(
            ingest_source=INGEST_SOURCE,
            place=f"{partition_id.cluster}/{partition_id.topic}",
            position=f"{partition_id.partition}-{record.offset}",
            at=moment(record.timestamp),
        )
        return self._dead_letters.record(
            source, one.code, one.message, record.value or b"", record.headers, key=record.key
        )

    def _send(self, partition_id: PartitionId, refused: dict[str, Refused]) -> None:
        owed = {
            dead_letter: UnsentDeadLetter(
                topic=partition_id.topic,
                partition=partition_id.partition,
                offset=one.record.offset,
                timestamp=one.record.timestamp,
            )
            for dead_letter, one in refused.items()
        }
        name = next(iter(owed))
        try:
            self._messages.send([self._builder.build(id_, owed[id_], one) for id_, one in refused.items()])
        except NotConfirmed as error:
            now = self._world.clock.monotonic()
            since = self._failing_since.setdefault(name, now)
            if not error.final and now - since < self._retry_timeout_seconds:
                raise
            for dead_letter, record in owed.items():
                self._world.store.create(_owed_key(dead_letter), record.to_json())
            logger.error("kafka_dead_letters_owed", dead_letters=len(owed), reason=str(error))
        self._failing_since.pop(name, None)


class UnsentDeadLetters:
    """Sends owed messages. If several processes do so at once, one may be sent more than once.

    Args:
        topic: of the messages.
    """

    def __init__(self, world: World, messages: Messages, topic: str) -> None:
        self._store = world.store
        self._dead_letters = DeadLetters(world)
        self._messages = messages
        self._builder = _MessageBuilder(world.store, topic, messages.max_bytes)

    def send(self) -> int:
        """Send owed messages one by one; returns their number. A refused message stays owed, and so do the rest when
        several in a row are refused.

        Raises:
            NotConfirmed: the topic doesn't answer for now.
        """
        sent = refusals = 0
        for info in list(self._store.list(OWED)):
            message = self._message(info.key)
            try:
                if message is not None:
                    self._messages.send([message])
                    sent += 1
                refusals = 0
            except NotConfirmed as error:
                refusals += 1
                if not error.final or refusals >= _MAX_REFUSALS:
                    raise
                logger.warning("kafka_dead_letter_still_owed", owed=info.key, reason=str(error))
                continue
            self._store.delete(info.key)
        if sent:
            logger.info("kafka_dead_letters_sent_later", dead_letters=sent)
        return sent

    def _message(self, key: str) -> Message | None:
        """The message; None when the dead letter was removed meanwhile, or another process has just sent it."""
        name = key.removeprefix(OWED).removesuffix(".json")
        try:
            owed = parse_stored(self._store.locate(key), self._store.read(key), UnsentDeadLetter)
            letter = self._dead_letters.find(name).dead_letter
            original = self._dead_letters.original(letter)
        except (ObjectNotFound, DeadLetterNotFound):
            return None
        headers = tuple(letter.record_headers())
        record = Record(owed.offset, owed.timestamp, letter.record_key(), original, headers)
        return self._builder.build(name, owed, Refused(record, letter.reason_code, letter.message))


@dataclass(frozen=True, slots=True)
class _MessageBuilder:
    """Builds a dead letter's message: the record as received, if it fits, with headers for the reason and the
    source."""

    store: ObjectStore
    topic: str
    max_bytes: int

    def build(self, letter: str, owed: UnsentDeadLetter, one: Refused) -> Message:
        record = one.record
        reason: Headers = (
            (f"{HEADER}id", letter.encode()),
            (f"{HEADER}code", one.code.encode()),
            (f"{HEADER}reason", one.message[:MAX_MESSAGE_CHARS].encode(errors="replace")),
            (f"{HEADER}topic", owed.topic.encode()),
            (f"{HEADER}partition", str(owed.partition).encode()),
            (f"{HEADER}offset", str(owed.offset).encode()),
            (f"{HEADER}timestamp", str(owed.timestamp).encode()),
        )
        message = Message(self.topic, record.value or b"", record.key, (*record.headers, *reason))
        if message.size <= min(self.max_bytes, MAX_ORIGINAL_BYTES):
            return message
        where = self.store.locate(f"deadletters/{letter}.json").encode()
        return Message(self.topic, b"", None, (*reason, (f"{HEADER}original-in", where)))


def _owed_key(dead_letter: str) -> str:
    return f"{OWED}{dead_letter}.json"


def replay(messages: Messages) -> Send:
    """A `Send` that sends a dead letter's original to its source topic, with its key and headers."""

    def send(dead_letter: DeadLetter, original: bytes) -> str:
        topic = dead_letter.place.rpartition("/")[2]
        message = Message(topic, original, dead_letter.record_key(), tuple(dead_letter.record_headers()))
        if message.size > messages.max_bytes:
            raise CannotReplay(
                f"{dead_letter.id}: its record has {dead_letter.size} bytes, more than a message may have; "
                "send a reference"
            )
        messages.send([message])
        return f"sent to {topic} again"

    return send


def refuse_all(records: Sequence[Record], code: str, message: str) -> list[Refused]:
    """Refuse all records for the same reason."""
    return [Refused(record, code, message) for record in records]
