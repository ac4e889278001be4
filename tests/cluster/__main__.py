"""Starts an installation on this machine, sends one file through every ingest source, and compares the answers.

    python -m tests.cluster INPUT --model MODEL [--folder DIR]

Real servers (S3 with SQS, Kafka, Redis), an intake, two dispatchers and two workers, each a process. INPUT goes in as
an object in the bucket, record by record over Kafka, by reference over Kafka, and once more as an object with tier
bulk. Then the answers are compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.cluster import Cluster, running_cluster
from tests.cluster.ingest import all_done, answers, by_source, num_messages, send
from tests.waiting import wait_for

PROCESSES = ("dispatcher-1", "dispatcher-2", "intake-1", "worker-1", "worker-2")


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
            wait_for(lambda: list(cluster.store().list("catalog/")), "no worker is up", seconds=120)
            begun = time.monotonic()
            send(cluster, args.input)
            print(f"{args.input.name} was sent to five ingest sources")
            rows = sum(bool(line.strip()) for line in args.input.read_bytes().splitlines())
            try:
                wait_for(lambda: all_done(cluster, rows), "the jobs did not end", seconds=args.seconds)
            except TimeoutError as error:
                print(f"{error}; so far:")
            ok = _report(cluster, rows, time.monotonic() - begun)
            codes = cluster.stop()
            print(f"all stopped processes ended with {sorted(set(codes.values()))}")
            return 0 if ok and not any(codes.values()) else 1


def _report(cluster: Cluster, rows: int, seconds: float) -> bool:
    texts: dict[str, list[tuple[str, str | None]]] = {}
    for source, jobs in sorted(by_source(cluster).items()):
        found = [row for job, manifest in sorted(jobs, reverse=True) if manifest.files for row in answers(cluster, job)]
        texts[source] = sorted((row["custom_id"] or "", row["text"]) for row in found)
        good = sum(row["status"] == "succeeded" for row in found)
        print(f"  {source:15} {len(jobs)} job(s), {len(found)} rows, {good} succeeded")
        for error in (error for _, manifest in jobs for error in manifest.errors):
            print(f"    {error.code}: {error.message}")
    same = len({tuple(found) for found in texts.values()}) == 1
    published = num_messages(cluster, 2 * rows)
    print(f"{seconds:.1f} s for all; the answers are {'the same' if same else 'NOT THE SAME'} by every source")
    print(f"results of Kafka's jobs published on Kafka: {published} of {2 * rows}")
    return same and published == 2 * rows


if __name__ == "__main__":
    sys.exit(main())
