"""How near `estimate` comes: bench, estimate and the real run in turn, on the demo model and six workloads.

    python -m benchmarks.estimates [--model demo] [--only NAME ...] [--json benchmarks/results/estimates.json]

Time is the engine's, from a run's first step to its last: what a worker is paid for while it computes. Tokens are
prompts and answers. The ratio is the estimate over what was measured. `mixed`, `prefix` and `varied` are those of
`workloads/`; the others are made here of their texts: `fewshot`, in which half of the rows share one of three headers
of worked examples; `long`, prompts of some 1,500 tokens of their own, and short answers; and `ending`, in which
the model ends its answers itself. Elsewhere end tokens are ignored, so lengths of answers are known. Those of `ending`
are guessed; `corrected` says what the estimate is once a run has shown which part of max_tokens answers use.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
NAMES = ("mixed", "prefix", "varied", "fewshot", "long", "ending")
FRACTION = "TOKENMILL_PLAN__ANSWER_FRACTION"
RESULTS = Path(__file__).parent / "results" / "estimates.json"


def tokenmill(*arguments: object, **environment: str) -> Any:
    """What a command prints as JSON."""
    command = [sys.executable, "-m", "tokenmill", *map(str, arguments), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    if ended.returncode:
        sys.exit(f"{' '.join(command)}: {ended.stderr}")
    return json.loads(ended.stdout)


def workload(name: str, folder: Path) -> Path:
    """The file of a workload; one that is not kept is made in `folder`, the same each time."""
    kept = WORKLOADS / f"{name}.jsonl"
    if kept.exists():
        return kept
    draw = random.Random(name)
    questions = [_text(line) for line in (WORKLOADS / "mixed.jsonl").read_text(encoding="utf-8").splitlines()]
    prose = (WORKLOADS / "prose.txt").read_text(encoding="utf-8")
    if name == "fewshot":
        headers = ["\n\n".join([*draw.sample(questions, 3 + n), "Now yours:"]) for n in range(3)]
        rows = [(f"{draw.choice(headers)}\n{text}" if n % 2 else text) for n, text in enumerate(questions + questions)]
        bodies = [_body(f"{text} ({n})", draw.randint(8, 64)) for n, text in enumerate(rows)]
    elif name == "long":
        starts = draw.sample(range(len(prose) - 7000), 64)
        bodies = [_body(f"{draw.random()} {prose[at : at + 6000]}", draw.randint(2, 12)) for at in starts]
    else:
        bodies = [_body(text, draw.choice((64, 128, 256)), ignore_eos=False) for text in questions]
    draw.shuffle(bodies)
    made = folder / f"{name}.jsonl"
    lines = (
        {"custom_id": f"{name}-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n, body in enumerate(bodies)
    )
    made.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return made


def _text(line: str) -> str:
    """What a request's user says."""
    return str(json.loads(line)["body"]["messages"][-1]["content"])


def _body(text: str, max_tokens: int, *, ignore_eos: bool = True) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {
        "model": "demo", "messages": [message], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": ignore_eos,
    }  # fmt: skip


def guess_of(estimated: Any) -> dict[str, Any]:
    """What an estimate says, as `compare` has it."""
    there = estimated["times"][-1]
    return {
        "seconds": there["seconds"], "cost": there["cost"], "prompt_tokens": estimated["prompt_tokens"],
        "computed_prompt_tokens": estimated["prompt_tokens"] - estimated["shared_prefix_tokens"],
        "completion_tokens": estimated["expected_tokens"],
    }  # fmt: skip


def compare(model: str, name: str, speed: Path) -> dict[str, Any]:
    """One workload: estimated, and run."""
    with tempfile.TemporaryDirectory() as folder:
        path = workload(name, Path(folder))
        asked = ("estimate", path, "--model", f"demo={model}", "--measured", speed, "--price-per-hour", 1)
        estimated = tokenmill(*asked)
        out = Path(folder) / "out"
        ran = tokenmill("run", path, "--model", f"demo={model}", "-o", out, "--price-per-hour", 1)
        usage = ran["usage"]
        measured = {
            "seconds": ran["engine_seconds"], "busy_seconds": ran["busy_seconds"], "cost": ran["cost"],
            "prompt_tokens": usage["prompt"], "computed_prompt_tokens": usage["prompt"] - usage["cached"],
            "completion_tokens": usage["completion"], "drafted": usage["drafted"], "accepted": usage["accepted"],
        }  # fmt: skip

        def ratios(guess: dict[str, Any]) -> dict[str, float]:
            return {key: round(value / measured[key], 3) for key, value in guess.items() if measured[key]}

        guess = guess_of(estimated)
        found = {"workload": name, "estimated": guess, "measured": measured, "ratio": ratios(guess)}
        if name == "ending":
            fraction = usage["completion"] / estimated["max_tokens"]
            again = guess_of(tokenmill(*asked, **{FRACTION: str(fraction)}))
            found["corrected"] = {"answer_fraction": fraction, "estimated": again, "ratio": ratios(again)}
    return found


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
