"""What a step costs outside the model: scheduling and taking the tokens of 256 decoding sequences.

    python benchmarks/scheduler.py [--json FILE]

Milliseconds per step (schedule + update), for plain and sliding-window caches, with and without prefix caching, and
behind a queue of 20,000 waiting requests.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from throughput import machine

from engine import Request, SamplingParams, ScheduleConfig
from engine.plan import CacheGroup
from engine.scheduler.scheduler import Scheduler

ROWS = 256
STEPS = 300
BLOCK = 32


def measure(*, caching: bool, window: bool, waiting: int) -> dict[str, Any]:
    """Time `STEPS` steps that decode all rows."""
    blocks = ROWS * 40 + 1
    groups = (CacheGroup((0,), None, blocks), *((CacheGroup((1,), 512, blocks),) if window else ()))
    config = ScheduleConfig(max_num_seqs=ROWS, max_num_batched_tokens=8192)
    scheduler = Scheduler(config, groups, BLOCK, 1024, prefix_caching=caching, eos_token_ids=(1, 2))
    random = np.random.default_rng(0)
    for i in range(ROWS + waiting):
        prompt = random.integers(3, 1000, random.integers(16, 200)).astype(np.int32)
        scheduler.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=800)), 0.0)
    times = []
    while len(times) < STEPS:
        begun = time.perf_counter()
        plan = scheduler.schedule(0.0)
        planned = time.perf_counter()
        assert plan is not None
        tokens, failed = np.full(len(plan.rows), 7, np.int32), np.zeros(len(plan.rows), np.bool_)
        given = time.perf_counter()
        scheduler.update(plan, tokens, failed, 0.0)
        if plan.num_decodes == ROWS:
            times.append(planned - begun + time.perf_counter() - given)
    p50, p95, p99 = (round(float(p) * 1e3, 3) for p in np.percentile(times, [50, 95, 99]))
    return {"prefix_caching": caching, "window": window, "waiting": waiting, "p50": p50, "p95": p95, "p99": p99}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    cases = [
        measure(caching=caching, window=window, waiting=0) for caching in (False, True) for window in (False, True)
    ]
    cases.append(measure(caching=True, window=False, waiting=20_000))
    for case in cases:
        print(case)
    if args.json:
        report = {"machine": machine(), "rows": ROWS, "steps": STEPS, "unit": "ms per step", "cases": cases}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
