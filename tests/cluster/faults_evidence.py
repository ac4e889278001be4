"""The evidence of a run: its inputs, Kafka's topics, and the jobs' records and Parquet files as users read them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.cluster.cluster import BUCKET, Cluster
from tests.cluster.faults_plan import JobInput

QUIET_SECONDS: Final = 3.0
"""A topic without a record for this long is read to its end, because this broker's end offsets are unreliable."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A row's answer in an undisturbed run."""

    text: str
    finish_reason: str
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A Kafka record. `location`: topic/partition/offset."""

    location: str
    key: bytes | None
    value: bytes
    headers: Mapping[str, bytes]


@dataclass(frozen=True)
class Evidence:
    """The input of the checker.

    Attributes:
        sent: the inputs.
        reference: custom_id -> the row's answer if it succeeded.
        jobs: a folder with ID/results/part-*.parquet, ID/manifest.json and ID/closing.json.
        requests, references, results, dead_letters: records of Kafka's topics of requests, jobs,
            results and dead letters.
        seen: "ID/results/part-…" -> sha256, of parts that a reader saw during the run.
        complaints: violations that this reader found.
        sampled: tokens that all workers have sampled, if they were counted.
    """

    sent: tuple[JobInput, ...]
    reference: Mapping[str, Answer]
    jobs: Path
    requests: tuple[TopicRecord, ...] = ()
    references: tuple[TopicRecord, ...] = ()
    results: tuple[TopicRecord, ...] = ()
    dead_letters: tuple[TopicRecord, ...] = ()
    seen: Mapping[str, str] = field(default_factory=dict)
    complaints: tuple[str, ...] = ()
    sampled: int | None = None


def copy_jobs(cluster: Cluster, to: Path) -> Path:
    """The results and records of all jobs, as `aws s3 sync` would bring them."""
    s3 = cluster.s3.client()
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="jobs/"):
        for entry in page.get("Contents", []):
            _, job, rest = entry["Key"].split("/", 2)
            if rest.startswith("results/") or rest in ("manifest.json", "closing.json"):
                path = to / job / rest
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(s3.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read())
    return to


def read_topic(
    cluster: Cluster, topic: str, at_least: int = 0, timeout_seconds: float = 60.0
) -> tuple[TopicRecord, ...]:
    """All of a topic: until nothing more comes and `at_least` different results are there, or the timeout ends."""
    from kafka import KafkaConsumer

    consumer = KafkaConsumer(
        topic, bootstrap_servers=cluster.kafka.bootstrap, auto_offset_reset="earliest", group_id=None
    )
    found: list[TopicRecord] = []
    known: set[bytes] = set()
    until, last = time.monotonic() + timeout_seconds, time.monotonic()
    try:
        while time.monotonic() < last + QUIET_SECONDS or (len(known) < at_least and time.monotonic() < until):
            for records in consumer.poll(500).values():
                last = time.monotonic()
                for record in records:
                    headers = dict(record.headers)
                    known.add(headers.get("result_id") or record.value)
                    location = f"{record.topic}/{record.partition}/{record.offset}"
                    found.append(TopicRecord(location, record.key, record.value, headers))
    finally:
        consumer.close()
    return tuple(found)
