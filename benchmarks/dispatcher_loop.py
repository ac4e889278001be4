"""How long one turn of the dispatcher's loop takes when very much is open.

    python -m benchmarks.dispatcher_loop --store folder|s3 --jobs 1 --shards 10000 [--json OUT.json]

Jobs of one row a shard are planned by hand into a folder or a SeaweedFS server. Then the job controller runs for some
seconds, as in `tokenmill dispatcher`, with Redis's part in this process, while a thread takes shards and commits them
at a steady pace. Reported: the turns' times, and how soon a cancelled job is seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.throughput import machine
from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.s3.store import S3Store
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.controller import JobController
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.ports import World
from pipeline.runtime.inline_executor import MAX_BACKGROUND_REQUESTS, MAX_CONCURRENT_REQUESTS, InlineExecutor
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.job import Closing
from tests.cluster.cluster import settings_of
from tests.pipeline.made_jobs import PIN, computed, plan_by_hand, report
from tests.servers.seaweedfs import SeaweedServer

SILENCE = 60.0
BUCKET = "loop"


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[World]:
    """A root in a folder, or in a bucket of a server that ends with the block."""
    clock, random = SystemClock(), SystemRandomness()
    if kind == "folder":
        with FolderStore(folder / "root") as store:
            yield World(store, clock, random, store.scratch)
        return
    with SeaweedServer(folder) as server:
        assert isinstance(server, SeaweedServer)
        server.ensure_bucket(BUCKET)
        with S3Store.from_url(f"s3://{BUCKET}", settings_of(server)) as bucket:
            yield World(bucket, clock, random, bucket.scratch)


def plan_jobs(world: World, jobs: int, shards: int) -> list[JobLedger]:
    """Open jobs of so many shards each."""
    ledgers = []
    for number in range(jobs):
        ledger = JobLedger(world.store, f"{JOBS}job-{number:05d}/")
        plan_by_hand(ledger, world, [[row] for row in range(shards)])
        ledgers.append(ledger)
    return ledgers


def worker(client: ShardClient, every: float, stop: threading.Event) -> Iterator[int]:
    """Commits a shard, again and again; yields how many so far."""
    done = 0
    while not stop.wait(every):
        work = client.take(0.0)
        client.send_heartbeat([])
        if work is not None:
            client.begin(work)
            client.commit(work, computed(work), report(work))
            done += 1
            yield done


def turns(tick: Callable[[], None], seconds: float, pause: float) -> list[float]:
    """Seconds that each turn took."""
    times, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.perf_counter()
        tick()
        times.append(time.perf_counter() - begun)
        time.sleep(pause)
    return times


def until_seen(tick: Callable[[], None], ledger: JobLedger, world: World, pause: float) -> float:
    """Seconds from the word that cancels the job to its outcome."""
    begun = time.monotonic()
    ledger.create_closing(Closing(kind="cancel", at=world.clock.now()))
    while ledger.manifest() is None:
        tick()
        time.sleep(pause)
    return time.monotonic() - begun


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with opened(args.store, folder) as world:
        begun = time.monotonic()
        ledgers = plan_jobs(world, args.jobs, args.shards)
        print(f"{args.jobs} jobs planned in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        queue, beats = MemoryQueue(), MemoryHeartbeats(world.clock, SILENCE)
        settings = DispatchSettings(isolate=True)
        # As `tokenmill dispatcher` does.
        together, beside = (
            InlineExecutor() if args.store == "folder" else ThreadPoolExecutor(threads)
            for threads in (MAX_CONCURRENT_REQUESTS, MAX_BACKGROUND_REQUESTS)
        )
        dispatcher = Dispatcher(world, queue, beats, settings=settings, together=together, beside=beside)
        controller = JobController(world, dispatcher)
        client = ShardClient(
            "w", world, lambda job: JobLedger(world.store, f"{JOBS}{job}/"), queue, beats, lambda: False,
            models=[PIN.key],
        )  # fmt: skip
        started = time.perf_counter()
        controller.tick()
        first = time.perf_counter() - started
        stop, done = threading.Event(), [0]

        def work() -> None:
            for done[0] in worker(client, 1 / args.pace, stop):
                pass

        thread = threading.Thread(target=work)
        thread.start()
        try:
            used = time.process_time()
            times = turns(controller.tick, args.seconds, 0.2)
            used = time.process_time() - used
        finally:
            stop.set()
            thread.join()
        facts = {
            "store": args.store,
            "jobs": args.jobs,
            "shards": args.shards,
            "first_turn_seconds": round(first, 3),
            "turns": len(times),
            "turn_seconds": {
                "median": round(statistics.median(times), 4),
                "p95": round(statistics.quantiles(times, n=20)[-1], 4),
                "max": round(max(times), 4),
            },
            "cpu_share": round(used / args.seconds, 3),
            "shards_committed": done[0],
        }
        if args.jobs > 1:
            facts["seconds_to_cancel"] = round(until_seen(controller.tick, ledgers[-1], world, 0.2), 2)
        controller.close()
        together.shutdown()
        beside.shutdown()
        return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=("folder", "s3"), default="folder")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--shards", type=int, default=10_000, help="of each job")
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--pace", type=float, default=5.0, help="shards committed a second, at most")
    parser.add_argument("--json", type=Path, default=None, help="results are added to those in the file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dispatcher-loop-") as folder:
        facts = measure(args, Path(folder))
    print(json.dumps(facts, indent=2))
    if args.json:
        known = json.loads(args.json.read_text()) if args.json.exists() else {}
        known |= {f"{args.store}, {args.jobs} x {args.shards}": facts, "machine": machine()}
        args.json.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
