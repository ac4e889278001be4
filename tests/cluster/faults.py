"""Injects seeded faults into a whole installation while jobs arrive by every ingest source, and checks the results.

    python -m tests.cluster.faults --seed 1 --faults 40 --worker null [--model MODEL] [--json OUT.json]

Real servers (S3 with SQS behind a proxy that fails, Kafka with its log in a bucket, Redis), two intakes, dispatchers
and workers each. Processes are killed and stopped, servers are killed and emptied, S3 is busy, slow, or loses its
responses; jobs are cancelled, expire and are retried while their parts are committed. Processes that died are restarted
as by an operator's supervisor. With each fault a small, urgent job is submitted; its end shows how long the fault had
effects. The seed determines the faults, their targets and times, and the jobs' contents.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq

from tests.cluster.cluster import ROOT, running_cluster
from tests.cluster.faults_checker import Checker
from tests.cluster.faults_evidence import Answer, Evidence, copy_jobs, read_topic
from tests.cluster.faults_injector import Injector
from tests.cluster.faults_load import Senders
from tests.cluster.faults_plan import (
    MODEL,
    PROCESSES,
    SCALES,
    Fault,
    JobInput,
    Scale,
    draw_faults,
    draw_probes,
    draw_races,
    draw_work,
)
from tests.cluster.faults_report import Outcome, document, machine, show
from tests.cluster.faults_watch import Watch
from tests.cluster.null_worker import ExpectedAnswers, read_meters
from tests.servers.moto import MotoServer
from tests.waiting import wait_for

START_SECONDS: Final = 120.0
CALM_SECONDS: Final = 60.0
END_SECONDS: Final = 240.0
"""Time after the last fault in which all jobs must end."""

TURN_SECONDS: Final = 0.05

VARIABLES: Final = {
    "null": {"MAX_SHARD_ROWS": "50", "FIRST_SEGMENT_ROWS": "200", "SEGMENT_ROWS": "400", "MIN_GROUP_ROWS": "16"},
    "demo": {"MAX_SHARD_ROWS": "6", "FIRST_SEGMENT_ROWS": "12", "SEGMENT_ROWS": "24", "MIN_GROUP_ROWS": "4"},
}
"""Small shards and segments, so that faults meet jobs that are planned, computed, committed and closed."""

ENGINES: Final = {
    "null": ("--max-num-seqs", "16", "--step-ms", "8"),
    "demo": ("--dtype", "float32", "--threads", "1", "--max-num-seqs", "8"),
}


@dataclass(frozen=True)
class Setup:
    """A run: all that can be chosen. `model`: as the command line takes it, without a name."""

    seed: int
    faults: int
    worker: str
    model: str
    folder: Path
    scale: Scale | None = None

    @property
    def sizes(self) -> Scale:
        return self.scale or SCALES[self.worker]

    @property
    def names(self) -> dict[str, str]:
        """Names of the plan's processes -> of the cluster's: null workers have another."""
        workers = "null" if self.worker == "null" else "worker"
        return {name: name.replace("worker", workers) for name in PROCESSES}


def run(setup: Setup) -> Outcome:
    """Strike, wait for the end, and judge. Raises when something can't be sent or doesn't start."""
    engine = ["--model", f"{MODEL}={setup.model}", *ENGINES[setup.worker]]
    meters = setup.folder / "meters"
    if setup.worker == "null":
        meters.mkdir(parents=True)
        engine += ["--meters", str(meters)]
    variables = {f"TOKENMILL_PLAN__{name}": value for name, value in VARIABLES[setup.worker].items()}
    variables["TOKENMILL_BUCKET__SWEEP_INTERVAL_SECONDS"] = "10"
    faults = draw_faults(setup.seed, setup.faults)
    processes = tuple(setup.names.values())
    with running_cluster(setup.folder, engine, processes, MotoServer, setup.seed, **variables) as cluster:
        wait_for(lambda: list(cluster.store().list("catalog/")), "no worker is up", seconds=START_SECONDS)
        senders = Senders(cluster, setup.seed)
        with Watch(cluster) as watch:
            probes = draw_probes(setup.seed, faults, setup.sizes)
            races = draw_races(setup.seed, faults, setup.sizes)
            injector = Injector(cluster, senders, watch, setup.names, probes, races)
            begun = time.monotonic()
            try:
                calm = [_calm_seconds(probe, senders, watch) for number, probe in probes.items() if number <= 0]
                _attack(injector, faults, setup)
                last = time.monotonic()
                left = _await_end(injector)
            finally:
                injector.close()
        ended = time.monotonic()
        by_kafka = sum(job_input.rows for job_input in senders.sent if job_input.source.startswith("kafka"))
        published = read_topic(cluster, "tokenmill.results", by_kafka)
        others = {name: read_topic(cluster, f"tokenmill.{name}") for name in ("requests", "jobs", "deadletter")}
        codes = cluster.stop()
        jobs = copy_jobs(cluster, setup.folder / "jobs")
    checker = Checker(
        Evidence(
            sent=tuple(senders.sent),
            reference=reference(setup, senders.sent),
            jobs=jobs,
            requests=others["requests"],
            references=others["jobs"],
            results=published,
            dead_letters=others["deadletter"],
            seen={key.removeprefix("jobs/"): digest for key, digest in watch.digests.items()},
            complaints=tuple(watch.complaints),
            sampled=read_meters(meters) if setup.worker == "null" else None,
        )
    )
    checker.judge()
    outcome = Outcome(setup.seed, setup.worker, faults, begun, last, ended, calm, injector, watch, senders, checker)
    outcome.judge(left, codes)
    return outcome


def _calm_seconds(probe: JobInput, senders: Senders, watch: Watch) -> float:
    """How long a small job takes before the first fault."""
    begun = time.monotonic()
    senders.send(probe)
    done = wait_for(
        lambda: watch.done_at(probe), f"{probe.label} did not end before the first fault", seconds=CALM_SECONDS
    )
    assert done is not None
    return done - begun


def _attack(injector: Injector, faults: Sequence[Fault], setup: Setup) -> None:
    """Strike with all faults, one after the other, while enough jobs are open."""
    work, given = draw_work(setup.seed, setup.sizes), list[JobInput]()
    for fault in faults:
        at = time.monotonic() + fault.gap
        while time.monotonic() < at or not injector.strike(fault):
            injector.poll()
            given = [job_input for job_input in given if injector.watch.done_at(job_input) is None]
            if len(given) < setup.sizes.at_once:
                given.append(next(work))
                injector.send(given[-1])
            time.sleep(TURN_SECONDS)
        print(f"  {fault.number:3} {fault.name} {fault.target} {fault.seconds or ''}", file=sys.stderr, flush=True)


def _await_end(injector: Injector) -> list[str]:
    """Wait until all sent jobs have ended and all faults are over; returns those that are not in time."""
    until = time.monotonic() + END_SECONDS
    while time.monotonic() < until:
        injector.poll()
        left = [job_input.label for job_input in injector.senders.sent if injector.watch.done_at(job_input) is None]
        left += injector.watch.still_open()
        if not left and not injector.busy:
            return []
        time.sleep(10 * TURN_SECONDS)
    return left or ["a process or a sender"]


def reference(setup: Setup, sent: Sequence[JobInput]) -> dict[str, Answer]:
    """What an undisturbed run answers, by custom_id: worked out for null workers, computed for a model."""
    lines = [line for job_input in sent for line in job_input.lines if line.error is None]
    if setup.worker == "null":
        bodies = [json.loads(line.text)["body"] for line in lines]
        texts = ExpectedAnswers(Path(setup.model)).texts(bodies)
        return {
            line.custom_id or "": Answer(text, "length", body["max_tokens"])
            for line, text, body in zip(lines, texts, bodies, strict=True)
        }
    source, out = setup.folder / "reference.jsonl", setup.folder / "reference"
    source.write_bytes(b"".join(line.text + b"\n" for line in lines))
    subprocess.run(
        [sys.executable, "-m", "tokenmill", "run", str(source), "--output", str(out), "--model",
         f"{MODEL}={setup.model}", "--dtype", "float32", "--threads", "1"],
        check=True, cwd=setup.folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    rows = pq.read_table(out / "results").to_pylist()
    return {row["custom_id"]: Answer(row["text"], row["finish_reason"], row["completion_tokens"]) for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="default: one by chance; it is printed")
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--worker", choices=sorted(SCALES), default="null")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file or a folder; default: the demo model")
    parser.add_argument("--folder", type=Path, help="for logs, the servers' data and the copied jobs")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed
    print(f"seed {seed}: {args.faults} faults, {args.worker} workers", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        outcome = run(Setup(seed, args.faults, args.worker, str(args.model or _demo()), folder))
        show(outcome)
        if args.json is not None:
            args.json.write_text(json.dumps({"machine": machine(), **document(outcome)}, indent=2) + "\n")
    return 1 if outcome.broken else 0


def _demo() -> Path:
    from tokenmill.config.job_options import choose_model
    from tokenmill.settings import read_settings

    return Path(choose_model("demo", read_settings().model_cache).source.path)


if __name__ == "__main__":
    sys.exit(main())
