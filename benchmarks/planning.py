"""Plans jobs of any number of rows from a stream that is made while it is read: rows per second and peak memory.

    python -m benchmarks.planning --rows 1000000 --rows 10000000 [--json OUT.json]

Each job is planned by the real planner into a folder, in a process of its own. Memory is reported whole (the kernel's
high-water mark), and without pages of mapped files, which the system may drop whenever it wants them.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import JobOrder, submit
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.planner import SourceFile
from pipeline.ports import World
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from schemas.jobs.job import JobSettings, Tier
from schemas.models import ModelPin
from schemas.requests.limits import PlanSettings

PIECE = 4096
ROOT = Path(__file__).parents[1]


class Requests(io.RawIOBase):
    """`rows` small chat requests, all different, as lines of JSON that are never in memory together."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._pieces = self._made(rows)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go back to the start, after its first bytes were looked at."""
        if offset or whence != io.SEEK_SET:
            raise io.UnsupportedOperation("only the start can be sought")
        self._pieces, self._rest = self._made(self._rows), b""
        return 0

    def readinto(self, buffer: Any) -> int:
        while len(self._rest) < len(buffer) and (piece := next(self._pieces, b"")):
            self._rest += piece
        given, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(given)] = given
        return len(given)

    @staticmethod
    def _made(rows: int) -> Iterator[bytes]:
        words = re.findall(r"[A-Za-z]{2,9}", (ROOT / "benchmarks/README.md").read_text(encoding="utf-8"))
        for first in range(0, rows, PIECE):
            lines = []
            for row in range(first, min(rows, first + PIECE)):
                said = " ".join(words[row * 7 % 900 : row * 7 % 900 + 12])
                lines.append(
                    f'{{"custom_id": "request-{row}", "method": "POST", "url": "/v1/chat/completions", "body": '
                    f'{{"model": "model", "messages": [{{"role": "user", "content": "{row}: {said}"}}], '
                    f'"max_tokens": {8 + row % 57}, "temperature": 0}}}}\n'
                )
            yield "".join(lines).encode()


class GeneratedInput:
    """`PinnedInput` over such a stream."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def files(self) -> list[SourceFile]:
        return [SourceFile("generated.jsonl", lambda: Requests(self._rows))]  # type: ignore[arg-type,return-value]

    def check(self) -> None:
        """It can't change."""


class Peak:
    """The most memory of this process that is no mapped file's, while the block runs; bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.bytes = max(self.bytes, of_status("RssAnon"))


def of_status(name: str) -> int:
    """A figure of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def plan_here(rows: int, segment_rows: int | None) -> dict[str, Any]:
    """Plan one job in this process."""
    plan = PlanSettings() if segment_rows is None else PlanSettings(segment_rows=segment_rows)
    pin = ModelPin(name="model", source="model", digest="sha256:1", dtype="float32")
    given = InputRef(uri="generated.jsonl", format=InputFormat.JSONL, files=(InputFile(uri="generated.jsonl", size=0),))
    with tempfile.TemporaryDirectory(prefix="planning-") as folder, FolderStore(Path(folder)) as store, Peak() as peak:
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        ledger = JobLedger(store, f"{JOBS}job/")
        order = JobOrder(input=given, models=(pin,), settings=JobSettings(plan=plan), tier=Tier.STANDARD)
        job = submit(order, ledger, world, job_id="job").job
        begun, before = time.monotonic(), time.process_time()
        summary = plan_job(ledger, job, world, open_input=lambda _: GeneratedInput(rows))
        seconds, cpu = time.monotonic() - begun, time.process_time() - before
        assert summary is not None
        assert summary.total == summary.unique == rows
    return {
        "rows": rows,
        "seconds": round(seconds, 1),
        "rows_per_second": round(rows / seconds),
        "cpu_seconds": round(cpu, 1),
        "segments": len(summary.segments),
        "shards": sum(len(segment.shards) for segment in summary.segments),
        "peak_mb": round(of_status("VmHWM") / 1e6, 1),
        "peak_without_mapped_files_mb": round(peak.bytes / 1e6, 1),
    }


def plan_in_child(rows: int, segment_rows: int | None = None) -> dict[str, Any]:
    """`plan_here` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.planning", "--child", "--rows", str(rows)]
    command += [] if segment_rows is None else ["--segment-rows", str(segment_rows)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, action="append", required=True)
    parser.add_argument("--segment-rows", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(plan_here(args.rows[0], args.segment_rows)))
        return
    from benchmarks.throughput import machine

    runs = []
    for rows in args.rows:
        runs.append(plan_in_child(rows, args.segment_rows))
        print(runs[-1], file=sys.stderr, flush=True)
    text = json.dumps({"runs": runs, "machine": machine()}, indent=2)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
