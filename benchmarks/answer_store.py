"""Planning with an answer store of any size: what a lookup costs where nothing is found, and where every row is.

    python -m benchmarks.answer_store --answers 1000000 --rows 1000 --rows 100000 [--json OUT.json]

The answers are those of one job, which the real planner plans and whose parts are written without a model. Then jobs
are planned into the same root, each in a process of its own: without the store, with it and other keys, and with it and
the keys of stored answers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.planning import ROOT, GeneratedInput, Peak, of_status
from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.answers.index import AnswerIndex
from pipeline.answers.job_answers import answers_for, store_job
from pipeline.jobs.manifest import build_manifest
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import JobOrder, submit
from pipeline.ledger.ledger import JOBS, JobLedger, part_key
from pipeline.ledger.records import PartSummary
from pipeline.ports import World
from pipeline.results.part_files import PartWriter, read_part, shard_results
from schemas.jobs.arrow_schemas import RESULT_FIELDS, result_schema
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from schemas.jobs.job import Job
from schemas.jobs.plan import PlanSegment, ShardRef
from schemas.models import ModelPin
from schemas.settings.answers import AnswerOptions

Case = Literal["off", "none", "all"]
"""Without the store; with it, where no row is found; with it, where every row is."""

INPUT: Final = InputRef(uri="generated", format=InputFormat.JSONL, files=(InputFile(uri="generated", size=0),))
RESPONSE: Final = json.dumps(
    {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "model",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "word " * 40}}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 40, "total_tokens": 60},
    }
)  # fmt: skip


def new_job(world: World, name: str, digest: str) -> tuple[JobLedger, Job]:
    """A job for a model of this digest."""
    ledger = JobLedger(world.store, f"{JOBS}{name}/")
    pin = ModelPin(name="model", source="model", digest=digest, dtype="float32")
    return ledger, submit(JobOrder(input=INPUT, models=(pin,)), ledger, world, job_id=name).job


def fill(world: World, rows: int, options: AnswerOptions) -> dict[str, Any]:
    """Store the answers of a job of so many rows."""
    ledger, job = new_job(world, "stored", "sha256:1")
    plan_job(ledger, job, world, open_input=lambda _: GeneratedInput(rows))
    segments: list[PlanSegment] = list(ledger.segments())
    for segment in segments:
        for shard in segment.shards:
            write_part(ledger, job, world, shard)
    parts = {number: read_part(ledger, number) for number, _ in ledger.parts()}
    manifest = build_manifest(ledger, job, segments, parts, world.clock.now(), None)
    index = AnswerIndex(world.store, world.clock, options)
    begun = time.monotonic()
    store_job(index, ledger, job, manifest, parts)
    return {
        "answers": rows,
        "parts": len(parts),
        "store_job_seconds": round(time.monotonic() - begun, 2),
        "bytes_per_answer": round(index.counts.snapshot()["bytes"] / rows, 1),
    }


def write_part(ledger: JobLedger, job: Job, world: World, shard: ShardRef) -> None:
    """The part of a shard, each of its rows with the same response."""
    table = pq.read_table(pa.BufferReader(ledger.read_shard(shard)))
    now: datetime = world.clock.now()
    values: dict[str, Any] = {
        "custom_id": table["custom_id"], "row": table["row"], "status": "succeeded", "status_code": 200,
        "text": "word " * 40, "finish_reason": "stop", "response": RESPONSE, "model": "model", "prompt_tokens": 20,
        "cached_tokens": 0, "completion_tokens": 40, "created_at": now, "started_at": now, "finished_at": now,
        "attempt": 1,
    }  # fmt: skip
    count = table.num_rows
    columns = [
        value if isinstance(value := values.get(field.name), pa.ChunkedArray)
        else pa.repeat(pa.scalar(value, field.type), count)
        for field in RESULT_FIELDS
    ]  # fmt: skip
    writer = PartWriter(world.scratch / f"part-{shard.number}", result_schema())
    writer.append(shard_results(pa.table(columns, schema=pa.schema(RESULT_FIELDS)), table))
    writer.finish(
        PartSummary(
            job=job.id, part=shard.number, attempt_id="a", worker="w", counts=writer.counts(), started_at=now,
            committed_at=now,
        )
    )  # fmt: skip
    ledger.create(part_key(shard.number), writer.path)


def plan_here(world: World, rows: int, case: Case, options: AnswerOptions) -> dict[str, Any]:
    """Plan one job in this process."""
    ledger, job = new_job(world, f"{case}-{rows}", "sha256:1" if case == "all" else "sha256:2")
    index = AnswerIndex(world.store, world.clock, options)
    opened = nullcontext() if case == "off" else answers_for(index, job, None, world.scratch)
    with Peak() as peak:
        begun, before = time.monotonic(), time.process_time()
        with opened as former:
            summary = plan_job(ledger, job, world, open_input=lambda _: GeneratedInput(rows), former=former)
        seconds, cpu = time.monotonic() - begun, time.process_time() - before
    assert summary is not None
    assert summary.reused == (rows if case == "all" else 0)
    return {
        "rows": rows, "case": case, "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2),
        "peak_without_mapped_files_mb": round(peak.bytes / 1e6, 1), "peak_mb": round(of_status("VmHWM") / 1e6, 1),
    }  # fmt: skip


def run_child(folder: Path, rows: int, case: str) -> dict[str, Any]:
    """One step in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.answer_store", "--root", str(folder), "--case", case]
    done = subprocess.run([*command, "--rows", str(rows)], stdout=subprocess.PIPE, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout)
    print(found, file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, action="append", required=True)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--root", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=["fill", *get_args(Case)], default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        with FolderStore(args.root) as store:
            world = World(store, SystemClock(), SystemRandomness(), store.scratch)
            options = AnswerOptions()
            made = (
                fill(world, args.rows[0], options)
                if args.case == "fill"
                else plan_here(world, args.rows[0], args.case, options)
            )
            print(json.dumps(made))
        return
    from benchmarks.throughput import machine

    with tempfile.TemporaryDirectory(prefix="answer-store-") as folder:
        filled = run_child(Path(folder), args.answers, "fill")
        runs = [run_child(Path(folder), rows, case) for rows in args.rows for case in get_args(Case)]
    text = json.dumps({"store": filled, "runs": runs, "machine": machine()}, indent=2)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
