"""A big job from end to end without a model: what planning, text, checkpoints and Parquet cost, and in what memory.

    python benchmarks/big_job.py --model MODEL --rows 1000000 [--kill-at 0.5] [--json OUT.json]

Makes an input of so many chat requests of about 1 KB (8 output tokens each), then runs it in a child process as
`tokenmill run` does, with the model's own tokenizer and an engine whose steps cost nothing. With `--kill-at` the child
gets SIGKILL when that share of the rows is committed, and a second one goes on. Reports rows a second, peak memory of
each process, how soon the first results stood, and what the second run read before its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
from throughput import machine

from pipeline.inputs.pinning import pin_input
from schemas.jobs.job import JobSettings, Tier
from schemas.jobs.plan import PlanSegment
from schemas.models import ModelPin
from tokenmill.config.engine_options import EngineOptions
from tokenmill.config.job_options import ChosenModel, known_input
from tokenmill.local.run_job import run_job
from tokenmill.local.run_plan import RunPlan, tokens_per_sequence
from tokenmill.local.tracker import RunTracker
from tokenmill.models.sources import ModelSource
from tokenmill.processes.logging import log_to_stderr
from workers.model.loaded_model import LoadedModel

OUTPUT_TOKENS = 8
NUM_BLOCKS = 8192


def write_input(path: Path, rows: int, seed: int) -> int:
    """Seeded requests of about 1 KB, all different; the bytes written."""
    chance = random.Random(seed)
    words = re.findall(r"[A-Za-z]{2,9}", (Path(__file__).parent / "README.md").read_text(encoding="utf-8"))
    systems = [" ".join(chance.choices(words, k=40)) for _ in range(50)]
    with path.open("wb") as out:
        for row in range(rows):
            system = systems[chance.randrange(len(systems))]
            user = f"{row}: " + " ".join(chance.choices(words, k=96))
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            body = {"model": "model", "messages": messages, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
            body["ignore_eos"] = True
            line = {"custom_id": f"request-{row}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            out.write(orjson.dumps(line) + b"\n")
        return out.tell()


def bytes_read() -> int:
    """Bytes that this process has asked to read so far, cached ones included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def peak_rss(pid: int | str = "self") -> int:
    """The most memory that a process has had resident, in bytes; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def children(pid: int) -> list[int]:
    """Processes that this one's threads have started: the planner."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:  # the thread is gone
            continue
    return found


class Null:
    """Loads the real tokenizer and an engine without a model; notes what was read before."""

    def __init__(self) -> None:
        self.read_at_start = bytes_read()
        self.read_before_loading = 0
        self.loaded_at = 0.0

    def load(self, plan: RunPlan, pin: ModelPin, segments: list[PlanSegment]) -> LoadedModel:
        self.read_before_loading = bytes_read() - self.read_at_start
        config = plan.engine.config(tokens_per_sequence(segments))
        model = LoadedModel.without_weights(
            Path(pin.source), name=pin.name, config=config, num_blocks=NUM_BLOCKS, digest=pin.digest
        )
        self.loaded_at = time.time()
        return model


def child(args: argparse.Namespace) -> None:
    """One run; a line of JSON says what it took. Logs go elsewhere: the pipe is read after the run has ended."""
    log_to_stderr()
    null = Null()
    out = Path(args.output)
    begun = time.time()
    plan = RunPlan(
        inputs=pin_input(Path(args.input), known_input(out)),
        models=(ChosenModel("model", ModelSource("model", args.model.resolve(), None, 0)),),
        output=out,
        tier=Tier.STANDARD,
        settings=JobSettings(),
        engine=EngineOptions(threads=1),
    )
    done = run_job(plan, RunTracker(), threading.Event(), null.load)
    assert done.manifest is not None
    counts = done.manifest.counts
    facts = {
        "seconds": time.time() - begun,
        "cpu_seconds": sum(os.times()[:4]),
        "rows_before": done.before,
        "rows": counts.total,
        "succeeded": counts.succeeded,
        "repeated_tokens": done.manifest.usage.repeated,
        "prompt_tokens": done.manifest.usage.prompt,
        "peak_rss_bytes": peak_rss(),
        "bytes_read_before_loading": null.read_before_loading,
        "seconds_to_loaded": null.loaded_at - begun,
    }
    print(json.dumps(facts))


def rows_committed(out: Path) -> int:
    """Rows in the parts that stand, from their footers; those seen before are not looked at again."""
    total = 0
    for path in (out / "results").glob("part-*.parquet"):
        if path.name not in _SEEN:
            _SEEN[path.name] = pq.read_metadata(path).num_rows
        total += _SEEN[path.name]
    return total


_SEEN: dict[str, int] = {}


def start(args: argparse.Namespace, source: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", "--model", str(args.model)]
    command += ["--input", str(source), "--output", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def follow(process: subprocess.Popen[str], out: Path, kill_after: int | None) -> dict[str, Any]:
    """Wait for the child, or kill it when so many rows are committed."""
    begun = time.time()
    peak, planner_peak, first_rows, killed = 0, 0, None, None
    while process.poll() is None:
        peak = max(peak, peak_rss(process.pid))
        planner_peak = max([planner_peak, *map(peak_rss, children(process.pid))])
        done = rows_committed(out)
        if done and first_rows is None:
            first_rows = time.time() - begun
        if kill_after is not None and done >= kill_after:
            planned = sum(1 for _ in (out / "plan").glob("*.json"))
            os.kill(process.pid, signal.SIGKILL)
            killed = {"rows_committed": done, "segments_planned": planned}
            process.wait()
            break
        time.sleep(0.2)
    seconds = time.time() - begun
    assert process.stdout is not None
    said = process.stdout.read()
    process.stdout.close()
    facts: dict[str, Any] = {"wall_seconds": seconds, "first_results_seconds": first_rows, "killed": killed}
    if killed is None:
        if process.returncode:
            raise SystemExit(f"the run ended with code {process.returncode}")
        facts |= json.loads(said.splitlines()[-1])
    facts["peak_rss_bytes"] = max(peak, facts.get("peak_rss_bytes", 0))
    return facts | {"planner_peak_rss_bytes": planner_peak}


def check(out: Path, rows: int) -> dict[str, Any]:
    """Every row exactly once, read as a user would: from the parts."""
    seen = np.zeros(rows, dtype=np.uint8)
    size = 0
    for path in sorted((out / "results").iterdir()):
        table = pq.read_table(path, columns=["row", "status", "completion_tokens"])
        np.add.at(seen, table["row"].to_numpy(), 1)
        size += path.stat().st_size
    assert (seen == 1).all(), f"{(seen == 0).sum()} rows are missing, {(seen > 1).sum()} came twice"
    segments = sorted((out / "plan").glob("*.json"))
    footers = sum(int.from_bytes(p.read_bytes()[-8:-4], "little") + 8 for p in (out / "results").iterdir())
    return {
        "rows_exactly_once": rows,
        "parts": sum(1 for _ in (out / "results").iterdir()),
        "result_bytes": size,
        "plan_bytes": sum(path.stat().st_size for path in segments),
        "segments": len(segments),
        "footer_bytes": footers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="a folder or a GGUF file")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-at", type=float, default=None, help="SIGKILL when this share of the rows is committed")
    parser.add_argument("--folder", type=Path, default=None, help="where input and output lie meanwhile")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--input", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    folder = Path(tempfile.mkdtemp(prefix="big-job-", dir=args.folder))
    try:
        source, out = folder / "in.jsonl", folder / "out"
        size = write_input(source, args.rows, args.seed)
        runs = []
        if args.kill_at is not None:
            runs.append(follow(start(args, source, out), out, round(args.kill_at * args.rows)))
            print(json.dumps(runs[-1]), file=sys.stderr)
        runs.append(follow(start(args, source, out), out, None))
        print(json.dumps(runs[-1]), file=sys.stderr)
        wall = sum(run["wall_seconds"] for run in runs)
        report = {
            "rows": args.rows,
            "input_bytes": size,
            "model": args.model.name,
            "model_bytes": args.model.stat().st_size if args.model.is_file() else None,
            "rows_per_second": args.rows / wall,
            "runs": runs,
            "check": check(out, args.rows),
            "machine": machine(),
        }
    finally:
        shutil.rmtree(folder)
    text = json.dumps(report, indent=2)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
