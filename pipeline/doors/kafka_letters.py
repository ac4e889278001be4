"""Dead letters of records: an object in the store, and a message on a topic for whoever produced them.

The object is written first and is what counts. The message is confirmed before the record's offset is committed; only
where the topic can't take it (it is gone, forbidden, or silent for longer than the settings allow) the object stands
alone, and the log says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from pipeline.dead_letters import CannotReplay, DeadLetter, DeadLetters, LetterSource, Send
from pipeline.doors.kafka_batches import Place, moment
from pipeline.doors.kafka_records import Record, Refused
from pipeline.messages import Headers, Message, Messages, NotConfirmed
from pipeline.ports import World

DOOR: Final = "kafka"
HEADER: Final = "tokenmill-deadletter-"
_AT_ONCE: Final = 200

logger = structlog.get_logger(__name__)


class KafkaLetters:
    """Writes and announces dead letters. Threads may share one.

    Args:
        topic: of the messages.  patience: seconds for which the topic is waited for, over all tries.
    """

    def __init__(self, world: World, messages: Messages, topic: str, patience: float) -> None:
        self._world = world
        self._letters = DeadLetters(world)
        self._messages = messages
        self._topic = topic
        self._patience = patience
        self._failing_since: dict[str, float] = {}

    def write(self, place: Place, refused: Sequence[Refused]) -> None:
        """Make dead letters of the records; done when objects and messages are safe.

        Raises:
            NotConfirmed: the topic doesn't answer for now.  StoreError: an object can't be written.
        """
        for start in range(0, len(refused), _AT_ONCE):
            chunk = refused[start : start + _AT_ONCE]
            ids = [self._record(place, one) for one in chunk]
            messages = [self._message(place, one, letter) for one, letter in zip(chunk, ids, strict=True)]
            self._send(f"{place.folder}{chunk[0].record.offset}", messages)
            for one, letter in zip(chunk, ids, strict=True):
                logger.warning(
                    "kafka_dead_letter",
                    place=str(place),
                    offset=one.record.offset,
                    code=one.code,
                    reason=one.message,
                    dead_letter=letter,
                )

    def _record(self, place: Place, one: Refused) -> str:
        record = one.record
        source = LetterSource(
            door=DOOR,
            place=f"{place.cluster}/{place.topic}",
            position=f"{place.partition}-{record.offset}",
            at=moment(record.timestamp),
        )
        return self._letters.record(source, one.code, one.message, record.value or b"", record.headers, key=record.key)

    def _message(self, place: Place, one: Refused, letter: str) -> Message:
        record = one.record
        why: Headers = (
            (f"{HEADER}id", letter.encode()),
            (f"{HEADER}code", one.code.encode()),
            (f"{HEADER}reason", one.message.encode(errors="replace")),
            (f"{HEADER}topic", place.topic.encode()),
            (f"{HEADER}partition", str(place.partition).encode()),
            (f"{HEADER}offset", str(record.offset).encode()),
            (f"{HEADER}timestamp", str(record.timestamp).encode()),
        )
        value = record.value or b""
        message = Message(self._topic, value, record.key, (*record.headers, *why))
        if message.size <= self._messages.most_bytes:
            return message
        where = self._world.store.locate(f"deadletters/{letter}.json").encode()
        return Message(self._topic, b"", None, (*why, (f"{HEADER}original-in", where)))

    def _send(self, name: str, messages: Sequence[Message]) -> None:
        try:
            self._messages.send(messages)
        except NotConfirmed as error:
            now = self._world.clock.monotonic()
            since = self._failing_since.setdefault(name, now)
            if not error.final and now - since < self._patience:
                raise
            logger.error(
                "kafka_dead_letters_not_announced", topic=self._topic, letters=len(messages), reason=str(error)
            )
        self._failing_since.pop(name, None)


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
