"""Who goes first, and who gets how much: priorities and tenants over real processes on real servers.

    python benchmarks/priorities.py --model MODEL [--urgent 10] [--seconds 40] [--json FILE]

Two null workers (see tests/cluster/null_worker.py), a dispatcher and an intake, on S3 (moto), Kafka and Redis. All
times and shares are read from the results' Parquet (`started_at`, `finished_at`, tokens), and from when a file was put
into the bucket.

urgent   bulk work fills both workers; every few seconds a small standard job with a near deadline is dropped: how long
         until its first row starts, and whether all its rows were in time;
floor    more standard work than the workers can do, beside bulk work: the share of tokens that bulk work gets (a
         twentieth at least);
tenants  one tenant drops ten times as much as another, with equal weights and with 3 to 1: their shares of tokens
         while both have work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.throughput import machine
from pipeline.ledger.ledger import RESULTS
from pipeline.models.catalog import Catalog
from schemas.jobs.arrow_schemas import result_schema
from tests.cluster.cluster import BUCKET, Cluster, running_cluster
from tests.waiting import wait_for

PROCESSES = ("dispatcher-1", "intake-1", "null-1", "null-2")
TOKENS = 60  # of an answer
URGENT_ROWS, URGENT_DEADLINE = 50, "20s"
STARTED = 120  # seconds that the processes have
COLUMNS = ("status", "prompt_tokens", "completion_tokens", "started_at", "finished_at")
NOTHING = pa.schema([result_schema().field(name) for name in COLUMNS]).empty_table()


@dataclass(frozen=True, slots=True)
class Drop:
    """A file that was put into the bucket, and when."""

    key: str
    at: datetime


def drop(cluster: Cluster, place: str, name: str, rows: int, **options: str) -> Drop:
    """Put a file of so many requests there; `options` go with it as metadata."""
    body = {"model": "null", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    lines = (
        {
            "custom_id": f"{name}-{row}",
            "method": "POST",
            "url": "/v1/completions",
            "body": body | {"prompt": f"Item {row} of {name}: describe it in one line."},
        }
        for row in range(rows)
    )
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    key = f"{place}{name}.jsonl"
    cluster.s3.client().put_object(Bucket=BUCKET, Key=key, Body=data, Metadata=options)
    return Drop(key, datetime.now(UTC))


def rows_of(cluster: Cluster, dropped: Drop) -> pa.Table:
    """What stands of the drop's results."""
    store = cluster.store()
    for job in cluster.jobs():
        if cluster.ledger(job).job().input.uri.endswith("/" + dropped.key):
            keys = [info.key for info in store.list(f"jobs/{job}/{RESULTS}")]
            tables = [pq.read_table(pa.BufferReader(store.read(key)), columns=list(COLUMNS)) for key in keys]
            return pa.concat_tables([NOTHING, *tables])
    return NOTHING


def whole(cluster: Cluster, dropped: Drop, rows: int) -> pa.Table:
    """All rows of the drop."""
    return wait_for(lambda: _if_whole(rows_of(cluster, dropped), rows), f"{dropped.key} did not end", seconds=300)


def _if_whole(table: pa.Table, rows: int) -> pa.Table | None:
    return table if len(table) == rows else None


def tokens_between(tables: list[pa.Table], begin: datetime, end: datetime) -> int:
    """Prompt and answer tokens of the rows that ended in between."""
    total = 0
    for table in tables:
        at = table["finished_at"].cast(pa.timestamp("us", "UTC"))
        inside = table.filter(pc.and_(pc.greater_equal(at, pa.scalar(begin)), pc.less(at, pa.scalar(end))))
        total += sum((pc.sum(inside[name]).as_py() or 0) for name in ("prompt_tokens", "completion_tokens"))
    return total


def urgent(cluster: Cluster, times: int) -> dict[str, Any]:
    """Standard jobs with a near deadline, while bulk work fills the workers."""
    dropped = []
    for number in range(times):
        dropped.append(drop(cluster, "incoming/", f"urgent-{number}", URGENT_ROWS, deadline=URGENT_DEADLINE))
        time.sleep(4)
    waits, spans, late = [], [], 0
    for one in dropped:
        table = whole(cluster, one, URGENT_ROWS)
        waits.append((pc.min(table["started_at"]).as_py() - one.at).total_seconds())
        spans.append((pc.max(table["finished_at"]).as_py() - one.at).total_seconds())
        late += URGENT_ROWS - pc.sum(pc.equal(table["status"], "succeeded")).as_py()
    return {
        "jobs": times,
        "first_row_seconds": {"median": statistics.median(waits), "worst": max(waits), "all": waits},
        "whole_job_seconds": {"median": statistics.median(spans), "worst": max(spans)},
        "rows_late": late,
    }


def floor(cluster: Cluster, bulk: list[Drop], seconds: float) -> dict[str, Any]:
    """More standard work than can be done; how much of the tokens is the bulk work's."""
    standard = [drop(cluster, "incoming/", f"standard-{number}", 20_000) for number in range(2)]
    wait_for(lambda: len(rows_of(cluster, standard[0])) > 0, "standard work did not begin", seconds=120)
    begin = datetime.now(UTC) + timedelta(seconds=2)
    time.sleep(seconds + 10)
    end = begin + timedelta(seconds=seconds)
    tokens = [tokens_between([rows_of(cluster, one) for one in of], begin, end) for of in (bulk, standard)]
    return {
        "seconds": seconds,
        "bulk_tokens": tokens[0],
        "standard_tokens": tokens[1],
        "share": tokens[0] / sum(tokens),
    }


def tenants(cluster: Cluster, seconds: float) -> dict[str, Any]:
    """Tenant "much" has ten times the load of tenant "little"; both always have some."""
    much = [drop(cluster, "much/incoming/", f"much-{number}", 8_000) for number in range(10)]
    little = [drop(cluster, "little/incoming/", f"little-{number}", 8_000) for number in range(1)]
    wait_for(
        lambda: min(len(rows_of(cluster, one[0])) for one in (much, little)) > 500, "a tenant has nothing", seconds=180
    )
    begin = datetime.now(UTC)
    time.sleep(seconds)
    end = datetime.now(UTC)
    time.sleep(6)  # what ended in the last seconds is committed
    left = 8_000 * len(little) - sum(len(rows_of(cluster, one)) for one in little)
    tokens = [tokens_between([rows_of(cluster, one) for one in of], begin, end) for of in (much, little)]
    return {"seconds": seconds, "much_tokens": tokens[0], "little_tokens": tokens[1], "ratio": tokens[0] / tokens[1],
            "little_rows_left": left}  # fmt: skip


def started(folder: Path, model: str, **variables: str) -> Any:
    """A cluster whose null workers compute at some thousand tokens per second."""
    return running_cluster(
        folder,
        engine=("--model", f"null={model}", "--max-num-seqs", "64", "--step-ms", "25"),
        processes=PROCESSES,
        TOKENMILL_PLAN__SHARD_TOKENS="3000",
        TOKENMILL_BUCKET__PREFIXES='{"incoming/": "default", "much/incoming/": "much", "little/incoming/": "little"}',
        TOKENMILL_BUCKET__SWEEP_INTERVAL_SECONDS="2",
        **variables,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a GGUF file, for its tokenizer")
    parser.add_argument("--urgent", type=int, default=10, help="urgent jobs")
    parser.add_argument("--seconds", type=float, default=40, help="of each window in which shares are taken")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    model = str(Path(args.model).resolve())
    found: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory(prefix="priorities-") as name, started(Path(name), model) as cluster:
        wait_for(lambda: Catalog(cluster.store()).entries(), "no worker is up", seconds=STARTED)
        bulk = [drop(cluster, "incoming/bulk/", f"bulk-{number}", 20_000) for number in range(2)]
        wait_for(lambda: len(rows_of(cluster, bulk[0])) > 500, "bulk work did not begin", seconds=120)
        found["urgent"] = urgent(cluster, args.urgent)
        print("urgent", json.dumps(found["urgent"]), file=sys.stderr, flush=True)
        found["floor"] = floor(cluster, bulk, args.seconds)
        print("floor", json.dumps(found["floor"]), file=sys.stderr, flush=True)
    for weights in ({}, {"much": 3}):
        with (
            tempfile.TemporaryDirectory(prefix="priorities-") as name,
            started(Path(name), model, TOKENMILL_TENANT_WEIGHTS=json.dumps(weights)) as cluster,
        ):
            wait_for(lambda: Catalog(cluster.store()).entries(), "no worker is up", seconds=STARTED)
            key = "tenants_3_to_1" if weights else "tenants_1_to_1"
            found[key] = tenants(cluster, args.seconds)
            print(key, json.dumps(found[key]), file=sys.stderr, flush=True)
    text = json.dumps(found, indent=1)
    if args.json is not None:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
