"""Dead letters of records: an object in the store, and a message on a topic for whoever produced them.

The object is written first and is what counts. The message is confirmed before the record's offset is committed. Where
the topic can't take it (it is gone, forbidden, or silent for longer than the settings allow) reading goes on, and the
message is owed: `owed/deadletters/ID.json` says so, until the announcer has sent it, which may be days later. Whenever
it is sent it is the same message, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import structlog

from pipeline.ingest.dead_letters import (
    LONGEST_MESSAGE,
    MOST_BYTES,
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

DOOR: Final = "kafka"
HEADER: Final = "tokenmill-deadletter-"
OWED: Final = "owed/deadletters/"
_AT_ONCE: Final = 200
_MOST_REFUSALS: Final = 3

logger = structlog.get_logger(__name__)


class UnsentDeadLetter(StoredModel):
    """`owed/deadletters/ID.json`: the topic has not got the message of this dead letter.

    Attributes:
        topic, partition, offset, timestamp: of the record that it tells of.
    """

    version: Literal[1] = 1
    topic: str
    partition: Count
    offset: Count
    timestamp: int


class KafkaDeadLetters:
    """Writes and announces dead letters. Threads may share one.

    Args:
        topic: of the messages.  patience: seconds for which the topic is waited for, over all tries.
    """

    def __init__(self, world: World, messages: Messages, topic: str, patience: float) -> None:
        self._world = world
        self._letters = DeadLetters(world)
        self._messages = messages
        self._form = _Form(world.store, topic, messages.most_bytes)
        self._patience = patience
        self._failing_since: dict[str, float] = {}

    def write(self, place: PartitionId, refused: Sequence[Refused]) -> None:
        """Make dead letters of the records; done when the objects are safe, and the messages, or that they are owed.

        Raises:
            NotConfirmed: the topic doesn't answer for now.  StoreError: an object can't be written.
        """
        for start in range(0, len(refused), _AT_ONCE):
            chunk = {self._record(place, one): one for one in refused[start : start + _AT_ONCE]}
            self._send(place, chunk)
            for letter, one in chunk.items():
                logger.warning(
                    "kafka_dead_letter",
                    place=str(place),
                    offset=one.record.offset,
                    code=one.code,
                    reason=one.message,
                    dead_letter=letter,
                )

    def _record(self, place: PartitionId, one: Refused) -> str:
        record = one.record
        source = DeadLetterSource(
            door=DOOR,
            place=f"{place.cluster}/{place.topic}",
            position=f"{place.partition}-{record.offset}",
            at=moment(record.timestamp),
        )
        return self._letters.record(source, one.code, one.message, record.value or b"", record.headers, key=record.key)

    def _send(self, place: PartitionId, refused: dict[str, Refused]) -> None:
        owed = {
            letter: UnsentDeadLetter(
                topic=place.topic,
                partition=place.partition,
                offset=one.record.offset,
                timestamp=one.record.timestamp,
            )
            for letter, one in refused.items()
        }
        name = next(iter(owed))
        try:
            self._messages.send([self._form.message(letter, owed[letter], one) for letter, one in refused.items()])
        except NotConfirmed as error:
            now = self._world.clock.monotonic()
            since = self._failing_since.setdefault(name, now)
            if not error.final and now - since < self._patience:
                raise
            for letter, paper in owed.items():
                self._world.store.create(_owed_key(letter), paper.to_json())
            logger.error("kafka_dead_letters_owed", letters=len(owed), reason=str(error))
        self._failing_since.pop(name, None)


class UnsentDeadLetters:
    """Sends the messages that are owed. Where several do so at once, one may be sent more than once.

    Args:
        topic: of the messages.
    """

    def __init__(self, world: World, messages: Messages, topic: str) -> None:
        self._store = world.store
        self._letters = DeadLetters(world)
        self._messages = messages
        self._form = _Form(world.store, topic, messages.most_bytes)

    def send(self) -> int:
        """Send what is owed, one after the other; how many were. What is refused stays owed, and so does the rest when
        all are refused.

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
                if not error.final or refusals >= _MOST_REFUSALS:
                    raise
                logger.warning("kafka_dead_letter_still_owed", owed=info.key, reason=str(error))
                continue
            self._store.delete(info.key)
        if sent:
            logger.info("kafka_dead_letters_sent_later", letters=sent)
        return sent

    def _message(self, key: str) -> Message | None:
        """None when the letter was removed meanwhile, or another has just sent it."""
        name = key.removeprefix(OWED).removesuffix(".json")
        try:
            owed = parse_stored(self._store.locate(key), self._store.read(key), UnsentDeadLetter)
            letter = self._letters.find(name).letter
            original = self._letters.original(letter)
        except (ObjectNotFound, DeadLetterNotFound):
            return None
        headers = tuple(letter.record_headers())
        record = Record(owed.offset, owed.timestamp, letter.record_key(), original, headers)
        return self._form.message(name, owed, Refused(record, letter.reason_code, letter.message))


@dataclass(frozen=True, slots=True)
class _Form:
    """How a dead letter's message looks: the record as it came, where it fits, with headers that say why and from
    where."""

    store: ObjectStore
    topic: str
    most_bytes: int

    def message(self, letter: str, owed: UnsentDeadLetter, one: Refused) -> Message:
        record = one.record
        why: Headers = (
            (f"{HEADER}id", letter.encode()),
            (f"{HEADER}code", one.code.encode()),
            (f"{HEADER}reason", one.message[:LONGEST_MESSAGE].encode(errors="replace")),
            (f"{HEADER}topic", owed.topic.encode()),
            (f"{HEADER}partition", str(owed.partition).encode()),
            (f"{HEADER}offset", str(owed.offset).encode()),
            (f"{HEADER}timestamp", str(owed.timestamp).encode()),
        )
        message = Message(self.topic, record.value or b"", record.key, (*record.headers, *why))
        if message.size <= min(self.most_bytes, MOST_BYTES):
            return message
        where = self.store.locate(f"deadletters/{letter}.json").encode()
        return Message(self.topic, b"", None, (*why, (f"{HEADER}original-in", where)))


def _owed_key(letter: str) -> str:
    return f"{OWED}{letter}.json"


def replay(messages: Messages) -> Send:
    """Sends a letter's original to the topic that it came from, with its key and headers."""

    def send(letter: DeadLetter, original: bytes) -> str:
        topic = letter.place.rpartition("/")[2]
        message = Message(topic, original, letter.record_key(), tuple(letter.record_headers()))
        if message.size > messages.most_bytes:
            raise CannotReplay(
                f"{letter.id}: its record has {letter.size} bytes, more than a message may have; send a reference"
            )
        messages.send([message])
        return f"sent to {topic} again"

    return send


def refuse_all(records: Sequence[Record], code: str, message: str) -> list[Refused]:
    """The same reason for all of them."""
    return [Refused(record, code, message) for record in records]
