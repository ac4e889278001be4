"""What a bucket tells a queue when something was uploaded, and the door that listens.

Events are hints. They come twice, late, in any order, some never; an upload in parts may be told of twice. So of an
event only the object's name and version count, and the door looks for itself. A message is deleted when all that it
names is settled: the job stands, or a dead letter. Until then it comes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_plus

import orjson
import structlog

from pipeline.adapters.s3.sqs import SqsMessage, SqsQueue
from pipeline.ingest.dead_letters import BUCKET_EVENTS, DeadLetters, DeadLetterSource
from pipeline.ingest.files.s3_inbox import BucketInbox
from pipeline.ingest.files.source import FileIngestSource, IngestResult
from pipeline.ports import PipelineError, World

logger = structlog.get_logger(__name__)


class NotAnEvent(PipelineError):
    """Raised for a message that is no event of a bucket."""


@dataclass(frozen=True, slots=True)
class ObjectCreated:
    """An object came to be, or a new version of it."""

    bucket: str
    key: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class EventSettings:
    """Seconds after which a message comes back.

    Attributes:
        no_room: whose tenant has too much work queued.  waiting: whose file waits for its sidecar.
        failed: that could not be handled.
        foreign: that tells of a bucket which is not ours: left to the queue's own dead letters.
    """

    no_room: int = 120
    waiting: int = 15
    failed: int = 30
    foreign: int = 300


def read_events(body: str) -> list[ObjectCreated]:
    """What a message says was created: S3's own form (directly, or through SNS), or EventBridge's. Empty for S3's test
    event and for other things that happen in buckets. Raises `NotAnEvent`."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise NotAnEvent(f"the message is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise NotAnEvent("the message is no JSON object")
    if document.get("Type") == "Notification" and isinstance(document.get("Message"), str):
        return read_events(document["Message"])
    if document.get("Event") == "s3:TestEvent":
        return []
    try:
        if document.get("source") == "aws.s3":
            return list(_from_bridge(document))
        return [event for record in document["Records"] for event in _from_record(record)]
    except (KeyError, TypeError, AttributeError) as error:
        raise NotAnEvent(f"the message is no event of a bucket ({type(error).__name__}: {error})") from error


def _from_record(record: dict[str, Any]) -> Iterator[ObjectCreated]:
    described = record["s3"]
    if record["eventName"].removeprefix("s3:").startswith("ObjectCreated:"):
        # Keys come as in a form's fields: a space is "+", and some servers write "/" as "%2F".
        key = unquote_plus(described["object"]["key"])
        yield ObjectCreated(described["bucket"]["name"], key, described["object"].get("versionId"))


def _from_bridge(document: dict[str, Any]) -> Iterator[ObjectCreated]:
    if document["detail-type"] == "Object Created":
        described = document["detail"]
        # Here the key is written as it is.
        yield ObjectCreated(
            described["bucket"]["name"], described["object"]["key"], described["object"].get("version-id")
        )


class BucketEvents:
    """Takes what a queue's messages tell of.

    Args:
        doors: of the places whose objects may become jobs. What lies elsewhere in their buckets is passed over.
    """

    def __init__(
        self,
        queue: SqsQueue,
        doors: Sequence[tuple[BucketInbox, FileIngestSource]],
        world: World,
        settings: EventSettings | None = None,
    ) -> None:
        self._queue = queue
        self._doors = sorted(doors, key=lambda pair: len(pair[0].prefix), reverse=True)
        self._letters = DeadLetters(world)
        self._settings = settings or EventSettings()

    def poll(self) -> int | None:
        """Wait for messages and handle what comes; how many came. None: no tenant has room, so nobody asked the queue.

        Raises:
            PipelineError: the queue can't be reached.
        """
        if not any(door.has_room() for _, door in self._doors):
            return None
        messages = self._queue.receive()
        with self._queue.keep(messages) as kept:
            for message in messages:
                comes_back_after = self._handle(message)
                kept.let_go(message)
                if comes_back_after is None:
                    self._queue.delete(message)
                else:
                    self._queue.postpone(message, comes_back_after)
        return len(messages)

    def replay(self, original: bytes) -> str:
        """Put a message that was refused on the queue again; its new id."""
        return self._queue.send(original.decode())

    def _handle(self, message: SqsMessage) -> int | None:
        """Seconds after which the message must come back; None when it is done with."""
        try:
            events = read_events(message.body)
        except NotAnEvent as error:
            source = DeadLetterSource(BUCKET_EVENTS, self._queue.url, message.id, message.sent_at)
            letter = self._letters.record(source, "invalid_event", str(error), message.body.encode())
            logger.warning("event_refused", queue=self._queue.url, reason=str(error), dead_letter=letter)
            return None
        waits = [wait for event in events if (wait := self._take(event)) is not None]
        return max(waits, default=None)

    def _take(self, event: ObjectCreated) -> int | None:
        found = self._door_of(event)
        if found is None:
            ours = any(inbox.bucket == event.bucket for inbox, _ in self._doors)
            if not ours:
                logger.warning("event_of_foreign_bucket", bucket=event.bucket, key=event.key)
            return None if ours else self._settings.foreign
        inbox, door = found
        try:
            taken = door.take(event.key.removeprefix(inbox.prefix), event.version)
        except PipelineError as error:
            logger.warning("drop_not_taken", uri=f"s3://{event.bucket}/{event.key}", reason=str(error))
            return self._settings.failed
        if taken is IngestResult.NO_ROOM:
            return self._settings.no_room
        return self._settings.waiting if taken is IngestResult.WAITING else None

    def _door_of(self, event: ObjectCreated) -> tuple[BucketInbox, FileIngestSource] | None:
        """The most particular place that the object lies in."""
        return next(
            (
                (inbox, door)
                for inbox, door in self._doors
                if inbox.bucket == event.bucket and event.key.startswith(inbox.prefix)
            ),
            None,
        )
