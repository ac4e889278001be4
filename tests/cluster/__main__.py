"""Starts an installation on this machine, sends one file in by every door, and shows what comes out.

    python -m tests.cluster INPUT --model MODEL [--folder DIR]

Real servers (S3 with SQS, Kafka, Redis), an intake, two dispatchers and two workers, each a process. INPUT goes in as
an object in the bucket, record by record over Kafka, by reference over Kafka, and by the bucket once more under its
tier bulk; then the answers are compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.ledger import RESULTS
from schemas.job import Manifest
from tests.cluster.cluster import BUCKET, Cluster, running_cluster, wait_for

PROCESSES = ("dispatcher-1", "dispatcher-2", "intake-1", "worker-1", "worker-2")


def send(cluster: Cluster, source: Path) -> None:
    """The file, by every door."""
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


def answers(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    """A job's results, in input order."""
    store, prefix = cluster.store(), f"jobs/{job}/{RESULTS}"
    tables = [pq.read_table(pa.BufferReader(store.read(info.key))) for info in store.list(prefix)]
    rows: list[dict[str, Any]] = pa.concat_tables(tables).sort_by("row").to_pylist()
    return rows


def told(cluster: Cluster, expected: int) -> int:
    """Results that Kafka's topic holds, once there are as many as expected."""
    from kafka import KafkaConsumer

    consumer = KafkaConsumer(
        "tokenmill.results", bootstrap_servers=cluster.kafka.bootstrap, auto_offset_reset="earliest", group_id=None
    )
    found: set[bytes] = set()
    until = time.monotonic() + 60
    while len(found) < expected and time.monotonic() < until:
        for records in consumer.poll(500).values():
            for record in records:
                found.add(dict(record.headers)["result_id"])
    consumer.close()
    return len(found)


def by_door(cluster: Cluster) -> dict[str, list[tuple[str, Manifest]]]:
    """Outcomes by the door that their jobs came by."""
    doors: dict[str, list[tuple[str, Manifest]]] = {}
    for job, manifest in cluster.outcomes().items():
        uri = cluster.ledger(job).job().input.uri
        for door, mark in (
            ("bucket, bulk", "/incoming/bulk/"),
            ("bucket", "/incoming/"),
            ("kafka jobs", "/elsewhere/"),
        ):
            if mark in uri:
                doors.setdefault(door, []).append((job, manifest))
                break
        else:
            doors.setdefault("kafka requests", []).append((job, manifest))
    return doors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("--model", required=True, help="MODEL or NAME=MODEL")
    parser.add_argument("--folder", type=Path, help="for logs and the servers' data; default: one that is removed")
    parser.add_argument("--seconds", type=float, default=600.0, help="the most that all of it may take")
    args = parser.parse_args()
    engine = ("--model", args.model, "--dtype", "float32", "--threads", "1", "--max-num-seqs", "32")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).absolute()
        with running_cluster(folder, engine, PROCESSES) as cluster:
            print(
                f"S3 and SQS at {cluster.s3.endpoint}, Kafka at {cluster.kafka.bootstrap}, Redis at {cluster.redis.url}"
            )
            print(f"processes: {', '.join(PROCESSES)}; logs in {folder}")
            wait_for(lambda: list(cluster.store().list("catalog/")), 120, "no worker is up")
            begun = time.monotonic()
            send(cluster, args.input)
            print(f"{args.input.name} was sent by four doors")
            rows = sum(bool(line.strip()) for line in args.input.read_bytes().splitlines())
            try:
                wait_for(lambda: _all_done(cluster, rows), args.seconds, "the jobs did not end")
            except TimeoutError as error:
                print(f"{error}; so far:")
            ok = _report(cluster, rows, time.monotonic() - begun)
            codes = cluster.stop()
            print(f"told to stop, all ended with {sorted(set(codes.values()))}")
            return 0 if ok and not any(codes.values()) else 1


def _all_done(cluster: Cluster, rows: int) -> bool:
    doors = by_door(cluster)
    whole = [sum(manifest.counts.total for _, manifest in jobs) for jobs in doors.values()]
    return (
        len(whole) == 4
        and all(total >= rows for total in whole)
        and len(cluster.jobs()) == sum(map(len, doors.values()))
    )


def _report(cluster: Cluster, rows: int, seconds: float) -> bool:
    texts: dict[str, list[tuple[str, str | None]]] = {}
    for door, jobs in sorted(by_door(cluster).items()):
        found = [row for job, manifest in sorted(jobs, reverse=True) if manifest.files for row in answers(cluster, job)]
        texts[door] = sorted((row["custom_id"] or "", row["text"]) for row in found)
        good = sum(row["status"] == "succeeded" for row in found)
        print(f"  {door:15} {len(jobs)} job(s), {len(found)} rows, {good} succeeded")
        for error in (error for _, manifest in jobs for error in manifest.errors):
            print(f"    {error.code}: {error.message}")
    same = len({tuple(found) for found in texts.values()}) == 1
    announced = told(cluster, 2 * rows)
    print(f"{seconds:.1f} s for all; the answers are {'the same' if same else 'NOT THE SAME'} by every door")
    print(f"results told on Kafka, of the jobs that came from there: {announced} of {2 * rows}")
    return same and announced == 2 * rows


if __name__ == "__main__":
    sys.exit(main())
