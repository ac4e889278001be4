"""`Messages` on Kafka: sends are confirmed by all in-sync replicas, and an unconfirmed message is an error.

The client resends by itself until the delivery timeout; undelivered messages are then reported once, for all messages
of the call, and the caller sends all of them again. So delivery is at least once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kafka import KafkaProducer
from kafka.errors import KafkaError

from pipeline.adapters.kafka.connection import KafkaConnection
from pipeline.ports import Message, NotConfirmed

_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """Times in seconds.

    Attributes:
        idempotence: the broker drops messages that the client itself sends twice.
        max_block_seconds: how long one message may wait for metadata or memory.
        delivery_timeout_seconds: how long one message may take, resends included.
        linger_seconds: how long a message waits for others of its batch.
        max_bytes: the largest message; the broker's own limit must not be lower.
    """

    connection: KafkaConnection
    idempotence: bool = True
    max_block_seconds: float = 30.0
    delivery_timeout_seconds: float = 120.0
    linger_seconds: float = 0.005
    compression: Literal["gzip", "snappy", "lz4", "zstd"] | None = None
    max_bytes: int = 1_000_000

    def options(self) -> dict[str, Any]:
        """Arguments of kafka-python's producer."""
        return self.connection.options() | {
            "acks": "all",
            "enable_idempotence": self.idempotence,
            "max_block_ms": int(self.max_block_seconds * 1000),
            "delivery_timeout_ms": int(self.delivery_timeout_seconds * 1000),
            "linger_ms": int(self.linger_seconds * 1000),
            "compression_type": self.compression,
            "max_request_size": self.max_bytes,
        }


class KafkaSender:
    """Sends to one cluster. Connects at the first send; threads may share one."""

    def __init__(self, settings: ProducerSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._producer: Any = None

    @property
    def max_bytes(self) -> int:
        return self._settings.max_bytes

    def send(self, messages: Sequence[Message]) -> None:
        """See `Messages.send`."""
        waiting: list[Any] = []
        failed: list[KafkaError] = []
        try:
            producer = self._connected()
            for message in messages:
                headers = [(name, b"" if value is None else value) for name, value in message.headers]
                waiting.append(producer.send(message.topic, message.value, message.key, headers))
        except KafkaError as error:
            failed.append(error)
        deadline = self._settings.delivery_timeout_seconds + _GRACE_SECONDS
        for future in waiting:  # all of them: after a failure is reported, no message is in flight any more
            try:
                future.get(timeout=deadline)
            except KafkaError as error:
                failed.append(error)
        if failed:
            raise self._not_confirmed(messages, failed) from failed[0]

    def close(self) -> None:
        """Close the connection; sent messages are confirmed already."""
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            producer.close(timeout=_GRACE_SECONDS)

    def _connected(self) -> Any:
        with self._lock:
            if self._producer is None:
                self._producer = KafkaProducer(**self._settings.options())
            return self._producer

    def _not_confirmed(self, messages: Sequence[Message], failed: Sequence[KafkaError]) -> NotConfirmed:
        first = failed[0]
        topics = ", ".join(sorted({message.topic for message in messages}))
        what = f"{len(messages)} messages to {topics} were not confirmed ({type(first).__name__}: {first})"
        if all(error.retriable for error in failed):
            return NotConfirmed(f"kafka: {what}; they are sent again when the brokers answer", final=False)
        return NotConfirmed(f"kafka: {what}; check the topic, its rights and its limits", final=True)
