"""A cascade of two models against each of them alone: cost, and agreement with the larger one, through two kills.

    python benchmarks/cascade.py --small demo --large MODEL [--rows 2000] [--agreement 0.9] [--kills 2] [--json FILE]

Each row is a review, for which a completion behind two examples gives JSON with its sentiment and stars. An answer is
accepted if it fits a JSON schema, and if its mean log-probability reaches a threshold that is chosen on a sample. The
cascade's process is killed (SIGKILL) once while the small model computes and once while the large one does, and started
again. Busy time is the engine's, so what was computed before a kill and not logged is not in it; `repeated` tokens are.

What it doesn't show: how well the models judge reviews. The reviews are made of a few phrases, and both models are
small. What is cut off by a kill before its first checkpoint leaves no trace in the costs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow.parquet as pq
from throughput import machine

from pipeline.jobs.cascade import equal

ROOT = Path(__file__).parents[1]
SCHEMA = {
    "type": "object",
    "properties": {"sentiment": {"enum": ["positive", "negative"]}, "stars": {"enum": [1, 2, 3, 4, 5]}},
    "required": ["sentiment", "stars"],
    "additionalProperties": False,
}
EXAMPLES = """Review: The soup was cold and the waiter was rude.
JSON: {"stars": 1, "sentiment": "negative"}
Review: A wonderful film, I would watch it again.
JSON: {"stars": 5, "sentiment": "positive"}
"""
THINGS = (
    "phone", "hotel", "book", "film", "soup", "jacket", "lamp", "bicycle", "course", "game", "camera", "tent", "garden",
    "train", "dentist",
)  # fmt: skip
GOOD = ("I love it", "it works perfectly", "better than I hoped", "everybody was kind", "worth every penny")
BAD = ("I regret it", "it never worked", "worse than I feared", "nobody cared", "a waste of money")
LINKS = ("and", "though", "because, honestly,", "while")


def write_rows(path: Path, rows: int) -> None:
    """Reviews of one or two phrases, some of them mixed."""
    draw = random.Random(7)
    with path.open("w") as stream:
        for row in range(rows):
            first, second = draw.choice((GOOD, BAD)), draw.choice((GOOD, BAD))
            review = f"The {draw.choice(THINGS)} we got in {draw.randint(1990, 2025)}: {draw.choice(first)}"
            review += f" {draw.choice(LINKS)} {draw.choice(second)}." if draw.random() < 0.6 else "."
            body = {
                "model": "small", "prompt": f"{EXAMPLES}Review: {review}\nJSON:", "max_tokens": 24, "temperature": 0,
                "stop": ["\n"],
            }  # fmt: skip
            line = {"custom_id": f"r{row}", "method": "POST", "url": "/v1/completions", "body": body}
            stream.write(json.dumps(line) + "\n")


def run(folder: Path, *options: str, kill_in: Path | None = None) -> int:
    """`tokenmill run` as a process; with `kill_in` it is killed when a checkpoint lies there. Returns its exit code."""
    command = [sys.executable, "-m", "tokenmill", "run", "in.jsonl", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
        while process.poll() is None:
            if kill_in is not None and any(kill_in.glob("work/*/*")):
                time.sleep(2.0)  # more than one checkpoint
                process.send_signal(signal.SIGKILL)
                process.wait()
            time.sleep(0.2)
    return process.returncode


def answers(results: Path) -> dict[int, dict[str, Any]]:
    """The results by row; each row is there once."""
    rows = pq.read_table(results, columns=["row", "status", "text", "served_by"]).to_pylist()
    found = {row["row"]: row for row in rows}
    assert len(found) == len(rows), "a row is there twice"
    return found


def agreement(one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> float:
    """The share of rows with equal answers."""
    assert one.keys() == other.keys(), "rows are missing"
    return sum(equal(one[row]["text"] or "", other[row]["text"] or "") for row in one) / len(one)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_rows(folder / "in.jsonl", options.rows)
    engine = ["--threads", str(options.threads), "--dtype", options.dtype, "--price-per-hour", "1"]
    alone, costs = {}, {}
    for name in ("small", "large"):
        assert run(folder, "--model", f"small={getattr(options, name)}", "--output", name, *engine) == 0
        alone[name] = answers(folder / name / "results")
        manifest = json.loads((folder / name / "manifest.json").read_text())
        costs[name] = {"busy_seconds": manifest["busy_seconds"], "cost": manifest["cost"], "usage": manifest["usage"]}
    (folder / "accept.json").write_text(json.dumps({"json_schema": SCHEMA}))
    cascade = [
        "--model", f"small={options.small}", "--then", f"large={options.large}", "--accept", "accept.json",
        "--output", "out", *engine,
    ]  # fmt: skip
    if options.agreement:
        cascade += ["--agreement", str(options.agreement), "--sample", str(options.sample)]
    kills = [folder / "out", folder / "out" / "cascade" / "1"][: options.kills]
    codes = [run(folder, *cascade, kill_in=kill) for kill in kills]
    assert run(folder, *cascade) == 0, (folder / "log").read_text()[-3000:]
    outcome = json.loads((folder / "out" / "cascade" / "cascade.json").read_text())
    merged = answers(folder / "out" / "cascade" / "merged.parquet")
    own = {row: alone[answer["served_by"]][row]["text"] == answer["text"] for row, answer in merged.items()}
    valid = {name: sum(is_valid(row["text"]) for row in found.values()) for name, found in alone.items()}
    return {
        "machine": machine(),
        "rows": options.rows,
        "kills": [code == -signal.SIGKILL for code in codes],
        "alone": costs,
        "fits_schema": {**valid, "cascade": sum(is_valid(row["text"]) for row in merged.values())},
        "agreement_with_large": {
            "small": agreement(alone["small"], alone["large"]),
            "cascade": agreement(merged, alone["large"]),
        },
        "rows_by_large": sum(row["served_by"] == "large" for row in merged.values()),
        "equal_to_that_model_alone": sum(own.values()),
        "outcome": outcome,
    }


def is_valid(text: str | None) -> bool:
    """Whether the text is JSON of the schema."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return False
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", default="demo")
    parser.add_argument("--large", required=True)
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--agreement", type=float, default=0.0, help="0: the schema alone decides")
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="where the jobs' folders stay")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="cascade-"))
    folder.mkdir(exist_ok=True)
    try:
        found = measure(options, folder)
    finally:
        if options.keep is None:
            shutil.rmtree(folder)
    text = json.dumps(found, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
