"""A pipeline of three columns, and the three single calls, without a model: what chaining costs.

    python -m benchmarks.columns --model FOLDER --rows 10000 --rounds 3 [--json OUT.json]

The null engine gives random tokens, so all time is that of planning, tokenizing, scheduling, validation, results and
the table. Each round runs the single calls and the pipeline in turn, each in a process of its own; the ratio is taken
round by round. Both load the model once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

import tokenmill as tm
from schemas.jobs.plan import PlanSegment
from schemas.models import ModelPin
from tokenmill.frames.resident import ResidentModel
from tokenmill.local.run_plan import RunPlan
from workers.model.loaded_model import LoadedModel

ROOT: Final = Path(__file__).parent.parent
WAYS: Final = ("single calls", "pipeline")
NUM_BLOCKS: Final = 20_000
TEXT: Final = "The parcel came two days late, and the lid of the box was broken. "


class NullModel(ResidentModel):
    """A model that stays loaded: the tokenizer of a folder, and an engine without weights."""

    _null: LoadedModel | None = None

    def _load(self, plan: RunPlan, pin: ModelPin, _: list[PlanSegment] | None) -> LoadedModel:
        if self._null is None:
            self._null = LoadedModel.without_weights(
                Path(pin.source), name=pin.name, config=plan.engine.config(), num_blocks=NUM_BLOCKS, digest=pin.digest
            )
        return self._null

    def _release(self) -> None:
        self._null = None


def accepts(answer: str, row: dict[str, Any]) -> bool:
    """The validator: it refuses a fifth of the answers."""
    return zlib.crc32(f"{row['id']} {answer}".encode(errors="replace")) % 5 > 0


def steps() -> dict[str, dict[str, Any]]:
    """The arguments of each column's call."""
    return {
        "answer": {"prompt": "{{ text }}\nAnswer the customer.", "validate": accepts, "max_tries": 3, "max_tokens": 16},
        "grade": {"prompt": "{{ text }}\n{{ answer }}\nGrade this.", "max_tokens": 8},
        "subject": {"prompt": "{{ answer }}\nWrite a subject.", "max_tokens": 8},
    }


def child(model: Path, rows: int, way: str, folder: Path) -> dict[str, Any]:
    """One run; what it took."""
    table = pa.table({"id": range(rows), "text": [f"{n}. {TEXT * (1 + n % 3)}" for n in range(rows)]})
    loaded = NullModel(f"null={model}", {"threads": 1})
    begun, cpu = time.monotonic(), time.process_time()
    if way == "pipeline":
        made = tm.pipeline([tm.step(name, **given) for name, given in steps().items()], model=loaded)
        table = made.run(table, output_dir=folder / "out")
    else:
        for name, given in steps().items():
            table = tm.map(table, model=loaded, output_column=name, output_dir=folder / name, **given)
    seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
    tries = sum(table["answer_tries"].to_pylist())
    done = {name: rows - table[name].null_count for name in steps()}
    return {"way": way, "rows": rows, "seconds": seconds, "cpu_seconds": cpu, "answers": done, "tries": tries}


def run_child(model: Path, rows: int, way: str) -> dict[str, Any]:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="columns-") as folder:
        command = [sys.executable, "-m", "benchmarks.columns", "--model", str(model), "--rows", str(rows)]
        done = subprocess.run(
            [*command, "--way", way, "--folder", folder], stdout=subprocess.PIPE, check=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    print(found, file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--way", choices=WAYS, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        print(json.dumps(child(args.model, args.rows, args.way, args.folder)))
        return
    from benchmarks.throughput import machine

    rounds = [[run_child(args.model, args.rows, way) for way in WAYS] for _ in range(args.rounds)]
    ratios = {
        kind: [pipeline[kind] / single[kind] for single, pipeline in rounds] for kind in ("seconds", "cpu_seconds")
    }
    report = {
        "rounds": rounds,
        "pipeline_over_single_calls": {
            kind: {"median": statistics.median(found), "min": min(found), "max": max(found)}
            for kind, found in ratios.items()
        },
        "machine": machine(),
    }
    text = json.dumps(report, indent=2)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
