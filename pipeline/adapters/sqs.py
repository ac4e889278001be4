"""An SQS queue, for messages that must not be lost: each is delivered again until it is deleted.

While messages are processed, a thread extends their visibility timeout; when the process dies they become visible again
soon. The service's own clock counts here, so this thread waits by the system's clock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import boto3
import structlog
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from pipeline.ports import PipelineError

logger = structlog.get_logger(__name__)


class QueueError(PipelineError):
    """Raised when a queue can't be reached, or refuses an operation."""


@dataclass(frozen=True, slots=True)
class SqsSettings:
    """The queue's address, and how it is polled.

    Attributes:
        url: of the queue.
        region, endpoint: None: as AWS's tools would choose.
        access_key, secret_key, session_token: None: from AWS's usual sources. Never shown.
        wait_seconds: for which a poll waits for messages, 20 at most; an intake takes as long to stop.
        visibility_seconds: visibility timeout, after which a dead reader's messages are delivered again.
        batch: maximum messages of one poll, 10 at most.
    """

    url: str
    region: str | None = None
    endpoint: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    wait_seconds: int = 5
    visibility_seconds: int = 60
    batch: int = 10


@dataclass(frozen=True, slots=True)
class SqsMessage:
    """A received message. `receipt` is of this delivery; `receives` counts all deliveries."""

    id: str
    receipt: str
    body: str
    sent_at: datetime
    receives: int


class SqsQueue:
    """One queue. Threads may share it. Raises `QueueError` when no client can be made, such as without a region."""

    def __init__(self, settings: SqsSettings) -> None:
        self._settings = settings
        try:
            self._client = _make_client(settings)
        except (BotoCoreError, ValueError) as error:
            raise QueueError(f"SQS: can't be used: {error}; correct the settings") from error

    @property
    def url(self) -> str:
        return self._settings.url

    def receive(self) -> list[SqsMessage]:
        """Poll for messages, which are invisible to others meanwhile; empty when none came in time. Raises
        `QueueError`."""
        answer = self._call(
            "receive_message",
            MaxNumberOfMessages=self._settings.batch,
            WaitTimeSeconds=self._settings.wait_seconds,
            VisibilityTimeout=self._settings.visibility_seconds,
            AttributeNames=["SentTimestamp", "ApproximateReceiveCount"],
        )
        return [_message(found) for found in answer.get("Messages", ())]

    def extend_visibility(self, messages: Sequence[SqsMessage]) -> VisibilityExtender:
        """A context that keeps the messages invisible to others."""
        return VisibilityExtender(self, messages, self._settings.visibility_seconds)

    def delete(self, message: SqsMessage) -> None:
        """Delete a processed message. Raises `QueueError`; then it is delivered again."""
        self._call("delete_message", ReceiptHandle=message.receipt)

    def postpone(self, message: SqsMessage, seconds: int) -> None:
        """Deliver the message again after so many seconds. Raises `QueueError`."""
        self._call("change_message_visibility", ReceiptHandle=message.receipt, VisibilityTimeout=seconds)

    def extend(self, messages: Iterable[SqsMessage]) -> None:
        """Restart the visibility timeout. Raises `QueueError` when the request fails; a message that is visible again
        already is skipped."""
        entries = [
            {
                "Id": str(index),
                "ReceiptHandle": message.receipt,
                "VisibilityTimeout": self._settings.visibility_seconds,
            }
            for index, message in enumerate(messages)
        ]
        if entries:
            answer = self._call("change_message_visibility_batch", Entries=entries)
            for failed in answer.get("Failed", ()):
                logger.warning(
                    "visibility_not_extended", queue=self.url, reason=failed.get("Message") or failed.get("Code")
                )

    def send(self, body: str) -> str:
        """Put a message on the queue; returns its id. Raises `QueueError`."""
        return str(self._call("send_message", MessageBody=body)["MessageId"])

    def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = getattr(self._client, name)(QueueUrl=self.url, **arguments)
        except (ClientError, BotoCoreError) as error:
            raise QueueError(f"{self.url}: {name} failed: {error}") from error
        return answer


class VisibilityExtender:
    """Keeps messages invisible to others. It extends three times per timeout, so that one failure does no harm."""

    def __init__(self, queue: SqsQueue, messages: Sequence[SqsMessage], visibility_seconds: float) -> None:
        self._queue = queue
        self._messages = {message.receipt: message for message in messages}
        self._interval_seconds = visibility_seconds / 3
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sqs-visibility", daemon=True)

    def release(self, message: SqsMessage) -> None:
        """Stop extending the message; the caller controls its visibility from now on."""
        with self._lock:
            self._messages.pop(message.receipt, None)

    def __enter__(self) -> VisibilityExtender:
        if self._messages:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            # Under the lock, so that a released message isn't hidden again after it was postponed.
            with self._lock:
                try:
                    self._queue.extend(self._messages.values())
                except QueueError as error:
                    logger.warning("visibility_not_extended", queue=self._queue.url, reason=str(error))


def _message(found: dict[str, Any]) -> SqsMessage:
    attributes = found.get("Attributes", {})
    return SqsMessage(
        id=found["MessageId"],
        receipt=found["ReceiptHandle"],
        body=found["Body"],
        sent_at=datetime.fromtimestamp(int(attributes.get("SentTimestamp", 0)) / 1000, UTC),
        receives=int(attributes.get("ApproximateReceiveCount", 1)),
    )


def _make_client(settings: SqsSettings) -> Any:
    session = boto3.session.Session(
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        aws_session_token=settings.session_token,
        region_name=settings.region,
    )
    config = Config(
        connect_timeout=5,
        read_timeout=settings.wait_seconds + 20,  # an answer may take as long as the poll waits
        retries={"mode": "standard", "total_max_attempts": 4},
        user_agent_extra="tokenmill",
    )
    return session.client("sqs", endpoint_url=settings.endpoint, config=config)
