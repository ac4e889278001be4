"""How near `estimate` comes: bench, estimate and the real run in turn, on the demo model and three workloads.

    python -m benchmarks.estimates [--model demo] [--json benchmarks/results/estimates.json]

Time is the engine's, from a run's first step to its last: what a worker is paid for while it computes. Tokens are
prompts and answers. The ratio is the estimate over what was measured. The workloads are those of `workloads/`; end
tokens are ignored, so lengths of answers are known: what the ratio does not show is how well answers' lengths are
guessed where the model may end them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.process import busy_seconds
from benchmarks.throughput import machine

WORKLOADS = Path(__file__).parent / "workloads"
NAMES = ("mixed", "prefix", "varied")
RESULTS = Path(__file__).parent / "results" / "estimates.json"


def tokenmill(*arguments: object) -> Any:
    """What a command prints as JSON."""
    command = [sys.executable, "-m", "tokenmill", *map(str, arguments), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}: {ended.stderr}")
    return json.loads(ended.stdout)


def compare(model: str, name: str, speed: Path) -> dict[str, Any]:
    """One workload: estimated, and run."""
    path = WORKLOADS / f"{name}.jsonl"
    estimated = tokenmill("estimate", path, "--model", model, "--measured", speed, "--price-per-hour", 1)
    there = estimated["times"][-1]
    with tempfile.TemporaryDirectory() as folder:
        ran = tokenmill("run", path, "--model", model, "-o", Path(folder) / "out", "--price-per-hour", 1)
    usage = ran["usage"]
    measured = {
        "seconds": ran["engine_seconds"], "busy_seconds": ran["busy_seconds"], "cost": ran["cost"],
        "prompt_tokens": usage["prompt"], "computed_prompt_tokens": usage["prompt"] - usage["cached"],
        "completion_tokens": usage["completion"], "drafted": usage["drafted"], "accepted": usage["accepted"],
    }  # fmt: skip
    guess = {
        "seconds": there["seconds"], "cost": there["cost"], "prompt_tokens": estimated["prompt_tokens"],
        "computed_prompt_tokens": estimated["prompt_tokens"] - estimated["shared_prefix_tokens"],
        "completion_tokens": estimated["expected_tokens"],
    }  # fmt: skip
    ratios = {key: round(value / measured[key], 3) for key, value in guess.items() if measured[key]}
    return {"workload": name, "estimated": guess, "measured": measured, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", choices=NAMES, action="append")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    busy, began = busy_seconds(), time.time()
    with tempfile.TemporaryDirectory() as folder:
        speed = tokenmill("bench", "--model", given.model, "--repeats", given.repeats, "--rows", 20)
        file = Path(folder) / "speed.json"
        file.write_text(json.dumps(speed))
        found = []
        for name in given.only or NAMES:
            found.append(compare(given.model, name, file))
            print(name, found[-1]["ratio"], flush=True)
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    others = (busy_seconds() - busy - own.ru_utime - own.ru_stime) / (time.time() - began)
    document = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(),
        "cores_used_by_others": round(max(0.0, others), 3), "model": given.model,
        "command": "python -m benchmarks.estimates", "bench": speed, "workloads": found,
    }  # fmt: skip
    given.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
