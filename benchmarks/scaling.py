"""What the autoscaler is worth, and what each size of an installation needs: simulated days, beside somebody who knows
all beforehand.

python -m benchmarks.scaling --json benchmarks/results/scaling.json

The worker is assumed (`EXAMPLE`), not measured, unless --worker names what `tokenmill bench --json` has printed.
Nothing here says how fast S3, Redis or the dispatcher's own loop is: they take no time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Final

from pipeline.dispatcher.load_shedding import JobDeadline, plan_shedding
from pipeline.simulator.lower_bound import OracleJob
from pipeline.simulator.report import report, tasks_of
from pipeline.simulator.settings import SimulationSettings
from pipeline.simulator.simulation import simulate
from pipeline.simulator.trace import Pattern, TraceSettings, draw_trace
from pipeline.simulator.worker_model import EXAMPLE, WorkerModel, read_worker_model
from schemas.settings.autoscaling import ScalingLimits

PATTERNS: Final[tuple[Pattern, ...]] = ("bursts", "ramp", "daynight", "spot-storm")
HOURS: Final = (3_600.0, 21_600.0)
MINUTES: Final = (900.0, 3_600.0)
SEEDS: Final = (0, 1, 2)
"""Of the traces; the policy's defaults were chosen on others (10 to 13)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One simulated day. `deadlines`: seconds, the shortest and the longest."""

    name: str
    pattern: Pattern
    gpus: int
    requests: int
    deadlines: tuple[float, float] = HOURS
    seed: int = 0
    gather: float = ScalingLimits().gather_seconds


def cases(worker: WorkerModel, largest: int) -> Iterator[Case]:
    """What is simulated."""
    a_day = worker.rows_per_second(worker.batch, 300.0, 200.0) * 86_400
    for seed in SEEDS:
        for pattern in PATTERNS:
            yield Case("a third busy", pattern, 16, round(16 / 3 * a_day), seed=seed)
            yield Case("deadlines of minutes", pattern, 32, round(32 * 0.15 * a_day), MINUTES, seed)
            yield Case("nearly full", pattern, 16, round(16 * 0.7 * a_day), seed=seed)
            yield Case("one GPU", pattern, 1, 10**6, seed=seed)
    yield Case("one GPU that gathers nothing", "daynight", 1, 10**6, gather=0.0)
    for gpus in (10, 100, 1_000):
        for pattern in ("daynight", "bursts") if gpus <= largest else ():
            yield Case("sizes", pattern, gpus, gpus * 10**6)


def met_as_they_come(tasks: list[OracleJob], most: int, ready: float) -> int:
    """Deadlines that the oracle's machines meet when they learn of a job only when it arrives: at each arrival and
    each end `plan_shedding` says which are given up, and of the others the earliest deadline goes first."""
    left = [task.work / most for task in tasks]
    coming = sorted(range(len(tasks)), key=lambda place: tasks[place].arrival)
    waiting: set[int] = set()
    now, met = ready, 0
    while coming or waiting:
        following = tasks[coming[0]].arrival if coming else inf
        while waiting and now < following:
            due = [JobDeadline(str(at), tasks[at].due - now, left[at]) for at in waiting if tasks[at].due < inf]
            lost = plan_shedding(due, 1.0).lost
            first = min(waiting, key=lambda at: (str(at) in lost, tasks[at].due))
            ran = min(left[first], following - now)
            now, left[first] = now + ran, left[first] - ran
            if left[first] <= 1e-9:
                waiting.remove(first)
                met += tasks[first].due < inf and now <= tasks[first].due + 1e-6
            waiting = {at for at in waiting if tasks[at].due > now}
        now = max(now, following) if following < inf else now
        while coming and tasks[coming[0]].arrival <= now:
            waiting.add(coming.pop(0))
    return met


def played(case: Case, worker: WorkerModel) -> dict[str, Any]:
    """The metrics of one case."""
    trace = draw_trace(case.pattern, TraceSettings(case.requests, deadlines=case.deadlines), case.seed)
    settings = SimulationSettings(
        worker, ScalingLimits(max_workers=case.gpus, gather_seconds=case.gather), seed=case.seed
    )
    begun = time.perf_counter()
    outcome = simulate(trace, settings)
    found = report(trace, settings, outcome)
    without = met_as_they_come(tasks_of(settings, outcome), case.gpus, worker.cold_start_seconds)
    return {
        "case": case.name, "pattern": case.pattern, "seed": case.seed, "gpus": case.gpus, "requests": case.requests,
        "gather": case.gather, "shards": found.shards,
        "deadlines": found.deadlines, "deadlines_met": found.deadlines_met,
        "deadlines_oracle": found.deadlines_oracle, "deadlines_without_foresight": without,
        "met_of_oracle": round(found.met_of_oracle, 4),
        "worker_hours": round(found.worker_hours, 1), "oracle_worker_hours": round(found.oracle_worker_hours, 1),
        "cost_over_oracle": round(found.cost_over_oracle, 3), "busy_share": round(found.busy_share, 3),
        "workers_peak": found.workers_peak, "oracle_peak": found.oracle_peak, "starts": found.starts,
        "interrupted": found.interrupted, "changes": found.changes,
        "changes_an_hour_max": found.changes_an_hour_max, "wait_p95": round(found.wait_p95),
        "longest_queue": found.longest_queue, "simulated_in": round(time.perf_counter() - begun, 1),
    }  # fmt: skip


def overloaded(worker: WorkerModel, seed: int) -> Iterator[dict[str, Any]]:
    """Bursts of more than 16 machines can do, and what makes deadlines be missed: each line takes one thing more away
    that an installation can't be without."""
    a_day = worker.rows_per_second(worker.batch, 300.0, 200.0) * 86_400
    trace = draw_trace("bursts", TraceSettings(round(16 * 0.7 * a_day)), seed)
    settings = SimulationSettings(worker, ScalingLimits(max_workers=16), seed=seed)
    for less in ("as it is", "no cold starts", "no errors of estimates", "no bulk work", "one tenant"):
        match less:
            case "no cold starts":
                settings = replace(settings, fixed_workers=16)
            case "no errors of estimates":
                settings = replace(settings, answer_error=0.0)
            case "no bulk work":
                trace = replace(trace, jobs=tuple(job for job in trace.jobs if job.deadline is not None))
            case "one tenant":
                trace = replace(trace, jobs=tuple(job.model_copy(update={"tenant": "all"}) for job in trace.jobs))
        outcome = simulate(trace, settings)
        found = report(trace, settings, outcome)
        told_late = met_as_they_come(
            tasks_of(settings, outcome), 16, 0.0 if settings.fixed_workers else worker.cold_start_seconds
        )
        yield {
            "less": less, "seed": seed, "deadlines": found.deadlines, "deadlines_met": found.deadlines_met,
            "deadlines_oracle": found.deadlines_oracle, "deadlines_without_foresight": told_late,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", type=Path, default=None)
    parser.add_argument("--largest", type=int, default=1_000, help="GPUs; 1,000 take a minute each")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    worker = EXAMPLE if args.worker is None else read_worker_model(args.worker)
    runs = []
    for case in cases(worker, args.largest):
        runs.append(played(case, worker))
        one = runs[-1]
        print(
            f"{case.name:22} {case.pattern:10} {case.gpus:5} GPUs: {one['deadlines_met']}/{one['deadlines_oracle']} of "
            f"{one['deadlines']} deadlines, {one['cost_over_oracle']:.3f} times the least cost, "
            f"{one['changes_an_hour_max']} changes an hour at most, {one['simulated_in']} s",
            flush=True,
        )
        if args.json is not None:
            write(args.json, worker, runs, [])
    overload = [line for seed in SEEDS for line in overloaded(worker, seed)]
    for line in overload:
        print(f"bursts of more than all can do, {line['less']}, and all above: {line}")
    if args.json is not None:
        write(args.json, worker, runs, overload)


def write(path: Path, worker: WorkerModel, runs: list[dict[str, Any]], overload: list[dict[str, Any]]) -> None:
    document = {"worker": worker.model_dump(), "runs": runs, "overload": overload}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
