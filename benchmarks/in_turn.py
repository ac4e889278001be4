"""Run two benchmark commands in turn (A B A B …), so that a machine whose speed drifts is the same for both.

    python benchmarks/in_turn.py --rounds 3 --json OUT.json --a "COMMAND A" --b "COMMAND B"

Each command prints, as its last line on stdout, JSON with `output_tokens_per_second` {median, …}; the ratio A / B is
taken round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any


def measure(command: str) -> dict[str, Any]:
    """Run one command and read its last line."""
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", required=True)
    parser.add_argument("--b", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    rounds = []
    for i in range(args.rounds):
        a, b = measure(args.a), measure(args.b)
        rates = [run["output_tokens_per_second"]["median"] for run in (a, b)]
        load = os.getloadavg()[0]
        rounds.append({a["engine"]: rates[0], b["engine"]: rates[1], "ratio": rates[0] / rates[1], "load": load})
        print(f"round {i}: {rates[0]:.1f} / {rates[1]:.1f} = {rates[0] / rates[1]:.2f}", file=sys.stderr, flush=True)
    ratios = [r["ratio"] for r in rounds]
    report = {
        "a": args.a,
        "b": args.b,
        "rounds": rounds,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report["ratio"]))


if __name__ == "__main__":
    main()
