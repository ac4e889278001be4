"""Sends one file through every ingest source of a cluster, and reads the answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.ledger.ledger import RESULTS
from schemas.jobs.outcome import Manifest
from tests.cluster.cluster import BUCKET, Cluster
from tests.waiting import HANG_SECONDS

NUM_SOURCES = 5


def send(cluster: Cluster, source: Path) -> None:
    """Send the file through every ingest source."""
    from celery import Celery
    from kafka import KafkaProducer

    s3 = cluster.s3.client()
    data = source.read_bytes()
    s3.put_object(Bucket=BUCKET, Key=f"incoming/{source.name}", Body=data)
    s3.put_object(Bucket=BUCKET, Key=f"incoming/bulk/{source.name}", Body=data)
    s3.put_object(Bucket=BUCKET, Key=f"elsewhere/{source.name}", Body=data)
    producer = KafkaProducer(bootstrap_servers=cluster.kafka.bootstrap, enable_idempotence=False)
    reference = f'{{"uri": "s3://{BUCKET}/elsewhere/{source.name}"}}'
    producer.send("tokenmill.jobs", reference.encode())
    for line in data.splitlines():
        producer.send("tokenmill.requests", line, key=b"one-partition")
    producer.flush(30)
    producer.close()
    s3.put_object(Bucket=BUCKET, Key=f"by-task/{source.name}", Body=data)
    caller = Celery("a-caller", broker=cluster.redis.url, backend=cluster.redis.url)  # it has only task names
    uri = f"s3://{BUCKET}/by-task/{source.name}"
    job = caller.send_task("tokenmill.submit", args=[uri], queue="tokenmill").get(timeout=HANG_SECONDS)
    assert job in cluster.jobs(), job
    caller.close()


def answers(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    """A job's results, in input order."""
    store, prefix = cluster.store(), f"jobs/{job}/{RESULTS}"
    tables = [pq.read_table(pa.BufferReader(store.read(info.key))) for info in store.list(prefix)]
    rows: list[dict[str, Any]] = pa.concat_tables(tables).sort_by("row").to_pylist()
    return rows


def num_messages(cluster: Cluster, expected: int) -> int:
    """Distinct results that Kafka's topic holds, once there are as many as expected and no more come."""
    from kafka import KafkaConsumer

    consumer = KafkaConsumer(
        "tokenmill.results", bootstrap_servers=cluster.kafka.bootstrap, auto_offset_reset="earliest", group_id=None
    )
    found: set[bytes] = set()
    until = time.monotonic() + HANG_SECONDS
    while time.monotonic() < until:
        polled = consumer.poll(500)
        if len(found) >= expected and not polled:
            break
        for records in polled.values():
            for record in records:
                found.add(dict(record.headers)["result_id"])
    consumer.close()
    return len(found)


def by_source(cluster: Cluster) -> dict[str, list[tuple[str, Manifest]]]:
    """Outcomes of jobs by their ingest source."""
    sources: dict[str, list[tuple[str, Manifest]]] = {}
    for job, manifest in cluster.outcomes().items():
        uri = cluster.ledger(job).job().input.uri
        for source, mark in (
            ("bucket, bulk", "/incoming/bulk/"),
            ("bucket", "/incoming/"),
            ("kafka jobs", "/elsewhere/"),
            ("celery", "/by-task/"),
        ):
            if mark in uri:
                sources.setdefault(source, []).append((job, manifest))
                break
        else:
            sources.setdefault("kafka requests", []).append((job, manifest))
    return sources


def all_done(cluster: Cluster, rows: int, refused: int = 0) -> bool:
    """Whether each source has ended jobs of so many rows; over Kafka `refused` are invalid requests, and none is
    left."""
    sources = by_source(cluster)
    whole = [sum(manifest.counts.total for _, manifest in jobs) for jobs in sources.values()]
    return (
        len(whole) == NUM_SOURCES
        and all(total >= rows - refused for total in whole)
        and len(cluster.jobs()) == sum(map(len, sources.values()))
    )
