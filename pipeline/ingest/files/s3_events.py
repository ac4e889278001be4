"""A bucket's upload events from a queue, and the ingest of their files.

Events are hints. They may come twice, late, in any order, or never; a multipart upload may cause two. So only the
object's name and version are taken from an event, and the ingest source reads the object itself. A message is deleted
when all its objects are settled: each is a job or a dead letter. Until then it is delivered again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_plus

import orjson
import structlog

from pipeline.adapters.sqs import SqsMessage, SqsQueue
from pipeline.ingest.dead_letters import BUCKET_EVENTS, DeadLetters, DeadLetterSource
from pipeline.ingest.files.s3_inbox import BucketInbox
from pipeline.ingest.files.source import FileIngestSource, IngestResult
from pipeline.ports import PipelineError, World

logger = structlog.get_logger(__name__)


class NotAnEvent(PipelineError):
    """Raised when a message is no bucket event."""


@dataclass(frozen=True, slots=True)
class ObjectCreated:
    """An object, or a new version of it, was created."""

    bucket: str
    key: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class EventSettings:
    """Seconds after which a message is delivered again.

    Attributes:
        no_room: its tenant has too much work queued.  waiting: its file waits for a sidecar.
        failed: it could not be handled.
        foreign: its bucket is not configured here: left to the queue's own dead-letter queue.
    """

    no_room: int = 120
    waiting: int = 15
    failed: int = 30
    foreign: int = 300


def read_events(body: str) -> list[ObjectCreated]:
    """The created objects in a message: S3's own format (directly, or through SNS), or EventBridge's. Empty for S3's
    test event and for other bucket events. Raises `NotAnEvent`."""
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
        # Keys are form-encoded: a space is "+", and some servers write "/" as "%2F".
        key = unquote_plus(described["object"]["key"])
        yield ObjectCreated(described["bucket"]["name"], key, described["object"].get("versionId"))


def _from_bridge(document: dict[str, Any]) -> Iterator[ObjectCreated]:
    if document["detail-type"] == "Object Created":
        described = document["detail"]
        # Here the key is not encoded.
        yield ObjectCreated(
            described["bucket"]["name"], described["object"]["key"], described["object"].get("version-id")
        )


class BucketEvents:
    """Ingests the files that a queue's messages name.

    Args:
        sources: inboxes whose objects may become jobs, with their ingest sources. Other objects of their buckets are
            skipped.
    """

    def __init__(
        self,
        queue: SqsQueue,
        sources: Sequence[tuple[BucketInbox, FileIngestSource]],
        world: World,
        settings: EventSettings | None = None,
    ) -> None:
        self._queue = queue
        self._sources = sorted(sources, key=lambda pair: len(pair[0].prefix), reverse=True)
        self._dead_letters = DeadLetters(world)
        self._settings = settings or EventSettings()

    def poll(self) -> int | None:
        """Wait for messages and handle them; returns their number. None: no tenant has room, so the queue isn't polled.

        Raises:
            PipelineError: the queue can't be reached.
        """
        if not any(source.has_room() for _, source in self._sources):
            return None
        messages = self._queue.receive()
        with self._queue.extend_visibility(messages) as extender:
            for message in messages:
                redelivery_seconds = self._handle(message)
                extender.release(message)
                if redelivery_seconds is None:
                    self._queue.delete(message)
                else:
                    self._queue.postpone(message, redelivery_seconds)
        return len(messages)

    def replay(self, original: bytes) -> str:
        """Put a refused message on the queue again; returns its new id."""
        return self._queue.send(original.decode())

    def _handle(self, message: SqsMessage) -> int | None:
        """Seconds after which the message must be delivered again; None when it is settled."""
        try:
            events = read_events(message.body)
        except NotAnEvent as error:
            source = DeadLetterSource(BUCKET_EVENTS, self._queue.url, message.id, message.sent_at)
            dead_letter = self._dead_letters.record(source, "invalid_event", str(error), message.body.encode())
            logger.warning("event_refused", queue=self._queue.url, reason=str(error), dead_letter=dead_letter)
            return None
        waits = [wait for event in events if (wait := self._take(event)) is not None]
        return max(waits, default=None)

    def _take(self, event: ObjectCreated) -> int | None:
        found = self._find_source(event)
        if found is None:
            is_ours = any(inbox.bucket == event.bucket for inbox, _ in self._sources)
            if not is_ours:
                logger.warning("event_of_foreign_bucket", bucket=event.bucket, key=event.key)
            return None if is_ours else self._settings.foreign
        inbox, source = found
        try:
            result = source.take(event.key.removeprefix(inbox.prefix), event.version)
        except PipelineError as error:
            logger.warning("file_not_ingested", uri=f"s3://{event.bucket}/{event.key}", reason=str(error))
            return self._settings.failed
        if result is IngestResult.NO_ROOM:
            return self._settings.no_room
        return self._settings.waiting if result is IngestResult.WAITING else None

    def _find_source(self, event: ObjectCreated) -> tuple[BucketInbox, FileIngestSource] | None:
        """The inbox with the longest prefix of the object's key, and its ingest source."""
        return next(
            (
                (inbox, source)
                for inbox, source in self._sources
                if inbox.bucket == event.bucket and event.key.startswith(inbox.prefix)
            ),
            None,
        )
