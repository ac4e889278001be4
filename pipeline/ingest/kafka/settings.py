"""Settings of Kafka ingest: topics and their tenants, batch sizes, and the consumer group."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.adapters.kafka.connection import KafkaConnection, KafkaSettingsError

_TOPIC = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,248}")
_UNLIMITED = 1 << 30
_FETCH_BYTES = 1 << 20
_EPOCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class KafkaIngestSettings:
    """Times in seconds, sizes in bytes.

    Attributes:
        requests, jobs: topic -> its tenant. Nothing in a message can change the tenant.
        epoch: identifies the topics on a cluster without topic ids: set a new one whenever a topic of the same name is
            recreated. None: the topics' own ids are used.
        start: start of a group that has committed nothing, or whose offset is out of the topic's range. "stop": ingest
            ends with an error.
        batch_records, batch_bytes, batch_seconds: a batch is stored when it has so many records, so many bytes of
            values, or when its first record has waited so long.
        max_value_bytes: a longer value becomes a dead letter.
        reply_topics: topics that a message's `reply_to` may name.
        uri_prefixes: tenant -> prefixes of the URIs that its jobs may name; each ends with "/".
        resend_window_seconds, resend_records: how long, and over how many of a partition's records, a repeated request
            is recognised as the producer's resend. 0 records: only within a batch.
        deadletter_retry_timeout_seconds: retry time-out of the dead-letter topic. After it only their objects in the
            store are written.
        first_retry_seconds, max_retry_seconds: first and maximum wait before a retry; it doubles in between.
        heartbeat_interval_seconds: interval of the group's heartbeats; at most a third of the session time-out.
        max_poll_interval_seconds: the broker declares a member dead that hasn't polled for so long; the consumer polls
            continuously.
        store_threads: number of partitions whose batches are stored concurrently.
    """

    connection: KafkaConnection
    requests: Mapping[str, str] = field(default_factory=lambda: {"tokenmill.requests": "default"})
    jobs: Mapping[str, str] = field(default_factory=lambda: {"tokenmill.jobs": "default"})
    deadletter_topic: str = "tokenmill.deadletter"
    group_id: str = "tokenmill-intake"
    epoch: str | None = None
    start: Literal["earliest", "latest", "stop"] = "earliest"
    batch_records: int = 5_000
    batch_bytes: int = 32 << 20
    batch_seconds: float = 2.0
    max_value_bytes: int = 10 << 20
    reply_topics: frozenset[str] = frozenset()
    uri_prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    resend_window_seconds: float = 300.0
    resend_records: int = 100_000
    deadletter_retry_timeout_seconds: float = 60.0
    poll_seconds: float = 0.2
    first_retry_seconds: float = 0.5
    max_retry_seconds: float = 30.0
    session_timeout_seconds: float = 45.0
    heartbeat_interval_seconds: float = 3.0
    max_poll_interval_seconds: float = 300.0
    call_timeout_seconds: float = 10.0
    store_threads: int = 4

    def __post_init__(self) -> None:
        if not self.requests and not self.jobs:
            raise KafkaSettingsError("kafka: no topic is read; name one under requests or jobs")
        twice = self.requests.keys() & self.jobs.keys()
        if twice:
            raise KafkaSettingsError(f"kafka: {', '.join(sorted(twice))} is under requests and under jobs; choose one")
        for topic in (*self.requests, *self.jobs, self.deadletter_topic, *self.reply_topics):
            if not _TOPIC.fullmatch(topic):
                raise KafkaSettingsError(f"kafka: {topic!r} is no topic that can be used; letters, digits and ._- only")
        if self.epoch is not None and not _EPOCH.fullmatch(self.epoch):
            raise KafkaSettingsError(f"kafka: epoch {self.epoch!r} must be letters, digits, _ and -; 64 at most")
        for tenant, prefixes in self.uri_prefixes.items():
            for prefix in prefixes:
                if "://" not in prefix or not prefix.endswith("/"):
                    raise KafkaSettingsError(
                        f"kafka: {tenant}'s URI prefix {prefix!r} must be like s3://bucket/folder/, with a / at its end"
                    )

    @property
    def topics(self) -> dict[str, str]:
        """All topics that are read, with their tenants."""
        return {**self.requests, **self.jobs}

    def consumer_options(self) -> dict[str, Any]:
        """Arguments of kafka-python's consumer. Only `KafkaIngest` commits offsets, and only committed transactions
        are read. A poll takes all fetched records: records that the client buffers for a partition that is then paused
        may never be returned (kafka-python 3.0), so fetches are kept small instead."""
        return self.connection.options() | {
            "group_id": self.group_id,
            "enable_auto_commit": False,
            "auto_offset_reset": "none" if self.start == "stop" else self.start,
            "isolation_level": "read_committed",
            "max_poll_records": _UNLIMITED,
            "max_partition_fetch_bytes": _FETCH_BYTES,
            "fetch_max_bytes": 16 * _FETCH_BYTES,
            "session_timeout_ms": int(self.session_timeout_seconds * 1000),
            "heartbeat_interval_ms": int(min(self.heartbeat_interval_seconds, self.session_timeout_seconds / 3) * 1000),
            "max_poll_interval_ms": int(self.max_poll_interval_seconds * 1000),
        }
